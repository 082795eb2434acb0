"""Runner: submits launches to the device in order, and reads their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.execution.batch import pack
from jaxserve.execution.buckets import Bucket, BucketSet
from jaxserve.execution.page_table import room_for_pages, take_new_pages
from jaxserve.execution.sampler_state import SamplerState, SlotLoad, allowed_words, slot_loads
from jaxserve.execution.sampling import is_greedy
from jaxserve.execution.state import DeviceState, StepOutput, release
from jaxserve.models import ModelConfig
from jaxserve.request import SamplerFeature
from jaxserve.scheduling.logprobs import StepLogprobs, TokenLogprobs
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import NO_TOKEN, SlotTable

if TYPE_CHECKING:
    from jaxtyping import Bool, Int32

# Called with (stage, done, total) while the engine starts.
OnProgress = Callable[[str, int, int], None]
Step = Callable[[list[jax.Array], DeviceState, np.ndarray], tuple[DeviceState, StepOutput]]
LoadSlot = Callable[[SamplerState, SlotLoad[np.ndarray]], SamplerState]
SetRows = Callable[[jax.Array, np.ndarray, np.ndarray], jax.Array]
SetAllowed = Callable[[SamplerState, np.ndarray, np.ndarray], SamplerState]

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """A count of the programs that JAX has compiled in this process since it was made.

    Attributes:
        num_compiles: the count.
    """

    def __init__(self) -> None:
        self.num_compiles = 0
        self._listener: Any = self._on_event
        jax.monitoring.register_event_duration_secs_listener(self._listener)

    def _on_event(self, event: str, duration: float, /, **_: Any) -> None:
        if event == COMPILE_EVENT:
            self.num_compiles += 1

    def close(self) -> None:
        """Stop counting. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            jax.monitoring.unregister_event_duration_listener(listener)


@dataclass(frozen=True)
class Programs:
    """The compiled programs of an engine.

    Attributes:
        steps: the launches, by their padded shape: (leaves, state, words) to (state, output).
        make_state: the empty device state.
        load_slot: (sampler, load) to the sampler state with one slot's settings replaced.
        set_rows: (page table, slots, rows) to the page table with rows replaced.
        set_allowed: by how many slots' masks they replace, (sampler, slots, words) to the sampler
            state.
    """

    steps: Mapping[Bucket, Step]
    make_state: Callable[[], DeviceState]
    load_slot: LoadSlot
    set_rows: SetRows
    set_allowed: Mapping[int, SetAllowed]


@dataclass(frozen=True)
class InFlight:
    """A submitted step whose results have not been read."""

    plan: LaunchPlan
    output: StepOutput
    bucket: Bucket
    num_logprobs: Int32[np.ndarray, " R"] | None  # alternatives asked for; None if none is
    submitted: float  # by time.perf_counter


