# pyright: reportUnknownMemberType=false
"""Runner: submits launches to the device in order, and reads their results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve.execution.batch import pack, rows_of
from jaxserve.execution.buckets import Bucket, BucketSet, Demand, Program, Sampler
from jaxserve.execution.expert_rows import ExpertRows
from jaxserve.execution.logprobs import DeviceLogprobs
from jaxserve.execution.page_table import room_for_pages, take_new_pages
from jaxserve.execution.prompt_scores import Project, score_prompts
from jaxserve.execution.sampler_state import SamplerState, SlotLoad, allowed_words, slot_loads
from jaxserve.execution.sampling import is_greedy
from jaxserve.execution.state import DeviceState, StepOutput, release
from jaxserve.models import ModelConfig
from jaxserve.request import SamplerFeature
from jaxserve.scheduling.logprobs import StepLogprobs, TokenLogprobs
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import NO_TOKEN, SlotTable
from jaxserve.settings.config import EngineConfig

if TYPE_CHECKING:
    from jaxtyping import Bool, Int32

# Called with (stage, done, total) while the engine starts.
OnProgress = Callable[[str, int, int], None]
Step = Callable[[list[jax.Array], DeviceState, np.ndarray], tuple[DeviceState, StepOutput]]
Draw = Callable[
    [jax.Array, SamplerState, jax.Array, np.ndarray], tuple[jax.Array, SamplerState, StepOutput]
]
Score = Callable[[list[jax.Array], StepOutput, np.ndarray], DeviceLogprobs]
LoadSlot = Callable[[SamplerState, SlotLoad[np.ndarray]], SamplerState]
SetRows = Callable[[jax.Array, np.ndarray, np.ndarray], jax.Array]
SetAllowed = Callable[[SamplerState, np.ndarray, np.ndarray], SamplerState]

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
# As plain numbers: an operation on an IntFlag costs half a microsecond.
_EDITS, _ALLOWED = int(SamplerFeature.EDITS), int(SamplerFeature.ALLOWED)
_SCORES, _LOGITS = int(SamplerFeature.SCORES), int(SamplerFeature.LOGITS)
_PROMPT_LOGPROBS = int(SamplerFeature.PROMPT_LOGPROBS)


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
        samplers: behind launches that keep their logits: (last token, sampler's state, logits,
            words of the rows) to (last token, sampler's state, output).
        score: log-probabilities of prompts behind the largest such step, if there are any:
            (leaves, output, words) to log-probabilities.
        make_state: the empty device state.
        load_slot: (sampler, load) to the sampler state with one slot's settings replaced.
        set_rows: (page table, slots, rows) to the page table with rows replaced.
        set_allowed: by how many slots' masks they replace, (sampler, slots, words) to the sampler
            state.
        project: logits at positions of the largest step of mixed rows, where the engine's settings
            let the host score prompts: (leaves, hidden states, first position, tokens) to logits.
    """

    steps: Mapping[Bucket, Step]
    samplers: Mapping[Sampler, Draw]
    score: Score | None
    make_state: Callable[[], DeviceState]
    load_slot: LoadSlot
    set_rows: SetRows
    set_allowed: Mapping[int, SetAllowed]
    project: Project | None = None


