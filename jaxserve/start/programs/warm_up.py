"""WarmUp: makes the programs of a StartPlan, and a Runner of them and the placed weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled

from jaxserve.execution.buckets import (
    LOAD_SLOT,
    PROJECT,
    SCORE,
    SET_ROWS,
    STATE,
    Bucket,
    Key,
    Sampler,
    SmallProgram,
)
from jaxserve.execution.hosts.group import Group, Leader
from jaxserve.execution.hosts.replay import Padding, Replay, led
from jaxserve.execution.runner import CompileCounter, OnProgress, Programs, Runner
from jaxserve.execution.state import DeviceState, StepOutput
from jaxserve.settings.config import cpu_threads
from jaxserve.start.garbage import collection_paused, return_memory
from jaxserve.start.plan.bucket_plan import (
    BucketPlan,
    anchors,
    buckets_of,
    busy_seconds,
    choose_sizes,
    padding_seconds,
)
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs.behind import COMPILE_SECONDS, ProgramsBehind
from jaxserve.start.programs.fingerprint import open_store
from jaxserve.start.programs.settling import settled, temporary_bytes_of
from jaxserve.start.programs.suppliers import Compiling, CompilingThreads, ProgramSupplier, Stored
from jaxserve.start.report import StartReport
from pallas_kernels.devices import target_device

_COMPILE_THREADS = 4


class WarmUp:
    """Compiles the programs of an engine before requests come, and makes its runner.

    Args:
        plan: plan of the start.
        directory: folder of compiled programs, or None to keep no files.
        report: report of the start, which receives the facts about its programs.
        group: hosts that the engine runs on, or None for this host alone.

    Attributes:
        plan: the plan with the KV cache that the compiled largest launch leaves room for. `run`
            adds the memory of the launches.
        buckets: padded sizes to compile.
        store: store of the programs.
        supplier: supplier of the programs.

    Raises:
        InvalidRequest: there is no memory for two pages of KV cache.
    """

    def __init__(
        self,
        plan: StartPlan,
        directory: Path | None = None,
        report: StartReport | None = None,
        group: Group | None = None,
    ) -> None:
        self._group = group
        # On a GPU, XLA measures kernels on arrays as large as a weight while it compiles, so the
        # cache must not occupy that memory yet.
        self._compile_first = plan.platform != "cpu"
        self._counter = CompileCounter()
        self.buckets = plan.buckets
        self.store = open_store(directory, plan)
        self.report = report or StartReport()
        self.report.device, self.report.store = str(target_device()), self.store
        self.report.bucket_plan = BucketPlan.of(self.buckets)
        self.store.timeline = self.report.timeline
        self.plan, largest = settled(plan, self.store)
        if group is not None:
            counts = group.settle({}, self.plan.counts)
            if counts != self.plan.counts:
                self.plan, largest = self.plan.with_counts(counts), None
        self.report.plan = self.plan
        compiling = Compiling(self.plan, self.store)
        self.supplier: ProgramSupplier = compiling
        self._compiler = compiling.compiler
        self._threads = CompilingThreads(self.supplier, min(_COMPILE_THREADS, cpu_threads()))
        if largest is not None:
            self._threads.put(self.buckets.largest, largest)
        self._leaves: list[jax.Array] = []
        self._temporary_bytes = 0
        self._steps: dict[Bucket, Compiled] = {}
        self._others: list[Key] = []
        self._state: DeviceState | None = None
        self._make_state: Callable[[], DeviceState] | None = None
        self._waits_for_all = (
            plan.config.wait_for_all_programs
            or group is not None
            or self._compile_first
            or self.store.folder is None  # background programs come from files
        )

    def begin(self) -> None:
        """Start threads that compile the programs of the first answer. No weights are needed."""
        if self._others:
            return
        if not self._waits_for_all:
            notes = None if self.plan.names_sizes else self.store.notes()
            if notes is not None:
                self._take(BucketPlan.from_notes(notes))
            self._threads.submit(self._first_steps())
        later = () if self._waits_for_all else self.plan.samplers[:-1]
        self._others = [key for key in self.plan.other_programs if key not in later]
        self._threads.submit(self._others)

    def close(self, wait: bool = True) -> None:
        """End the compilations of programs that `begin` started. `wait`: for running ones."""
        self._threads.close(wait)

    def run(self, leaves: list[jax.Array], on_progress: OnProgress | None = None) -> Runner:
        """Compile the programs, create the KV cache, run each program once, and return a runner.

        Programs run on padding. The cache comes last, because compiling and loading take memory. If
        sizes are measured, the cache comes with the first measurement. Programs that the engine can
        serve without are left to `behind`, unless the settings wait for all.

        Args:
            leaves: the model's arrays.
            on_progress: receives progress.
        """
        programs = self._programs(leaves, on_progress)
        with self.report.stage("warm_up"), self.report.timeline.span("run once on padding"):
            runner = self._make_runner(programs, self._first_state(programs))
        self._leaves = []  # only the runner keeps the arrays, so that they can be released
        return runner

    def replay(self, leaves: list[jax.Array], on_progress: OnProgress | None = None) -> Replay:
        """Compile the programs like `run`, and return a follower's Replay instead of a Runner."""
        programs = self._programs(leaves, on_progress)
        words = {bucket: self._compiler.null_batch(bucket) for bucket in programs.steps}
        padding = Padding(words, self._compiler.null_load(), self._compiler.null_rows())
        self._leaves = []
        return Replay(leaves, programs, self._first_state(programs), padding)

    def behind(self, runner: Runner) -> ProgramsBehind | None:
        """Start a thread that adds the programs that `run` left out. Return None if all exist."""
        if self._waits_for_all:
            return None
        chosen = self.report.bucket_plan
        assert chosen is not None
        is_chosen = self.plan.names_sizes or chosen.step_seconds is not None
        return ProgramsBehind(
            runner,
            Stored(self.plan, self.store),
            self._compiler,
            self.buckets,
            self.plan.samplers[:-1],
            chosen if is_chosen else None,
            self._note,
        )

    def _programs(self, leaves: list[jax.Array], on_progress: OnProgress | None) -> Programs:
        self._leaves = leaves
        with self.report.stage("compile"):
            self.begin()
            try:
                with collection_paused():
                    programs = self._compile(on_progress)
            finally:
                self.close()
            self.store.prune()
        return programs

    def _compile(self, on_progress: OnProgress | None) -> Programs:
        """Compile the programs of a start, the longest compilation first, and return them."""
        make_state = self._make_state = self.supplier.supply(STATE)
        assert make_state is not None
        if self._waits_for_all and not self.plan.names_sizes:
            self._choose_sizes()
        steps = list(self.buckets) if self._waits_for_all else self._first_steps()
        steps, total = sorted(steps, reverse=True), len(steps) + len(self._others)
        self._compile_steps(steps, on_progress, total)
        others: dict[Key, Any] = {}
        for key in self._others:
            others[key] = self._threads.supply(key)
            if on_progress is not None:
                on_progress("programs", len(steps) + len(others), total)
        self._run_new(steps)
        self.plan = self.report.plan = replace(self.plan, temporary_bytes=self._temporary_bytes)
        small = [key for key in others if isinstance(key, SmallProgram)]
        return Programs(
            buckets=self.buckets,
            steps=self._steps,
            samplers={key: others[key] for key in others if isinstance(key, Sampler)},
            score=others.get(SCORE),
            make_state=make_state,
            load_slot=others[LOAD_SLOT],
            set_rows=others[SET_ROWS],
            set_allowed={key.count: others[key] for key in small if key.count},
            project=others.get(PROJECT),
        )

    def _first_state(self, programs: Programs) -> DeviceState:
        state, self._state = self._state, None
        assert state is not None
        sampler = programs.load_slot(state.sampler, self._compiler.null_load())
        page_table = programs.set_rows(state.page_table, *self._compiler.null_rows())
        return replace(state, sampler=sampler, page_table=page_table)

    def _make_runner(self, programs: Programs, state: DeviceState) -> Runner:
        if isinstance(self._group, Leader):
            programs = led(programs, self._group.send)
        model, memory = self.plan.model_config, self.plan.memory
        runner = Runner(model, memory, self._leaves, programs, state, self._counter)
        padding = self._compiler.null_batch(self.buckets.largest)
        for sampler in programs.samplers:
            runner.run_padding(sampler, None, padding)
        return runner

    def _first_steps(self) -> list[Bucket]:
        # Without these buckets the engine cannot serve, or would serve very slowly. The largest
        # launch of mixed rows would suffice, but with 135M parameters it takes about three times
        # as long as a decode for a token of one row.
        largest, decode = self.buckets.largest, self.buckets.largest_decode
        if self.buckets.early is None or Stored(self.plan, self.store).has(decode):
            return [largest, decode]
        return [largest, self.buckets.early]

    def _take(self, chosen: BucketPlan) -> None:
        self.report.bucket_plan = chosen
        sizes, plan = (chosen.decode_sizes, chosen.token_sizes), self.plan
        self.buckets = buckets_of(plan.config, plan.platform, sizes, plan.greedy_decode)

    def _note(self, chosen: BucketPlan) -> None:
        self.report.bucket_plan = chosen
        self.store.note(chosen.notes())

    def _compile_steps(
        self, buckets: list[Bucket], on_progress: OnProgress | None = None, total: int = 0
    ) -> None:
        # Reading a program's memory use costs a tenth of loading it, so one of each kind is read.
        kinds = {(bucket.decode_only, bucket.greedy): bucket for bucket in sorted(self.buckets)}
        if self._compile_first:
            self._state = None
        self._threads.submit(buckets)
        for done, bucket in enumerate(buckets, 1):
            step = self._threads.supply(bucket)
            if bucket in kinds.values():
                self._temporary_bytes = max(self._temporary_bytes, temporary_bytes_of(step))
            if on_progress is not None:
                on_progress("programs", done, total)

    def _run_new(self, buckets: list[Bucket]) -> None:
        if self._state is None:
            assert self._make_state is not None
            return_memory()  # the cache needs the memory that compiling and loading have freed
            self._state = self._make_state()
        for bucket in buckets:
            if bucket not in self._steps:
                self._steps[bucket] = self._threads.supply(bucket)
                self._run_padding(bucket)

    def _choose_sizes(self) -> None:
        """Set `buckets` to the padded sizes worth their compilation, by notes or measurements."""
        notes = self._shared(self.store.notes())
        if notes is not None:
            self._take(BucketPlan.from_notes(notes))
        else:
            buckets, platform = anchors(self.buckets), self.plan.platform
            started, built = time.perf_counter(), self.store.num_built
            self._compile_steps(buckets)
            self._run_new(buckets)
            built = self.store.num_built - built
            # If all came from files, the other sizes may still have to be compiled.
            cost = (time.perf_counter() - started) / built if built else COMPILE_SECONDS
            times = padding_seconds(buckets, self._run_padding)
            chosen = choose_sizes(self.buckets, times, cost, busy_seconds(platform))
            chosen = BucketPlan.from_notes(self._shared(chosen.notes()))
            self._note(chosen)
            self._take(chosen)
        remaining = set(self.buckets)
        self._steps = {bucket: step for bucket, step in self._steps.items() if bucket in remaining}

    def _shared(self, notes: Any) -> Any:
        return notes if self._group is None else self._group.share(notes)

    def _run_padding(self, bucket: Bucket) -> StepOutput:
        batch = self._compiler.null_batch(bucket)
        self._state, output = self._steps[bucket](self._leaves, self._state, batch)
        return output
