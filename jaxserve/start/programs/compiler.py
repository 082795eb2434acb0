# pyright: reportUnknownMemberType=false
"""Compiler: lowers the programs of a StartPlan to XLA's input."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.stages import Lowered

from jaxserve.execution.batch import pack, rows_size, unpack
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
from jaxserve.execution.columns import Columns
from jaxserve.execution.logprobs import BLOCK, DeviceLogprobs
from jaxserve.execution.mesh import (
    PARTS,
    SECOND,
    WHOLE,
    make_mesh,
    mapped,
    placed_arguments,
    placed_shapes,
)
from jaxserve.execution.page_table import null_rows, set_rows
from jaxserve.execution.sampler_state import (
    SamplerState,
    SlotLoad,
    load_slot,
    null_load,
    set_allowed,
)
from jaxserve.execution.state import DeviceState, StepOutput, make_state, state_specs
from jaxserve.execution.step import (
    choose_tokens,
    decode_steps,
    model_step,
    project_positions,
    score_positions,
)
from jaxserve.models.linear import accumulator
from jaxserve.models.shards import padded_vocab
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.start.plan.cache_kinds import pool_kinds
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs.described_card import DescribedCard
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Int32


def product_precision(setting: str, dtype: Any) -> AbstractContextManager[None]:
    """Return a context in which the matrix products of a model are traced with a precision.

    "highest" gives float32 on a GPU its full precision. Any other setting keeps JAX's default
    there, TF32. A CPU and narrower dtypes have no choice.

    Args:
        setting: `EngineConfig.float32_matmul_precision`.
        dtype: dtype of the model's activations.
    """
    if setting == "highest" and dtype == np.float32 and target_device().platform == "gpu":
        return jax.default_matmul_precision("highest")
    return nullcontext()


class Compiler:
    """Lowers the programs of a plan to XLA's input, from the shapes of the model alone.

    Args:
        plan: plan of the start.
        card: absent card, or several, to compile for instead of JAX's devices.

    Attributes:
        plan: the plan.
        leaves: shapes of the model's arrays, in the order in which programs take them.
    """

    def __init__(self, plan: StartPlan, card: DescribedCard | None = None) -> None:
        self.plan = plan
        self._card = card
        self._mesh = make_mesh(plan.model_config.split.devices) if card is None else card.cards
        self.leaves = plan.model.leaves_on(self._mesh)
        self._model = plan.model.graphdef, plan.model.treedef
        self._implementation = plan.config.attention_backend
        self._keeps_states = plan.model_config.recurrent is not None
        self._null_slots = SlotTable(
            plan.max_num_seqs,
            plan.max_model_len,
            plan.block_size,
            pool_kinds(plan.model_config),
            keeps_states=self._keeps_states,
        )
        layout = plan.model_config.page_layout
        self._layout = layout if layout.is_shared else None

    def null_batch(self, bucket: Bucket) -> Int32[np.ndarray, " N"]:
        """Return a packed batch (see `pack`) without rows. It changes no page and slot in use."""
        none = np.zeros(0, np.int32)
        plan = LaunchPlan(none, none, none, none.astype(bool), none.astype(np.int64))
        return pack(plan, self._null_slots, bucket)

    def null_load(self) -> SlotLoad[np.ndarray]:
        """Return an argument of `load_slot` that writes neutral values to the null slot."""
        return null_load(self._null_slots, self.plan.model_config.vocab_size)

    def null_rows(self) -> tuple[Int32[np.ndarray, " 8"], Int32[np.ndarray, "8 M"]]:
        """Return slots and rows for `set_rows` that do not change the page table."""
        return null_rows(self._null_slots)

    def make_state(self) -> DeviceState:
        """Create the device state of the plan: zeros in KV cache, tables and sampler state."""
        plan = self.plan
        return make_state(plan.model_config, plan.memory, self._null_slots.num_columns)

    def state_shapes(self) -> DeviceState:
        """Return the device state as ShapeDtypeStructs, sharded if there are several devices."""
        shapes = jax.eval_shape(self.make_state)
        if self._mesh is None:
            return shapes
        return placed_shapes(self._mesh, shapes, state_specs(self.plan.memory))

    def lower(self, key: Key) -> Lowered:
        """Trace the program of a key and lower it to XLA's input, for the card if there is one."""
        with nullcontext() if self._card is None else self._card.tracing():
            if isinstance(key, Bucket):
                return self._lower_step(key)
            if isinstance(key, Sampler):
                return self._lower_sampler(key)
            if key.kind == "set allowed":
                return self._lower_set_allowed(key.count)
            lower: dict[SmallProgram, Callable[[], Lowered]] = {
                SCORE: self._lower_score,
                PROJECT: self._lower_project,
                STATE: self._lower_state,
                LOAD_SLOT: self._lower_load_slot,
                SET_ROWS: self._lower_set_rows,
            }
            return lower[key]()

    def _lower(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        donate: int | tuple[int, ...] = (),
        results: Any = WHOLE,
    ) -> Lowered:
        """Lower a function for the mesh, the card or JAX's device.

        Args:
            function: a function of arrays.
            arguments: arrays, or their shapes.
            donate: numbers of the donated arguments.
            results: partition specs of the results on a mesh.
        """
        if self._mesh is not None:
            function = mapped(self._mesh, function, arguments, results)
            arguments = placed_arguments(self._mesh, arguments)
        elif self._card is not None:
            return self._card.lower(function, arguments, donate)
        return self._lower_placed(jax.jit(function, donate_argnums=donate), arguments)

    def _lower_placed(self, program: Any, arguments: tuple[Any, ...] = ()) -> Lowered:
        if self._card is not None:
            return self._card.lower_placed(program, arguments)
        return program.lower(*arguments)

    @property
    def _precision(self) -> AbstractContextManager[None]:
        return product_precision(self.plan.config.float32_matmul_precision, self.plan.dtype)

    def step_call(
        self, bucket: Bucket
    ) -> tuple[
        Callable[..., tuple[DeviceState, StepOutput]],
        tuple[list[Any], DeviceState, Int32[np.ndarray, " N"]],
    ]:
        """Return the function of a bucket's launches, and the shapes of its arguments for tracing.

        The program donates the second argument, the device state.
        """
        step = partial(decode_steps, most=bucket.num_steps)
        if bucket.num_steps == 1:
            step = partial(model_step, decode_only=bucket.decode_only)
        options: Any = {"greedy": bucket.greedy, "implementation": self._implementation}
        options |= {"keeps_logits": bucket.keeps_logits, "layout": self._layout}
        shape = bucket.num_tokens, bucket.num_rows, self._keeps_states, self._null_slots.num_parts

        def run(
            leaves: list[Array], state: DeviceState, words: Int32[Array, " N"]
        ) -> tuple[DeviceState, StepOutput]:
            batch = unpack(words, *shape)
            with self._precision:
                return step(*self._model, leaves, state, batch, **options)

        return run, (self.leaves, self.state_shapes(), self.null_batch(bucket))

    def _lower_step(self, bucket: Bucket) -> Lowered:
        run, arguments = self.step_call(bucket)
        places: Any = (WHOLE, WHOLE, SECOND, WHOLE, PARTS)
        results = state_specs(self.plan.memory), StepOutput(*places)
        return self._lower(run, *arguments, donate=1, results=results)

    def _lower_sampler(self, sampler: Sampler) -> Lowered:
        num_rows, most = sampler.num_rows, self.plan.max_num_seqs

        def run(
            last_token: Array, state: SamplerState, logits: Array, words: Int32[Array, " n"]
        ) -> tuple[Array, SamplerState, StepOutput]:
            batch = jax.tree.map(_first(num_rows), unpack(words, 0, most))
            columns = Columns.of(self.plan.model_config)
            return choose_tokens(last_token, state, logits[:num_rows], batch, columns)

        state, words = self.state_shapes(), _shape((rows_size(most),), np.int32)
        arguments = (state.last_token, state.sampler, self._logits_shape(most), words)
        return self._lower(run, *arguments, donate=(0, 1))

    def _lower_score(self) -> Lowered:
        """Lower the program that computes log-probabilities of prompts after the largest launch."""
        bucket, slots = self.plan.buckets.largest, self._null_slots
        shape = bucket.num_tokens, bucket.num_rows, self._keeps_states, slots.num_parts

        def run(
            leaves: list[Array], output: StepOutput, words: Int32[Array, " N"]
        ) -> DeviceLogprobs:
            batch = unpack(words, *shape)
            return score_positions(
                *self._model,
                leaves,
                output,
                slots.num_slots,
                batch,
                implementation=self._implementation,
            )

        output = StepOutput(
            token_ids=_shape((bucket.num_rows,), np.int32),
            logprobs=None,
            logits=self._logits_shape(bucket.num_rows),
            hidden=self._hidden_shape(bucket),
        )
        with self._precision:
            return self._lower(run, self.leaves, output, self.null_batch(bucket))

    def _lower_project(self) -> Lowered:
        """Lower the program that computes logits at a few positions of the largest launch."""
        bucket = self.plan.buckets.largest
        options: Any = {"implementation": self._implementation}
        options["count"] = min(BLOCK, bucket.num_tokens)

        def run(leaves: list[Array], hidden: Array, start: Array, num_tokens: Array) -> Array:
            positions = (leaves, hidden, start, num_tokens)
            return project_positions(*self._model, *positions, **options)

        hidden, number = self._hidden_shape(bucket), _shape((), np.int32)
        with self._precision:
            return self._lower(run, self.leaves, hidden, number, number, results=SECOND)

    def _lower_state(self) -> Lowered:
        if self._mesh is None:
            return self._lower(self.make_state)
        places = jax.tree.map(attrgetter("sharding"), self.state_shapes())
        return self._lower_placed(jax.jit(self.make_state, out_shardings=places))

    def _lower_load_slot(self) -> Lowered:
        return self._lower(load_slot, self.state_shapes().sampler, self.null_load(), donate=0)

    def _lower_set_rows(self) -> Lowered:
        table = self.state_shapes().page_table
        return self._lower(set_rows, table, *self.null_rows(), donate=0)

    def _lower_set_allowed(self, count: int) -> Lowered:
        sampler = self.state_shapes().sampler
        words = _shape((count, sampler.allowed.shape[1]), np.uint32)
        return self._lower(set_allowed, sampler, _shape((count,), np.int32), words, donate=0)

    def _hidden_shape(self, bucket: Bucket) -> Any:
        return _shape((bucket.num_tokens, self.plan.model_config.hidden_size), self.plan.dtype)

    def _logits_shape(self, rows: int) -> Any:
        # The columns are sharded over the devices.
        shape = _shape((rows, padded_vocab(self.plan.model_config)), accumulator(self.plan.dtype))
        return shape if self._mesh is None else placed_shapes(self._mesh, shape, SECOND)


def _shape(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _first(count: int) -> Callable[[Array], Array]:
    return lambda array: array[:count] if array.ndim else array
