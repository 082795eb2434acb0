# pyright: reportUnknownMemberType=false
"""WarmUp: makes a Runner out of placed weights: sizes the cache, compiles, and runs all once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from jax.stages import Compiled

from jaxserve.config import EngineConfig, cpu_threads
from jaxserve.errors import InvalidRequest
from jaxserve.execution.buckets import Bucket, BucketSet, default_steps
from jaxserve.execution.runner import CompileCounter, OnProgress, Programs, Runner
from jaxserve.execution.start.bucket_plan import BucketPlan, anchors, choose_sizes
from jaxserve.execution.start.compilation import open_store
from jaxserve.execution.start.compiler import Compiler
from jaxserve.execution.start.device import started_device
from jaxserve.execution.start.memory_plan import (
    DEFAULT_SHARE,
    SLACK,
    Sizes,
    cache_pages,
    sampler_bytes,
    temporary_bytes,
)
from jaxserve.execution.start.programs import ProgramStore
from jaxserve.execution.state import DeviceState, StepOutput, page_bytes
from jaxserve.execution.typed_jax import devices
from jaxserve.models import Decoder, ModelConfig
from pallas_kernels.devices import target_device

_COMPILE_THREADS = 4
# Seconds that a program takes to compile where none was compiled: as those of 137M parameters take
# on two cores.
_COMPILE_SECONDS = 5.0
# Launches in a row that are timed together.
_QUEUED = 8


@dataclass
class StartReport:
    """Facts about a start, for log lines and benchmarks.

    Attributes:
        store: where the programs come from.
        bucket_plan: the padded sizes, and what they were chosen by where the configuration names
            none.
        stages: seconds that each stage took.
        temporary_bytes: most memory that a launch takes beside weights and cache.
        device: that it was on.
    """

    store: ProgramStore
    bucket_plan: BucketPlan
    stages: dict[str, float]
    temporary_bytes: int = 0
    device: str = ""

    def __str__(self) -> str:
        return f"{self.store}; {self.bucket_plan}; on {self.device}"


class WarmUp:
    """The start of a runner: everything that must not happen while requests wait.

    Args:
        config: resolved (see `EngineConfig.resolve`).
        model_config: of the model.
        model: with its weights placed.
        greedy_decode: see BucketSet; None for yes on a GPU.
        cache: folder of compiled programs; None keeps none.

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
    ) -> None:
        device = target_device()
        platform = device.platform
        self.config = config
        self.model_config = model_config
        self._num_steps = config.num_scheduler_steps or default_steps(platform)
        self._greedy_decode = device.is_gpu if greedy_decode is None else greedy_decode
        self.buckets = self._make_buckets(config.decode_sizes, config.token_sizes)
        self._counter = CompileCounter()
        self.compiler = Compiler(config, model_config, model)
        self.compiler.store = open_store(cache, config, model_config, self.compiler.leaves)
        self.report = StartReport(
            self.compiler.store,
            BucketPlan.of(self.buckets),
            stages={},
            device=str(device),
        )
        self.page_bytes = page_bytes(model_config, config.block_size, self.compiler.kv_dtype)
        self._steps: dict[Bucket, Compiled] = {}
        self._compiled: dict[Bucket, Compiled] = {}  # that have not run yet
        self._state: DeviceState | None = None
        self._make_state: Callable[[], DeviceState] | None = None
        # On a GPU, XLA tries kernels on arrays of a weight's size while it compiles: the cache must
        # not have taken their memory yet.
        self._compile_first = platform != "cpu"
        self.num_pages = self._size_cache()

    def _make_buckets(
        self, decode_sizes: Sequence[int] | None, token_sizes: Sequence[int] | None
    ) -> BucketSet:
        assert self.config.max_num_seqs and self.config.max_num_batched_tokens
        return BucketSet(
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
            decode_sizes,
            token_sizes,
            self._greedy_decode,
            self._num_steps,
        )

    def _size_cache(self) -> int:
        """Return how many pages the configured memory holds.

        On a GPU that depends on the largest program, which is compiled for a cache of a certain
        size: it is the size that an estimate of its temporaries leaves, unless they take more.
        """
        config, platform = self.config, devices()[0].platform
        sized = config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes
        pages = self._pages(0) if platform == "cpu" or sized else self._pages_beside_largest()
        if pages < 2:
            raise InvalidRequest(
                f"no memory for the KV cache: a page takes {self.page_bytes} bytes; "
                "raise gpu_memory_utilization or kv_cache_memory_bytes",
                "kv_cache_memory_bytes",
            )
        return pages

    def _pages_beside_largest(self) -> int:
        """Compile the largest program; return the pages that it leaves room for."""
        seqs, tokens = self.config.max_num_seqs, self.config.max_num_batched_tokens
        assert seqs and tokens
        sizes = Sizes(DEFAULT_SHARE, seqs, tokens)
        estimate = temporary_bytes(self.model_config, self.compiler.dtype, sizes, target_device())
        estimate += estimate // 8  # it is right within a tenth
        pages = self._pages(self._room(estimate))
        largest = max(self.buckets, key=lambda bucket: bucket.num_tokens)
        program = self.compiler.step(largest, max(2, pages))
        needed = _temporary_bytes(program)
        if pages < 2 or needed > estimate:
            return self._pages(self._room(needed))
        self._compiled[largest] = program
        return pages

    def _pages(self, room: int) -> int:
        """Return the pages that so many bytes hold, or that the settings name."""
        return cache_pages(
            *(self.config, self.model_config.num_hidden_layers, self.page_bytes),
            *(self.compiler.kv_dtype, room, devices()[0].platform),
        )

    def _room(self, temporary: int) -> int:
        """Return the bytes of a GPU that weights, sampler and the largest launch leave.

        Args:
            temporary: bytes that the launch takes beside weights and cache.
        """
        own = sum(leaf.nbytes for leaf in self.compiler.leaves)
        memory = started_device()
        if not memory.is_limit:  # what is free is what the weights have left
            memory = replace(memory, free=memory.free + own, in_use=own)
        budget = memory.budget(self.config.gpu_memory_utilization, DEFAULT_SHARE)
        sampler = sampler_bytes(self.config.max_num_seqs or 1, self.model_config.vocab_size)
        left = min(int(budget * self.config.memory_share) - own, budget - memory.in_use)
        return left - int(budget * SLACK) - temporary - sampler

    def run(self, on_progress: OnProgress | None = None) -> Runner:
        """Make the cache, compile every bucket, and run each program once on padding.

        On CPU a program runs while the next are read: that touches its memory for the first time.
        """
        started = time.perf_counter()
        pool = ThreadPoolExecutor(min(_COMPILE_THREADS, cpu_threads()))
        counts = sorted({1, 8, self.config.max_num_seqs or 1})
        try:
            make_state = self._make_state = self.compiler.make_state(self.num_pages)
            loading = pool.submit(self.compiler.load_slot)
            rows = pool.submit(self.compiler.set_rows)
            masks = pool.map(self.compiler.set_allowed, counts)
            if not (self.config.decode_sizes or self.config.token_sizes):
                self._choose_sizes(pool)
            self._compile_all(pool, sorted(self.buckets, reverse=True), on_progress)
            programs = Programs(
                self._steps,
                make_state,
                loading.result(),
                rows.result(),
                dict(zip(counts, masks, strict=True)),
            )
        finally:
            # An interrupt must not wait for the programs that have not been started.
            pool.shutdown(wait=True, cancel_futures=True)
        self.compiler.store.prune()
        self.report.stages["compile"] = time.perf_counter() - started
        started = time.perf_counter()
        state, self._state = self._state, None
        assert state is not None
        sampler = programs.load_slot(state.sampler, self.compiler.null_load())
        page_table = programs.set_rows(state.page_table, *self.compiler.null_rows())
        state = replace(state, sampler=sampler, page_table=page_table)
        jax.block_until_ready(state)
        self.report.stages["warm_up"] = time.perf_counter() - started
        return Runner(
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

    def _compile_all(
        self, pool: ThreadPoolExecutor, buckets: list[Bucket], on_progress: OnProgress | None = None
    ) -> None:
        def compiled_once(bucket: Bucket) -> Compiled:
            found = self._steps.get(bucket) or self._compiled.get(bucket)
            return found or self.compiler.step(bucket, self.num_pages)

        # Reading off what a program takes costs a tenth of loading it: one of each kind is enough.
        kinds = {(bucket.decode_only, bucket.greedy): bucket for bucket in sorted(self.buckets)}
        if self._compile_first:
            self._state = None
        elif self._state is None:
            self._state = self._empty_state()
        compiled = pool.map(compiled_once, buckets)
        waiting: list[tuple[Bucket, Compiled]] = []
        for done, (bucket, step) in enumerate(zip(buckets, compiled, strict=True), 1):
            waiting.append((bucket, step))
            if not self._compile_first:
                self._run_new(waiting)
            if bucket in kinds.values():
                needed = _temporary_bytes(step)
                self.report.temporary_bytes = max(self.report.temporary_bytes, needed)
            if on_progress is not None:
                on_progress("compile", done, len(buckets))
        if self._state is None:
            self._state = self._empty_state()
        self._run_new(waiting)

    def _empty_state(self) -> DeviceState:
        assert self._make_state is not None
        return self._make_state()

    def _run_new(self, waiting: list[tuple[Bucket, Compiled]]) -> None:
        """Run programs once on padding, those that have not run yet; empties the list."""
        while waiting:
            bucket, step = waiting.pop(0)
            if bucket not in self._steps:
                self._steps[bucket] = step
                self._run_padding(bucket)

    def _choose_sizes(self, pool: ThreadPoolExecutor) -> None:
        """Replace the default sizes by those that are worth their time to compile here."""
        store = self.compiler.store
        notes = store.notes()
        if notes is not None:
            plan = BucketPlan.from_notes(notes)
        else:
            buckets = anchors(self.buckets)
            started, built = time.perf_counter(), store.num_built
            self._compile_all(pool, buckets)
            built = store.num_built - built
            # Where all came from files, other sizes may not be there: they cost what is usual.
            cost = (time.perf_counter() - started) / built if built else _COMPILE_SECONDS
            plan = choose_sizes(self.buckets, self._padding_seconds(buckets), cost)
            store.note(plan.notes())
        self.report.bucket_plan = plan
        self.buckets = self._make_buckets(plan.decode_sizes, plan.token_sizes)
        kept = set(self.buckets)
        self._steps = {bucket: step for bucket, step in self._steps.items() if bucket in kept}

    def _padding_seconds(self, buckets: Iterable[Bucket]) -> dict[Bucket, float]:
        """Measure launches of padding alone: what each bucket costs whatever it holds."""
        seconds: dict[Bucket, float] = {}
        for bucket in buckets:
            times: list[float] = []
            for _ in range(4):
                started = time.perf_counter()
                outputs = [self._run_padding(bucket) for _ in range(_QUEUED)]
                np.asarray(outputs[-1].token_ids)
                times.append((time.perf_counter() - started) / _QUEUED)
            seconds[bucket] = min(times)
        return seconds

    def _run_padding(self, bucket: Bucket) -> StepOutput:
        batch = self.compiler.null_batch(bucket)
        self._state, output = self._steps[bucket](self.compiler.leaves, self._state, batch)
        return output


def _temporary_bytes(program: Compiled) -> int:
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


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
