# pyright: reportUnknownMemberType=false
"""WarmUp: makes a Runner out of placed weights: sizes the cache, compiles, and runs all once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.stages import Compiled

from jaxserve.execution.buckets import Bucket, BucketSet, Sampler, few_sizes
from jaxserve.execution.hosts.group import Group, Leader
from jaxserve.execution.hosts.replay import Padding, Replay, led
from jaxserve.execution.runner import CompileCounter, OnProgress, Programs, Runner
from jaxserve.execution.state import DeviceState, StepOutput, page_bytes
from jaxserve.models import Decoder, ModelConfig
from jaxserve.settings.config import EngineConfig, cpu_threads
from jaxserve.start.garbage import collection_paused
from jaxserve.start.memory_return import return_memory
from jaxserve.start.plan.bucket_plan import (
    BucketPlan,
    anchors,
    buckets_of,
    busy_seconds,
    choose_sizes,
    needs_logits,
    padding_seconds,
)
from jaxserve.start.programs.behind import COMPILE_SECONDS, ProgramsBehind
from jaxserve.start.programs.cache_size import CacheSize, temporary_bytes_of
from jaxserve.start.programs.compiler import Compiler
from jaxserve.start.programs.fingerprint import open_store
from jaxserve.start.report import StartReport
from pallas_kernels.devices import target_device

_COMPILE_THREADS = 4


@dataclass(frozen=True)
class Parts:
    """The programs of a start besides its launches, as they are compiled."""

    samplers: dict[Sampler, Future[Compiled]]
    score: Future[Compiled | None]
    project: Future[Compiled | None]
    load_slot: Future[Compiled]
    set_rows: Future[Compiled]
    masks: dict[int, Future[Compiled]]

    @property
    def all(self) -> list[Future[Any]]:
        """All of them."""
        others = (self.score, self.project, self.load_slot, self.set_rows)
        return [*self.samplers.values(), *others, *self.masks.values()]


class WarmUp:
    """The start of a runner: everything that must not happen while requests wait.

    Args:
        config: resolved (see `EngineConfig.resolve`).
        model_config: of the model.
        model: with its weights placed, or shapes in their place until `place`.
        greedy_decode: see BucketSet; None for yes on a GPU.
        cache: folder of compiled programs; None keeps none.
        report: of the start, which receives the facts about its programs.
        group: of hosts that the engine lies on; None for this one alone.

    Attributes:
        compiler: of the programs.
        buckets: the padded shapes to compile.
        num_pages: pages of KV cache, the null page included.
        report: of the start so far.

    Raises:
        InvalidRequest: there is no memory for two pages of KV cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: Decoder,
        greedy_decode: bool | None = None,
        cache: Path | None = None,
        report: StartReport | None = None,
        group: Group | None = None,
    ) -> None:
        device = target_device()
        self._platform = platform = device.platform
        self.config = config
        self.model_config = model_config
        self._group = group
        # On a GPU, XLA tries kernels on arrays of a weight's size while it compiles: the cache must
        # not have taken their memory yet.
        self._compile_first = platform != "cpu"
        self._greedy_decode = device.is_gpu if greedy_decode is None else greedy_decode
        self.buckets = self._make_buckets(config.decode_sizes, config.token_sizes)
        self._counter = CompileCounter()
        self.compiler = Compiler(config, model_config, model)
        self.compiler.store = open_store(cache, config, model_config, self.compiler.leaves)
        self.report = report or StartReport()
        self.report.device, self.report.store = str(device), self.compiler.store
        self.report.bucket_plan = BucketPlan.of(self.buckets)
        self.compiler.store.timeline = self.report.timeline
        self.page_bytes = page_bytes(model_config, config.block_size, self.compiler.kv_dtype)
        self._steps: dict[Bucket, Compiled] = {}
        self._compiling: dict[Bucket, Future[Compiled]] = {}
        self._pool = ThreadPoolExecutor(min(_COMPILE_THREADS, cpu_threads()), "jaxserve-compile")
        self._parts: Parts | None = None
        self._state: DeviceState | None = None
        self._make_state: Callable[[], DeviceState] | None = None
        size = CacheSize(config, model_config, self.compiler, self.page_bytes, self.buckets.largest)
        self.num_pages = pages = size.pages()
        if group is not None:
            self.num_pages = group.settle({}, {"pages": pages})["pages"]
        if size.program is not None and self.num_pages == pages:
            self._compiling[self.buckets.largest] = future = Future[Compiled]()
            future.set_result(size.program)
        self._waits_for_all = (
            config.wait_for_all_programs
            or group is not None
            or self._compile_first
            or self.compiler.store.folder is None  # from which what is compiled elsewhere is read
        )

    def _make_buckets(
        self, decode_sizes: Sequence[int] | None, token_sizes: Sequence[int] | None
    ) -> BucketSet:
        sizes = decode_sizes, token_sizes
        return buckets_of(self.config, self._platform, sizes, self._greedy_decode)

    def begin(self) -> None:
        """Start to compile what the first answer needs, while the weights are read. Idempotent."""
        if self._parts is not None:
            return
        if not self._waits_for_all:
            self._take_noted_sizes()
            self._submit(self._first_steps())
        submit = self._pool.submit
        self._parts = Parts(
            self._samplers(),
            submit(self._compile_if, self.buckets.largest.keeps_logits, self.compiler.score),
            submit(self._compile_if, needs_logits(self.config), self.compiler.project),
            submit(self.compiler.load_slot),
            submit(self.compiler.set_rows),
            {count: submit(self.compiler.set_allowed, count) for count in self._few_sizes},
        )

    def close(self, wait: bool = True) -> None:
        """End what `begin` started, once programs that are being compiled are there. Idempotent.

        Args:
            wait: whether to wait for them.
        """
        # An interrupt must not wait for the programs that have not been started.
        self._pool.shutdown(wait, cancel_futures=True)

    def run(self, on_progress: OnProgress | None = None) -> Runner:
        """Compile, make the cache, and run each program once on padding.

        The cache comes last, since compiling and reading programs take memory; where sizes are
        measured, it comes with the first of them.
        Programs without which the engine could serve are left to `behind`, unless all are waited
        for.
        """
        programs = self._programs(on_progress)
        with self.report.stage("warm_up"), self.report.timeline.span("run once on padding"):
            return self._make_runner(programs, self._first_state(programs))

    def replay(self, on_progress: OnProgress | None = None) -> Replay:
        """Make what a follower has in place of a runner; otherwise as `run`."""
        programs = self._programs(on_progress)
        made = self.compiler
        words = {bucket: made.null_batch(bucket) for bucket in programs.steps}
        padding = Padding(words, made.null_load(), made.null_rows())
        return Replay(made.leaves, programs, self._first_state(programs), padding)

    def _programs(self, on_progress: OnProgress | None) -> Programs:
        with self.report.stage("compile"):
            self.begin()
            try:
                with collection_paused():
                    programs = self._compile(on_progress)
            finally:
                self.close()
            self.compiler.store.prune()
        return programs

    def _compile(self, on_progress: OnProgress | None) -> Programs:
        """Compile the programs of a start, the one that takes longest first."""
        assert self._parts is not None
        parts = self._parts
        make_state = self._make_state = self.compiler.make_state(self.num_pages)
        if self._waits_for_all and not self._sizes_are_named:
            self._choose_sizes()
        steps = list(self.buckets) if self._waits_for_all else self._first_steps()
        steps, total = sorted(steps, reverse=True), len(steps) + len(parts.all)
        self._compile_steps(steps, on_progress, total)
        for done, part in enumerate(parts.all, len(steps) + 1):
            part.result()
            if on_progress is not None:
                on_progress("programs", done, total)
        self._run_new(steps)
        return Programs(
            self._steps,
            {sampler: compiled.result() for sampler, compiled in parts.samplers.items()},
            parts.score.result(),
            make_state,
            parts.load_slot.result(),
            parts.set_rows.result(),
            {count: compiled.result() for count, compiled in parts.masks.items()},
            parts.project.result(),
        )

    def _first_state(self, programs: Programs) -> DeviceState:
        state, self._state = self._state, None
        assert state is not None
        sampler = programs.load_slot(state.sampler, self.compiler.null_load())
        page_table = programs.set_rows(state.page_table, *self.compiler.null_rows())
        return replace(state, sampler=sampler, page_table=page_table)

    def _make_runner(self, programs: Programs, state: DeviceState) -> Runner:
        if isinstance(self._group, Leader):
            programs = led(programs, self._group.send)
        runner = Runner(
            self.config,
            self.model_config,
            self.compiler.leaves,
            programs,
            self.buckets,
            num_pages=self.num_pages,
            kv_dtype=self.compiler.kv_dtype,
            page_bytes=self.page_bytes,
            state=state,
            counter=self._counter,
        )
        for sampler in programs.samplers:
            runner.run_padding(sampler, None, self.compiler.null_batch(self.buckets.largest))
        return runner

    @property
    def _sizes_are_named(self) -> bool:
        return bool(self.config.decode_sizes or self.config.token_sizes)

    def _samplers(self) -> dict[Sampler, Future[Compiled]]:
        """Start to compile the samplers that follow launches without one, or the largest alone."""
        if not self.buckets.largest.keeps_logits:
            return {}
        samplers = map(Sampler, self._few_sizes[0 if self._waits_for_all else -1 :])
        return {sampler: self._pool.submit(self.compiler.sampler, sampler) for sampler in samplers}

    @property
    def _few_sizes(self) -> tuple[int, ...]:
        return few_sizes(self.config.max_num_seqs or 1)

    def _compile_if(self, is_used: bool, compile_: Callable[[Bucket], Compiled]) -> Compiled | None:
        return compile_(self.buckets.largest) if is_used else None

    def _first_steps(self) -> list[Bucket]:
        """Return the buckets without which an engine cannot serve, or would start at a crawl.

        The largest of mixed rows would do, but with 135M parameters a token of one row takes it
        about three times as long as a decode.
        """
        buckets = self.buckets
        largest, decode, early = buckets.largest, buckets.largest_decode, buckets.early
        if early is None or self.compiler.has(decode, self.num_pages):
            return [largest, decode]
        return [largest, early]

    def _take_noted_sizes(self) -> None:
        """Take the sizes that an earlier start chose, if it did."""
        notes = None if self._sizes_are_named else self.compiler.store.notes()
        if notes is not None:
            self._take(BucketPlan.from_notes(notes))

    def _take(self, plan: BucketPlan) -> None:
        self.report.bucket_plan = plan
        self.buckets = self._make_buckets(plan.decode_sizes, plan.token_sizes)

    def behind(self, runner: Runner) -> ProgramsBehind | None:
        """Start to add the programs that `run` left out; None where there are none."""
        if self._waits_for_all:
            return None
        plan, samplers = self.report.bucket_plan, list(map(Sampler, self._few_sizes[:-1]))
        assert plan is not None
        is_chosen = self._sizes_are_named or plan.step_seconds is not None
        return ProgramsBehind(
            *(runner, self.compiler, self.buckets, samplers),
            *(plan if is_chosen else None, self._note),
        )

    def _note(self, plan: BucketPlan) -> None:
        self.report.bucket_plan = plan
        self.compiler.store.note(plan.notes())

    def _submit(self, buckets: Iterable[Bucket]) -> dict[Bucket, Future[Compiled]]:
        """Start to compile buckets, each once."""
        for bucket in buckets:
            if bucket not in self._compiling:
                future = self._pool.submit(self.compiler.step, bucket, self.num_pages)
                self._compiling[bucket] = future
        return self._compiling

    def _compile_steps(
        self,
        buckets: list[Bucket],
        on_progress: OnProgress | None = None,
        total: int = 0,
    ) -> None:
        # Reading off what a program takes costs a tenth of loading it: one of each kind is enough.
        kinds = {(bucket.decode_only, bucket.greedy): bucket for bucket in sorted(self.buckets)}
        if self._compile_first:
            self._state = None
        compiling = self._submit(buckets)
        for done, bucket in enumerate(buckets, 1):
            step = compiling[bucket].result()
            if bucket in kinds.values():
                needed = temporary_bytes_of(step)
                self.report.temporary_bytes = max(self.report.temporary_bytes, needed)
            if on_progress is not None:
                on_progress("programs", done, total)

    def _run_new(self, buckets: list[Bucket]) -> None:
        """Run compiled programs that have not run yet, once on padding; make a missing cache."""
        if self._state is None:
            assert self._make_state is not None
            return_memory()  # of what compiling and reading took: the cache takes its place
            self._state = self._make_state()
        for bucket in buckets:
            if bucket not in self._steps:
                self._steps[bucket] = self._compiling[bucket].result()
                self._run_padding(bucket)

    def _choose_sizes(self) -> None:
        """Replace the default sizes by those that are worth their time to compile here."""
        store = self.compiler.store
        notes = self._shared(store.notes())
        if notes is not None:
            self._take(BucketPlan.from_notes(notes))
        else:
            buckets = anchors(self.buckets)
            started, built = time.perf_counter(), store.num_built
            self._compile_steps(buckets)
            self._run_new(buckets)
            built = store.num_built - built
            # Where all came from files, other sizes may not be there: they cost what is usual.
            cost = (time.perf_counter() - started) / built if built else COMPILE_SECONDS
            busy = busy_seconds(self._platform)
            times = padding_seconds(buckets, self._run_padding)
            chosen = self._shared(choose_sizes(self.buckets, times, cost, busy).notes())
            plan = BucketPlan.from_notes(chosen)
            store.note(plan.notes())
            self._take(plan)
        kept = set(self.buckets)
        self._steps = {bucket: step for bucket, step in self._steps.items() if bucket in kept}

    def _shared(self, notes: Any) -> Any:
        """Return the leader's: each host would measure something else."""
        return notes if self._group is None else self._group.share(notes)

    def _run_padding(self, bucket: Bucket) -> StepOutput:
        batch = self.compiler.null_batch(bucket)
        self._state, output = self._steps[bucket](self.compiler.leaves, self._state, batch)
        return output


def start_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    on_progress: OnProgress | None = None,
    greedy_decode: bool | None = None,
    cache: Path | None = None,
) -> Runner:
    """Make a runner that is ready; see `WarmUp`."""
    return WarmUp(config, model_config, model, greedy_decode, cache).run(on_progress)
