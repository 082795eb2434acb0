"""Runner: owns weights, device state and compiled steps; takes plans, returns tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxserve.config import EngineConfig, cpu_threads
from jaxserve.errors import InvalidRequest
from jaxserve.execution.batch import pack, unpack
from jaxserve.execution.buckets import Bucket, BucketSet, default_steps
from jaxserve.execution.sampler_state import (
    allowed_words,
    load_slot,
    null_load,
    set_allowed,
    slot_loads,
)
from jaxserve.execution.sampling import is_greedy
from jaxserve.execution.start.bucket_plan import BucketPlan, anchors, choose_sizes
from jaxserve.execution.start.compilation import open_store
from jaxserve.execution.state import (
    DeviceState,
    StepOutput,
    addressable_pages,
    kv_dtype,
    make_state,
    page_bytes,
    release,
)
from jaxserve.execution.step import decode_steps, model_step
from jaxserve.models import Decoder, ModelConfig
from jaxserve.request import SamplerFeature
from jaxserve.scheduling.logprobs import StepScores, TokenLogprobs
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.slot_table import SlotTable

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_COMPILE_THREADS = 4
# What a program takes to compile where it is not known: as those of 137M parameters on two cores.
_COMPILE_SECONDS = 5.0
# Steps in a row that are timed together.
_QUEUED = 8

# Called with (stage, done, total) while the engine starts.
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class InFlight:
    """A submitted step whose results have not been read."""

    plan: StepPlan
    output: StepOutput
    bucket: Bucket
    num_logprobs: np.ndarray | None  # i32[R], alternatives asked for; None if none is
    submitted: float  # by time.perf_counter


class Runner:
    """Runs steps on the device, in the order of their submission.

    Args:
        config: resolved (see `EngineConfig.resolve`).
        model_config: of the model.
        model: with its weights placed.
        greedy_decode: see BucketSet; None for yes on a GPU.
        cache: folder of compiled programs; None keeps none.

    Attributes:
        plan: the padded sizes, and what they were chosen by where the configuration names none.
        store: where programs come from.
        num_pages: pages of KV cache, the null page included.
        num_compiles: programs that JAX compiled in this process since this runner was made.
        max_steps: most decode steps of one launch.
        stages: seconds that each stage of the start took.
        temporary_bytes: most memory that a step takes beside weights and cache.
        kv_dtype: of the pages.
        weight_bytes: of the parameters as they are stored.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: Decoder,
        greedy_decode: bool | None = None,
        cache: Path | None = None,
    ) -> None:
        assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len
        self.config = config
        self.model_config = model_config
        self.vocab_size = model_config.vocab_size
        platform = jax.default_backend()
        dtype = model.norm.scale[...].dtype
        self.max_steps = config.num_scheduler_steps or default_steps(platform)
        self._greedy_decode = platform == "gpu" if greedy_decode is None else greedy_decode
        self.buckets = self._make_buckets(config.decode_sizes, config.token_sizes)
        self.plan = BucketPlan.of(self.buckets)
        self.num_compiles = 0
        self.temporary_bytes = 0
        self.stages: dict[str, float] = {}
        self._listener: Any = self._on_event
        jax.monitoring.register_event_duration_secs_listener(self._listener)
        self._graphdef, state = nnx.split(model)
        self._leaves, self._treedef = jax.tree.flatten(state)
        self.kv_dtype = kv_dtype(config.kv_cache_dtype, dtype, platform)
        self.weight_bytes = sum(leaf.nbytes for leaf in self._leaves)
        self.page_bytes = page_bytes(model_config, config.block_size, self.kv_dtype)
        self.store = open_store(cache, config, model_config, self._leaves)
        self._steps: dict[Bucket, Any] = {}
        self._load_slot: Any = None
        self._make_state: Any = None
        # How many slots' masks each program replaces.
        self._set_allowed: dict[int, Any] = dict.fromkeys(sorted({1, 8, config.max_num_seqs}))
        self._null_slots = SlotTable(config.max_num_seqs, config.max_model_len, config.block_size)
        self.num_pages = self._size_cache()
        self._state: DeviceState | None = None

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
            self.max_steps,
        )

    def _on_event(self, event: str, duration: float, /, **_: Any) -> None:
        if event == COMPILE_EVENT:
            self.num_compiles += 1

    def _size_cache(self) -> int:
        """Pages that the configured memory holds."""
        config = self.config
        device = jax.devices()[0]
        if config.num_gpu_blocks_override is not None:
            pages = config.num_gpu_blocks_override
        elif device.platform == "cpu" or config.kv_cache_memory_bytes is not None:
            pages = config.cpu_page_budget(self.page_bytes)
        else:
            # Weights are placed; what the largest step needs beside them is read off its program.
            stats = device.memory_stats()
            largest = max(self.buckets, key=lambda bucket: bucket.num_tokens)
            temporary = self._compile(largest, num_pages=64).memory_analysis().temp_size_in_bytes
            share = config.gpu_memory_utilization * stats["bytes_limit"]
            sampler = sum(leaf.size * leaf.dtype.itemsize for leaf in self._sampler_leaves())
            pages = int(share - stats["bytes_in_use"] - temporary - sampler) // self.page_bytes
        if pages < 2:
            raise InvalidRequest(
                f"no memory for the KV cache: a page takes {self.page_bytes} bytes; "
                "raise gpu_memory_utilization or kv_cache_memory_bytes",
                "kv_cache_memory_bytes",
            )
        # Cells of the cache are numbered with 32 bits.
        pages = min(pages, 2**31 // config.block_size - 1)
        return addressable_pages(
            pages,
            self.page_bytes // 2 // self.model_config.num_hidden_layers,
            self.kv_dtype,
            device.platform,
        )

    def _state_maker(self, num_pages: int) -> Callable[[], DeviceState]:
        return partial(
            make_state,
            self.model_config,
            num_pages,
            self.config.block_size,
            self.config.max_num_seqs or 1,
            self.kv_dtype,
        )

    def _shapes(self, num_pages: int) -> DeviceState:
        return jax.eval_shape(self._state_maker(num_pages))

    def _sampler_leaves(self) -> list[Any]:
        """Shapes of what the sampler keeps on the device."""
        return jax.tree.leaves(self._shapes(num_pages=2).sampler)

    def _compile(self, bucket: Bucket, num_pages: int) -> Any:
        return self.store.get(
            f"{bucket}, {num_pages} pages", partial(self._lower, bucket, num_pages)
        )

    def _lower(self, bucket: Bucket, num_pages: int) -> Any:
        step = partial(decode_steps, most=bucket.num_steps)
        if bucket.num_steps == 1:
            step = partial(model_step, decode_only=bucket.decode_only)
        options = {"greedy": bucket.greedy, "implementation": self.config.attention_backend}

        def run(leaves: Any, state: DeviceState, words: Any) -> tuple[DeviceState, StepOutput]:
            batch = unpack(words, bucket.num_tokens, bucket.num_rows)
            return step(self._graphdef, self._treedef, leaves, state, batch, **options)

        jitted = jax.jit(run, donate_argnums=1)
        return jitted.lower(self._leaves, self._shapes(num_pages), self._null_batch(bucket))

    def _compile_state(self) -> Any:
        make = jax.jit(self._state_maker(self.num_pages))
        return self.store.get(f"state, {self.num_pages} pages", make.lower)

    def _compile_load(self) -> Any:
        load = null_load(self._null_slots, self.vocab_size)
        shapes = self._shapes(num_pages=2).sampler
        return self.store.get(
            "load slot", lambda: jax.jit(load_slot, donate_argnums=0).lower(shapes, load)
        )

    def _compile_set_allowed(self, count: int) -> Any:
        shapes = self._shapes(num_pages=2).sampler
        words = jax.ShapeDtypeStruct((count, shapes.allowed.shape[1]), np.uint32)
        slots = jax.ShapeDtypeStruct((count,), np.int32)
        return self.store.get(
            f"set allowed, {count}",
            lambda: jax.jit(set_allowed, donate_argnums=0).lower(shapes, slots, words),
        )

    def _null_batch(self, bucket: Bucket) -> np.ndarray:
        """A batch of padding only: it writes to no page and to no slot but the null one."""
        none = np.zeros(0, np.int32)
        plan = StepPlan(none, none, none, none.astype(bool), none.astype(np.int64))
        return pack(plan, self._null_slots, bucket)

    def warm_up(self, on_progress: OnProgress | None = None) -> None:
        """Make the cache, compile every bucket, and run each program once on padding.

        A program runs while the next are read: that touches its memory for the first time.
        """
        started = time.perf_counter()
        pool = ThreadPoolExecutor(min(_COMPILE_THREADS, cpu_threads()))
        try:
            self._make_state = self._compile_state()
            self.reset()
            loading = pool.submit(self._compile_load)
            masks = pool.map(self._compile_set_allowed, self._set_allowed)
            if not (self.config.decode_sizes or self.config.token_sizes):
                self._choose_sizes(pool)
            self._compile_all(pool, sorted(self.buckets, reverse=True), on_progress)
            self._load_slot = loading.result()
            self._set_allowed = dict(zip(self._set_allowed, masks, strict=True))
        finally:
            # An interrupt must not wait for the programs that have not been started.
            pool.shutdown(wait=True, cancel_futures=True)
        self.store.prune()
        self.stages["compile"] = time.perf_counter() - started
        started = time.perf_counter()
        load = null_load(self._null_slots, self.vocab_size)
        assert self._state is not None
        self._state = replace(self._state, sampler=self._load_slot(self._state.sampler, load))
        jax.block_until_ready(self._state)
        self.stages["warm_up"] = time.perf_counter() - started

    def _compile_all(
        self, pool: ThreadPoolExecutor, buckets: list[Bucket], on_progress: OnProgress | None = None
    ) -> None:
        def compiled_once(bucket: Bucket) -> Any:
            return self._steps.get(bucket) or self._compile(bucket, self.num_pages)

        # Asking what a program takes costs a tenth of reading it.
        kinds = {(one.decode_only, one.greedy): one for one in sorted(self.buckets)}
        compiled = pool.map(compiled_once, buckets)
        for done, (bucket, step) in enumerate(zip(buckets, compiled, strict=True), 1):
            if bucket not in self._steps:
                self._steps[bucket] = step
                self._run_padding(bucket)
            if bucket in kinds.values():
                needed = step.memory_analysis().temp_size_in_bytes
                self.temporary_bytes = max(self.temporary_bytes, needed)
            if on_progress is not None:
                on_progress("compile", done, len(buckets))

    def _choose_sizes(self, pool: ThreadPoolExecutor) -> None:
        """Replace the default sizes by those that are worth their time to compile here."""
        notes = self.store.notes()
        if notes is not None:
            self.plan = BucketPlan.from_notes(notes)
        else:
            buckets = anchors(self.buckets)
            started, built = time.perf_counter(), self.store.num_built
            self._compile_all(pool, buckets)
            built = self.store.num_built - built
            # Where all came from files, other sizes may not be there: they cost what is usual.
            cost = (time.perf_counter() - started) / built if built else _COMPILE_SECONDS
            self.plan = choose_sizes(self.buckets, self._padding_seconds(buckets), cost)
            self.store.note(self.plan.notes())
        self.buckets = self._make_buckets(self.plan.decode_sizes, self.plan.token_sizes)
        kept = set(self.buckets)
        self._steps = {bucket: step for bucket, step in self._steps.items() if bucket in kept}

    def _padding_seconds(self, buckets: Iterable[Bucket]) -> dict[Bucket, float]:
        """What a step of each bucket takes that holds nothing: the cost of its padding."""
        seconds = {}
        for bucket in buckets:
            times = []
            for _ in range(4):
                started = time.perf_counter()
                for _ in range(_QUEUED):
                    output = self._run_padding(bucket)
                np.asarray(output.token_ids)
                times.append((time.perf_counter() - started) / _QUEUED)
            seconds[bucket] = min(times)
        return seconds

    def _run_padding(self, bucket: Bucket) -> StepOutput:
        batch = self._null_batch(bucket)
        self._state, output = self._steps[bucket](self._leaves, self._state, batch)
        return output

    def reset(self, error: Exception | None = None) -> None:
        """A new, empty cache: at the start, and after a failed step took the old one with it."""
        self._state = release(self._state, error)
        self._state = self._make_state()

    def submit(self, plan: StepPlan, slots: SlotTable) -> InFlight:
        """Start a step. Returns before the device has run it."""
        any_features = int(np.bitwise_or.reduce(slots.features[plan.slots]))
        # Only steps with rows of several tokens have a program that scores prompts.
        scores_prompt = bool(any_features & SamplerFeature.PROMPT_LOGPROBS) and bool(
            slots.is_scored(plan.slots, plan.starts).any()
        )
        greedy = not any_features and is_greedy(plan, slots)
        bucket = self.buckets.pick(plan, greedy, scores_prompt)
        batch = pack(plan, slots, bucket)
        state, self._state = self._state, None
        if any_features & SamplerFeature.EDITS and slots.needs_load[plan.slots].any():
            state = self._load(state, plan, slots)
        if any_features & SamplerFeature.ALLOWED:
            state = self._guide(state, plan, slots)
        submitted = time.perf_counter()
        self._state, output = self._steps[bucket](self._leaves, state, batch)
        output.token_ids.copy_to_host_async()
        output.ok.copy_to_host_async()
        if not any_features & SamplerFeature.SCORES:
            return InFlight(plan, output, bucket, None, submitted)
        jax.tree.map(lambda leaf: leaf.copy_to_host_async(), output.scores)
        return InFlight(plan, output, bucket, slots.num_logprobs[plan.slots], submitted)

    def _load(self, state: Any, plan: StepPlan, slots: SlotTable) -> DeviceState:
        """Write what the sampler must know of the requests that are new in this step."""
        sampler = state.sampler
        for slot in plan.slots[slots.needs_load[plan.slots]].tolist():
            for load in slot_loads(slots, slot, self.vocab_size):
                sampler = self._load_slot(sampler, load)
            slots.needs_load[slot] = slots.needs_mask[slot] = False
        return replace(state, sampler=sampler)

    def _guide(self, state: Any, plan: StepPlan, slots: SlotTable) -> DeviceState:
        """Tell the device what guided rows may draw, where that has changed."""
        changed = plan.slots[slots.needs_mask[plan.slots]]
        if not len(changed):
            return state
        size = next(size for size in self._set_allowed if size >= len(changed))
        rows = np.full(size, slots.num_slots, np.int32)
        rows[: len(changed)] = changed
        words = np.zeros((size, state.sampler.allowed.shape[1]), np.uint32)
        for row, slot in enumerate(changed.tolist()):
            words[row] = allowed_words(slots, slot, self.vocab_size)
        slots.needs_mask[changed] = False
        return replace(state, sampler=self._set_allowed[size](state.sampler, rows, words))

    def read(self, step: InFlight) -> tuple[np.ndarray, np.ndarray, StepScores | None]:
        """Wait for a step; i32[R] tokens and bool[R] of the plan's rows, and what they asked for.

        Of a launch of several steps [num_steps, R].

        Raises whatever the device reported; the state is lost then (see `reset`).
        """
        num_rows, num_steps = len(step.plan), step.plan.num_steps
        token_ids = np.asarray(step.output.token_ids)[..., :num_rows]
        ok = np.asarray(step.output.ok)[..., :num_rows]
        if token_ids.ndim == 2:
            rows = slice(num_steps) if num_steps > 1 else 0
            token_ids, ok = token_ids[rows], ok[rows]
        if step.num_logprobs is None or step.output.scores is None:
            return token_ids, ok, None
        scores = TokenLogprobs(*(np.asarray(leaf) for leaf in step.output.scores))
        return token_ids, ok, StepScores(step.num_logprobs, np.cumsum(step.plan.num_tokens), scores)

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        if self._leaves:
            jax.monitoring.unregister_event_duration_listener(self._listener)
        self._state = None
        self._leaves, self._steps = [], {}
        self._load_slot = self._make_state = None
        self._set_allowed = {}
