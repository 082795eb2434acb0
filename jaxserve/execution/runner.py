# pyright: reportUnknownMemberType=false
"""Runner: submits launches to the device in order, and reads their results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve.execution.batch import pack, rows_of
from jaxserve.execution.buckets import Bucket, BucketSet, Demand, Program, Sampler
from jaxserve.execution.expert_rows import ExpertRows
from jaxserve.execution.logprobs import DeviceLogprobs
from jaxserve.execution.page_table import room_for_pages, take_new_pages
from jaxserve.execution.results import InFlight, Project, score_prompts
from jaxserve.execution.sampler_state import (
    LoadSlot,
    SamplerState,
    SetAllowed,
    load_new,
    set_changed,
)
from jaxserve.execution.sampling import is_greedy
from jaxserve.execution.state import PAGES, DeviceState, MemoryKind, StepOutput, release
from jaxserve.execution.typed_jax import CompileCounter
from jaxserve.models import ModelConfig
from jaxserve.request import SamplerFeature
from jaxserve.scheduling.logprobs import StepLogprobs, TokenLogprobs
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import SlotTable

if TYPE_CHECKING:
    from jaxtyping import Bool, Int32

# Called with (stage, done, total) while the engine starts.
OnProgress = Callable[[str, int, int], None]
Step = Callable[[list[jax.Array], DeviceState, np.ndarray], tuple[DeviceState, StepOutput]]
Draw = Callable[
    [jax.Array, SamplerState, jax.Array, np.ndarray], tuple[jax.Array, SamplerState, StepOutput]
]
Score = Callable[[list[jax.Array], StepOutput, np.ndarray], DeviceLogprobs]
SetRows = Callable[[jax.Array, np.ndarray, np.ndarray], jax.Array]

# Plain integers, because an operation on an IntFlag takes half a microsecond.
_EDITS, _ALLOWED = int(SamplerFeature.EDITS), int(SamplerFeature.ALLOWED)
_SCORES, _LOGITS = int(SamplerFeature.SCORES), int(SamplerFeature.LOGITS)
_PROMPT_LOGPROBS = int(SamplerFeature.PROMPT_LOGPROBS)
_ALTERNATIVES = int(SamplerFeature.ALTERNATIVES | SamplerFeature.PROMPT_ALTERNATIVES)


@dataclass(frozen=True)
class Programs:
    """The compiled programs of an engine.

    Attributes:
        buckets: all padded shapes, including shapes whose program is not compiled yet.
        steps: the programs of launches, by bucket. They map (leaves, state, words) to (state,
            output): the model's arrays, the device state, and the packed batch.
        samplers: the programs that sample after launches with `keeps_logits`. They map (last
            tokens, sampler state, logits, words of the rows) to (last tokens, sampler state,
            output).
        score: computes the log-probabilities of prompts after the largest launch with
            `keeps_logits`, from (leaves, output, words). None without such launches.
        make_state: creates an empty device state.
        load_slot: writes one slot's row of the sampler state. (sampler state, load) to sampler
            state.
        set_rows: replaces rows of the page table. (page table, slots, rows) to page table.
        set_allowed: the programs that replace token masks, by their number of slots. (sampler
            state, slots, words) to sampler state.
        project: computes the logits at positions of the largest mixed step, from (leaves, hidden
            states, first position, tokens). None unless the engine's settings let the host score
            prompts.
    """

    buckets: BucketSet
    steps: Mapping[Bucket, Step]
    samplers: Mapping[Sampler, Draw]
    score: Score | None
    make_state: Callable[[], DeviceState]
    load_slot: LoadSlot
    set_rows: SetRows
    set_allowed: Mapping[int, SetAllowed]
    project: Project | None = None


class Runner:
    """The device's side of an engine: weights, device state and compiled programs.

    `jaxserve.start` creates it. Launches run in the order of their submission.

    Args:
        model_config: the configuration of the model.
        memory: the kinds of memory of the device state, with their sizes.
        leaves: the model's arrays on the device.
        programs: the compiled programs. `add` adds others later.
        state: the device state.
        counter: the counter of compilations, closed with the runner.

    Attributes:
        buckets: the padded shapes that have programs.
        num_pages: the pages of the KV cache, including the null page.
        most_steps: the most decode steps of one launch after all programs were added.
        keeps_logits: whether the host can get the logits of sampled tokens.
        counts_demand: whether launches are counted for `take_demand`.
        has_demand: an event that is set while `take_demand` would return launches.
        weight_bytes: the bytes of the parameters as they are stored.
        expert_rows: the rows that each device's experts have computed, up to the last launch that
            was read.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        memory: tuple[MemoryKind, ...],
        leaves: list[jax.Array],
        programs: Programs,
        state: DeviceState,
        counter: CompileCounter,
    ) -> None:
        self.model_config, self.memory = model_config, memory
        self.num_pages = self.num_units(PAGES)
        self.vocab_size = model_config.vocab_size
        self._all_buckets = programs.buckets
        self.buckets = self._all_buckets.present(programs.steps)
        self.most_steps = self._all_buckets.num_steps
        self.keeps_logits = self._all_buckets.largest.keeps_logits
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
        # One thread adds programs and another submits launches. Both use the state.
        self._turn = threading.Lock()
        self.counts_demand = False
        self.has_demand = threading.Event()
        self.expert_rows = ExpertRows()
        self._demand: dict[tuple[Program, int], int] = {}

    def num_units(self, kind: str) -> int:
        """Return the units of a kind of memory by its name, or 0 for a model without it."""
        return sum(memory.count for memory in self.memory if memory.name == kind)

    @property
    def num_compiles(self) -> int:
        """Number of programs that JAX has compiled since the start of this engine began.

        After `count_compiles_of` other threads, such as those of a trainer, do not count.
        """
        return self._counter.num_compiles

    def count_compiles_of(self, thread: int) -> None:
        """Count only the compilations of a thread from now on, the one that submits launches."""
        self._counter.thread = thread

    @property
    def leaves(self) -> list[jax.Array]:
        """The model's arrays, in the order in which programs take them."""
        return self._leaves

    def replace_leaves(self, leaves: list[jax.Array]) -> None:
        """Use other arrays from the next launch on, of the same shapes. Thread-safe.

        Args:
            leaves: the arrays, in the order in which programs take them.
        """
        with self._turn:
            self._leaves = leaves

    @property
    def max_steps(self) -> int:
        """The most decode steps of one launch with the programs that are compiled now."""
        return self.buckets.num_steps

    def reset(self, error: Exception | None = None) -> None:
        """Replace the device state by a new, empty one after a failed launch has lost it.

        All KV pages and sampler states are lost. The device first finishes its running launches.

        Args:
            error: the error of the launch. The frames of its traceback, which hold device memory,
                are cleared.
        """
        with self._turn:
            self._state = release(self._state, error)
            self.expert_rows.start_anew()
            self._state = self._make_state()

    def sleep(self, level: int) -> None:
        """Free the device state, and the weights of a GPU, until `wake_up`. Thread-safe.

        Args:
            level: 1 to keep the weights, in the host's memory if the device is a GPU. 2 to drop
                them.
        """
        with self._turn:
            self._state = release(self._state, None)
            self._leaves = [] if level == 2 else _in_memory(self._leaves, "pinned_host")

    def wake_up(self, leaves: list[jax.Array] | None = None) -> None:
        """Create an empty device state, and place the weights again. Thread-safe.

        Args:
            leaves: the model's arrays, or None for those that `sleep` kept.
        """
        with self._turn:
            self._leaves = _in_memory(self._leaves, "device") if leaves is None else leaves
            self.expert_rows.start_anew()
            self._state = self._make_state()

    def add(self, program: Program, compiled: Any) -> None:
        """Add a compiled program, which is used from the next launch on. Thread-safe.

        The largest decode program also removes the early one (see `BucketSet.early`).

        Args:
            program: the key of the program.
            compiled: the compiled program.
        """
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
        """Return the keys of the compiled launches and samplers: first buckets, then samplers."""
        return [*self._steps, *self._samplers]

    def run_padding(self, program: Program, compiled: Any, batch: Int32[np.ndarray, " N"]) -> float:
        """Run a program once on padding, and return the duration in seconds.

        This touches the program's memory before a request uses it. Thread-safe: the next launch
        waits until this run has finished.

        Args:
            program: the key of the program.
            compiled: the compiled program, or None for the runner's own program with this key.
            batch: a packed batch of padding for the bucket, or for the largest bucket if the
                program is a sampler.

        Returns:
            The seconds, or infinity without a run if the runner is closed or must be reset.
        """
        with self._turn:
            if self._state is None or not self._leaves:  # closed, asleep, or about to be reset
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
        """Submit the launch of a plan to the device, and return the handle for `read`. Thread-safe.

        The smallest fitting bucket is used. New pages, sampler settings and token masks of the rows
        are sent to the device. The method returns before the device has run the launch, unless the
        host scores a prompt.

        Args:
            plan: the rows and tokens of the launch.
            slots: the slot table. Its sent pages, settings and masks are marked as sent.
        """
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
            sampler = load_new(state.sampler, plan, slots, self.vocab_size, self._load_slot)
            state = replace(state, sampler=sampler)
        if any_features & _ALLOWED:
            sampler = set_changed(state.sampler, plan, slots, self.vocab_size, self._set_allowed)
            state = replace(state, sampler=sampler)
        submitted = time.perf_counter()
        leaves = self._leaves  # once per launch: another thread may replace them
        state, output = self._steps[bucket](leaves, state, batch)
        logits, rows = output.logits if keeps_logits else None, output.expert_rows
        prompts: Mapping[int, TokenLogprobs] = {}
        if bucket.keeps_logits and greedy:
            output = StepOutput(output.token_ids, None)  # frees the memory of the logits
        elif bucket.keeps_logits:
            num_rows = bucket.num_rows if scores else len(plan)
            size = min(size for size in self._samplers if size.num_rows >= num_rows)
            self._count(size, num_rows)
            state, drawn = self._draw(self._samplers[size], state, output, bucket, batch)
            if scores:
                assert self._score is not None
                scored = replace(output, token_ids=drawn.token_ids, expert_rows=None)
                drawn = replace(drawn, logprobs=self._score(leaves, scored, batch))
                if self._project is not None:
                    assert scored.hidden is not None
                    how = self._project, leaves, self.vocab_size
                    prompts = score_prompts(plan, slots, scored.hidden, *how)
            output = drawn
        self._state = state
        output.token_ids.copy_to_host_async()
        if rows is not None:
            rows.copy_to_host_async()
        has_positions = scores or not (bucket.decode_only or bucket.keeps_logits)
        has_others = any_features & _ALTERNATIVES != 0
        kinds = has_positions, has_others, submitted
        step = InFlight(plan, output, bucket, None, *kinds, expert_rows=rows)
        if not any_features & _SCORES:
            return step
        for leaf in (output.logprobs or ())[: None if has_others else 2]:
            leaf.copy_to_host_async()
        if logits is not None:
            logits.copy_to_host_async()
        widths = slots.num_logprobs[plan.slots]
        return replace(step, num_logprobs=widths, logits=logits, prompts=prompts)

    @staticmethod
    def _draw(
        draw: Draw,
        state: DeviceState,
        output: StepOutput,
        bucket: Bucket,
        batch: Int32[np.ndarray, " N"],
    ) -> tuple[DeviceState, StepOutput]:
        assert output.logits is not None
        rows = rows_of(batch, bucket.num_tokens, bucket.num_rows)
        last_token, sampler, drawn = draw(state.last_token, state.sampler, output.logits, rows)
        return replace(state, last_token=last_token, sampler=sampler), drawn

    def _count(self, program: Program, size: int) -> None:
        if not self.counts_demand:
            return
        key = program, size
        self._demand[key] = self._demand.get(key, 0) + 1
        if not self.has_demand.is_set():
            self.has_demand.set()

    def take_demand(self) -> Demand:
        """Return the launches since the previous call, and reset their count.

        The result has the number of launches by program and by rows or tokens before padding. The
        background compiler chooses its next program by it.
        """
        self.has_demand.clear()
        taken, self._demand = self._demand, {}
        return taken

    def read(
        self, step: InFlight
    ) -> tuple[Int32[np.ndarray, "*steps R"], Bool[np.ndarray, "*steps R"], StepLogprobs | None]:
        """Wait until the device has run a launch, and return its results as NumPy arrays.

        The arrays are [R], or [num_steps, R] for a launch of several steps.

        Returns:
            The sampled token ids, booleans that are False for invalid tokens (of rows whose logits
            were not finite or excluded all tokens), and the log-probabilities, or None without a
            request for them.

        Raises:
            Exception: an error of the device. The state is then lost, and `reset` is required.
        """
        token_ids, ok, logprobs = step.read(self.vocab_size)
        self.expert_rows.read(step.expert_rows)
        return token_ids, ok, logprobs

    def close(self) -> None:
        """Release the weights, the device state and the programs. Idempotent."""
        self._counter.close()
        with self._turn:
            self._state = None
        self._leaves, self._steps, self._samplers, self._set_allowed = [], {}, {}, {}
        self._load_slot = self._set_rows = self._make_state = _closed


def _in_memory(leaves: list[jax.Array], kind: str) -> list[jax.Array]:
    """Return arrays of a GPU in another of its memories, and arrays of a CPU as they are."""
    if not leaves or next(iter(leaves[0].devices())).platform == "cpu":
        return leaves
    return [jax.device_put(leaf, leaf.sharding.with_memory_kind(kind)) for leaf in leaves]


def _closed(*_: Any) -> Any:
    raise RuntimeError("the runner is closed")