@dataclass(frozen=True)
class InFlight:
    """A submitted step whose results have not been read."""

    plan: LaunchPlan
    output: StepOutput
    bucket: Bucket
    num_logprobs: Int32[np.ndarray, " R"] | None  # alternatives asked for; None if none is
    has_positions: bool  # whether there is a log-probability for each token, not for each row
    submitted: float  # by time.perf_counter
    logits: jax.Array | None = None  # of each row's draw, where the host scores one
    # What the host has scored of prompts, by row.
    prompts: Mapping[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    expert_rows: jax.Array | None = None  # see `StepOutput`


class Runner:
    """The device's side of an engine: weights, device state and compiled launches.

    `start.programs.warm_up` makes it. Launches run in the order of their submission.

    Args:
        config: resolved (see `EngineConfig.resolve`).
        model_config: of the model.
        leaves: the model's placed arrays, which launches read from one field, each launch once.
        programs: compiled; those that are missing come by `add`.
        buckets: the padded shapes, those that there are no programs for yet among them.
        num_pages: pages of KV cache, the null page included.
        kv_dtype: of the pages.
        page_bytes: of one page, in all layers.
        state: the device state that the programs ran on last.
        counter: counts compilations; closed with the runner.

    Attributes:
        buckets: the padded shapes that there are programs for.
        most_steps: most decode steps of one launch, once all programs are there.
        keeps_logits: whether the host can have the logits of what is drawn.
        counts_demand: whether launches are counted for `take_demand`.
        has_demand: set while such a count waits to be taken.
        weight_bytes: of the parameters as they are stored.
        expert_rows: that each device has computed, up to the last launch that was read.
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
        self._all_buckets = buckets
        self.buckets = buckets.present(programs.steps)
        self.num_pages = num_pages
        self.kv_dtype = kv_dtype
        self.page_bytes = page_bytes
        self.most_steps = buckets.num_steps
        self.keeps_logits = buckets.largest.keeps_logits
        self.weight_bytes = sum(leaf.nbytes for leaf in leaves)
        self._leaves = leaves
        self._steps: dict[Bucket, Step] = dict(programs.steps)
        self._samplers: dict[Sampler, Draw] = dict(programs.samplers)
        self._score = programs.score
        self._project = programs.project
        self._make_state = programs.make_state
        self._load_slot = programs.load_slot
        self._set_rows = programs.set_rows
        self._set_allowed: Mapping[int, SetAllowed] = programs.set_allowed
        self._state: DeviceState | None = state
        self._counter = counter
        # Programs are added by another thread than the one that submits; both use the state.
        self._turn = threading.Lock()
        self.counts_demand = False
        self.has_demand = threading.Event()
        self.expert_rows = ExpertRows()
        self._demand: dict[tuple[Program, int], int] = {}

    @property
    def num_compiles(self) -> int:
        """Programs that JAX compiled in this process since this runner's start began."""
        return self._counter.num_compiles

    @property
    def max_steps(self) -> int:
        """Most decode steps of one launch that there are programs for."""
        return self.buckets.num_steps

    def reset(self, error: Exception | None = None) -> None:
        """Make a new, empty cache after a failed launch took the old one with it."""
        with self._turn:
            self._state = release(self._state, error)
            self.expert_rows.start_anew()
            self._state = self._make_state()

    def add(self, program: Program, compiled: Any) -> None:
        """Put a program in its place, from the next launch on; forget what served before it."""
        if isinstance(program, Sampler):
            self._samplers[program] = compiled
            return
        with self._turn:
            self._steps[program] = compiled
            early = self._all_buckets.early
            if early is not None and program == self._all_buckets.largest_decode:
                self._steps.pop(early, None)
            self.buckets = self._all_buckets.present(self._steps)

    def programs(self) -> list[Program]:
        """Return the programs that are there; samplers after the launches that they follow."""
        return [*self._steps, *self._samplers]

    def run_padding(self, program: Program, compiled: Any, batch: Int32[np.ndarray, " N"]) -> float:
        """Run a program on padding, once; return the seconds that takes.

        Its memory is touched and its time is known before a request runs it. Thread-safe: the next
        launch waits for this one.

        Args:
            compiled: None for the one that is in its place.
            batch: of padding, for a launch of the program, or of the largest bucket behind which
                a sampler runs.
        """
        with self._turn:
            if self._state is None:  # closed, or about to be reset
                return float("inf")
            jax.block_until_ready(self._state)
            started = time.perf_counter()
            if isinstance(program, Bucket):
                run = self._steps[program] if compiled is None else compiled
                self._state, _ = run(self._leaves, self._state, batch)
            else:
                largest, state = self._all_buckets.largest, self._state
                state, output = self._steps[largest](self._leaves, state, batch)
                draw = self._samplers[program] if compiled is None else compiled
                self._state = self._draw(draw, state, output, largest, batch)[0]
            jax.block_until_ready(self._state)
            return time.perf_counter() - started

    def submit(self, plan: LaunchPlan, slots: SlotTable) -> InFlight:
        """Start a step. Returns before the device has run it, unless the host scores a prompt."""
        with self._turn:
            return self._submit(plan, slots)

    def _submit(self, plan: LaunchPlan, slots: SlotTable) -> InFlight:
        any_features = int(np.bitwise_or.reduce(slots.features[plan.slots]))
        scores = bool(any_features & _PROMPT_LOGPROBS) and bool(
            slots.wants_logprob(plan.slots, plan.starts).any()
        )
        greedy = not any_features and is_greedy(plan, slots)
        keeps_logits = any_features & _LOGITS != 0
        bucket = self.buckets.pick(plan, greedy, scores, keeps_logits)
        self._count(bucket, plan.total_tokens)
        state, self._state = self._state, None
        assert state is not None, "the runner is closed, or lacks the reset after a failed launch"
        new, whole = take_new_pages(plan, slots, room_for_pages(bucket, slots.page_size))
        for owners, rows in whole:
            state = replace(state, page_table=self._set_rows(state.page_table, owners, rows))
        batch = pack(plan, slots, bucket, new)
        if any_features & _EDITS and slots.needs_load[plan.slots].any():
            state = self._load(state, plan, slots)
        if any_features & _ALLOWED:
            state = self._guide(state, plan, slots)
        submitted = time.perf_counter()
        leaves = self._leaves  # once per launch: another thread may replace them
        state, output = self._steps[bucket](leaves, state, batch)
        logits, rows = output.logits if keeps_logits else None, output.expert_rows
        prompts: Mapping[int, TokenLogprobs] = {}
        if bucket.keeps_logits and greedy:
            output = StepOutput(output.token_ids, None)  # the logits' memory is free again
        elif bucket.keeps_logits:
            num_rows = bucket.num_rows if scores else len(plan)
            size = min(size for size in self._samplers if size.num_rows >= num_rows)
            self._count(size, num_rows)
            state, drawn = self._draw(self._samplers[size], state, output, bucket, batch)
            if scores:
                assert self._score is not None
                kept = replace(output, token_ids=drawn.token_ids, expert_rows=None)
                drawn = replace(drawn, logprobs=self._score(leaves, kept, batch))
                if self._project is not None:
                    assert kept.hidden is not None
                    how = self._project, leaves, self.vocab_size
                    prompts = score_prompts(plan, slots, kept.hidden, *how)
            output = drawn
        self._state = state
        output.token_ids.copy_to_host_async()
        if rows is not None:
            rows.copy_to_host_async()
        has_positions = scores or not (bucket.decode_only or bucket.keeps_logits)
        if not any_features & _SCORES:
            return InFlight(plan, output, bucket, None, has_positions, submitted, expert_rows=rows)
        for leaf in output.logprobs or ():
            leaf.copy_to_host_async()
        if logits is not None:
            logits.copy_to_host_async()
        widths = slots.num_logprobs[plan.slots]
        return InFlight(
            *(plan, output, bucket, widths, has_positions, submitted),
            logits=logits,
            prompts=prompts,
            expert_rows=rows,
        )

    @staticmethod
    def _draw(
        draw: Draw,
        state: DeviceState,
        output: StepOutput,
        bucket: Bucket,
        batch: Int32[np.ndarray, " N"],
    ) -> tuple[DeviceState, StepOutput]:
        """Run a sampler behind a launch without one."""
        assert output.logits is not None
        rows = rows_of(batch, bucket.num_tokens, bucket.num_rows)
        last_token, sampler, drawn = draw(state.last_token, state.sampler, output.logits, rows)
        return replace(state, last_token=last_token, sampler=sampler), drawn

    def _count(self, program: Program, held: int) -> None:
        if not self.counts_demand:
            return
        key = program, held
        self._demand[key] = self._demand.get(key, 0) + 1
        if not self.has_demand.is_set():
            self.has_demand.set()

    def take_demand(self) -> Demand:
        """Return the launches since the last call, for the choice of what else is worth having."""
        self.has_demand.clear()
        taken, self._demand = self._demand, {}
        return taken

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
        self.expert_rows.read(step.expert_rows)
        if token_ids.ndim == 2:
            token_ids = token_ids[slice(num_steps) if num_steps > 1 else 0]
        ok = token_ids != NO_TOKEN
        if step.num_logprobs is None:
            return token_ids, ok, None
        # Behind the vocabulary there is padding where it is divided over devices.
        logits = None if step.logits is None else np.asarray(step.logits)[:, : self.vocab_size]
        logprobs = None
        if step.output.logprobs is not None:
            logprobs = TokenLogprobs(*(np.asarray(leaf) for leaf in step.output.logprobs))
        tokens = step.plan.num_tokens if step.has_positions else np.ones(num_rows, np.int32)
        ends = np.cumsum(tokens)
        found = StepLogprobs(step.num_logprobs, ends, logprobs, logits, step.prompts)
        return token_ids, ok, found

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        self._counter.close()
        with self._turn:
            self._state = None
        self._leaves, self._steps, self._samplers, self._set_allowed = [], {}, {}, {}
        self._load_slot = self._set_rows = self._make_state = _closed


def _closed(*_: Any) -> Any:
    raise RuntimeError("the runner is closed")