class Runner:
    """The device's side of an engine: weights, device state and compiled launches.

    `execution.start.warm_up` makes it. Launches run in the order of their submission.

    Args:
        config: resolved (see `EngineConfig.resolve`).
        model_config: of the model.
        leaves: the model's placed arrays.
        programs: compiled; none is compiled later.
        buckets: the padded shapes that there are programs for.
        num_pages: pages of KV cache, the null page included.
        kv_dtype: of the pages.
        page_bytes: of one page, in all layers.
        state: the device state that the programs ran on last.
        counter: counts compilations; closed with the runner.

    Attributes:
        max_steps: most decode steps of one launch.
        weight_bytes: of the parameters as they are stored.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        leaves: list[jax.Array],
        programs: Programs,
        buckets: BucketSet,
        *,
        num_pages: int,
        kv_dtype: np.dtype,
        page_bytes: int,
        state: DeviceState,
        counter: CompileCounter,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.vocab_size = model_config.vocab_size
        self.buckets = buckets
        self.num_pages = num_pages
        self.kv_dtype = kv_dtype
        self.page_bytes = page_bytes
        self.max_steps = buckets.num_steps
        self.weight_bytes = sum(leaf.nbytes for leaf in leaves)
        self._leaves = leaves
        self._steps: Mapping[Bucket, Step] = programs.steps
        self._make_state = programs.make_state
        self._load_slot = programs.load_slot
        self._set_rows = programs.set_rows
        self._set_allowed: Mapping[int, SetAllowed] = programs.set_allowed
        self._state: DeviceState | None = state
        self._counter = counter

    @property
    def num_compiles(self) -> int:
        """Programs that JAX compiled in this process since this runner's start began."""
        return self._counter.num_compiles

    def reset(self, error: Exception | None = None) -> None:
        """Make a new, empty cache after a failed launch took the old one with it."""
        self._state = release(self._state, error)
        self._state = self._make_state()

    def submit(self, plan: LaunchPlan, slots: SlotTable) -> InFlight:
        """Start a step. Returns before the device has run it."""
        any_features = int(np.bitwise_or.reduce(slots.features[plan.slots]))
        # Only steps with rows of several tokens have a program that scores prompts.
        lacks_prompt_logprobs = bool(any_features & SamplerFeature.PROMPT_LOGPROBS) and bool(
            slots.wants_logprob(plan.slots, plan.starts).any()
        )
        greedy = not any_features and is_greedy(plan, slots)
        bucket = self.buckets.pick(plan, greedy, lacks_prompt_logprobs)
        state, self._state = self._state, None
        assert state is not None, "the runner is closed, or lacks the reset after a failed launch"
        new, whole = take_new_pages(plan, slots, room_for_pages(bucket, slots.page_size))
        for owners, rows in whole:
            state = replace(state, page_table=self._set_rows(state.page_table, owners, rows))
        batch = pack(plan, slots, bucket, new)
        if any_features & SamplerFeature.EDITS and slots.needs_load[plan.slots].any():
            state = self._load(state, plan, slots)
        if any_features & SamplerFeature.ALLOWED:
            state = self._guide(state, plan, slots)
        submitted = time.perf_counter()
        self._state, output = self._steps[bucket](self._leaves, state, batch)
        output.token_ids.copy_to_host_async()
        if not any_features & SamplerFeature.SCORES:
            return InFlight(plan, output, bucket, None, submitted)
        for leaf in output.logprobs or ():
            leaf.copy_to_host_async()
        return InFlight(plan, output, bucket, slots.num_logprobs[plan.slots], submitted)

    def _load(self, state: DeviceState, plan: LaunchPlan, slots: SlotTable) -> DeviceState:
        """Write what the sampler must know of the requests that are new in this step."""
        sampler = state.sampler
        for slot in plan.slots[slots.needs_load[plan.slots]].tolist():
            for load in slot_loads(slots, slot, self.vocab_size):
                sampler = self._load_slot(sampler, load)
            slots.needs_load[slot] = slots.needs_mask[slot] = False
        return replace(state, sampler=sampler)

    def _guide(self, state: DeviceState, plan: LaunchPlan, slots: SlotTable) -> DeviceState:
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

    def read(
        self, step: InFlight
    ) -> tuple[Int32[np.ndarray, "*steps R"], Bool[np.ndarray, "*steps R"], StepLogprobs | None]:
        """Wait for a step; return tokens, whether each is valid, and requested log-probabilities.

        Raises whatever the device reported; the state is lost then (see `reset`).
        """
        num_rows, num_steps = len(step.plan), step.plan.num_steps
        token_ids = np.asarray(step.output.token_ids)[..., :num_rows]
        if token_ids.ndim == 2:
            token_ids = token_ids[slice(num_steps) if num_steps > 1 else 0]
        ok = token_ids != NO_TOKEN
        if step.num_logprobs is None or step.output.logprobs is None:
            return token_ids, ok, None
        logprobs = TokenLogprobs(*(np.asarray(leaf) for leaf in step.output.logprobs))
        return (
            token_ids,
            ok,
            StepLogprobs(step.num_logprobs, np.cumsum(step.plan.num_tokens), logprobs),
        )

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        self._counter.close()
        self._state = None
        self._leaves, self._steps, self._set_allowed = [], {}, {}
        self._load_slot = self._set_rows = self._make_state = _closed


def _closed(*_: Any) -> Any:
    raise RuntimeError("the runner is closed")
