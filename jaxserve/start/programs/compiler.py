# pyright: reportUnknownMemberType=false
"""Compiler: lowers and compiles the programs of an engine, or takes them from the store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
from flax import nnx
from jax.stages import Compiled, Lowered

from jaxserve.execution.batch import pack, rows_size, unpack
from jaxserve.execution.buckets import Bucket, Program, Sampler
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
    spec_of,
)
from jaxserve.execution.page_table import null_rows, set_rows
from jaxserve.execution.sampler_state import (
    SamplerState,
    SlotLoad,
    load_slot,
    null_load,
    set_allowed,
)
from jaxserve.execution.state import DeviceState, StepOutput, kv_dtype, make_state, state_specs
from jaxserve.execution.step import (
    choose_tokens,
    decode_steps,
    model_step,
    project_positions,
    score_positions,
)
from jaxserve.models import Decoder, ModelConfig
from jaxserve.models.linear import accumulator
from jaxserve.models.shards import padded_vocab
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.settings.config import EngineConfig
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.programs.store import ProgramStore
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Int32


def product_precision(chosen: str, dtype: Any) -> AbstractContextManager[None]:
    """Return a context in which a model's products are traced, with the precision chosen for them.

    JAX's own choice for float32 is TF32 on a GPU, and stays for "high". On a CPU, and in the
    narrower dtypes, there is no choice.

    Args:
        chosen: `EngineConfig.float32_matmul_precision`.
        dtype: of the model's activations.
    """
    if chosen == "highest" and dtype == np.float32 and target_device().platform == "gpu":
        return jax.default_matmul_precision("highest")
    return nullcontext()


_NOT_PICKLED = ("leaves", "store", "_treedef", "_null_slots", "_mesh")


class Compiler:
    """The source of an engine's compiled programs.

    Args:
        config: resolved (see `EngineConfig.resolve`).
        model_config: of the model.
        model: with its weights placed, or shapes in their place until `place`, if ever.
        card: that is not there, to compile for instead of JAX's device.

    Attributes:
        leaves: the model's arrays, in the order in which programs take them.
        dtype: of activations.
        kv_dtype: of the pages of KV cache.
        store: where programs come from; to be set before the first is compiled.
    """

    store: ProgramStore

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: Decoder,
        card: DescribedCard | None = None,
    ) -> None:
        self._card = card
        self._mesh = make_mesh(model_config.split.devices) if card is None else card.cards
        self.config = config
        self.model_config = model_config
        dtype = self.dtype = np.dtype(model.norm.scale.get_value().dtype)  # of a shape alone too
        self._logits = accumulator(dtype)
        self._graphdef, state = nnx.split(model)  # pyright: ignore[reportUnknownVariableType]
        leaves, self._treedef = jax.tree.flatten(state)
        self.leaves: list[jax.Array] = leaves
        self.kv_dtype = kv_dtype(config.kv_cache_dtype, dtype, target_device().platform)
        self._null_slots = _slot_table(config)

    def place(self, model: Decoder) -> bool:
        """Take the weights; return False where programs were made for others."""
        graphdef, state = nnx.split(model)  # pyright: ignore[reportUnknownVariableType]
        leaves, treedef = jax.tree.flatten(state)  # pyright: ignore[reportUnknownVariableType]
        if (graphdef, treedef) != (self._graphdef, self._treedef):
            return False
        if any(
            (new.shape, new.dtype, spec_of(new)) != (leaf.shape, leaf.dtype, spec_of(leaf))
            for new, leaf in zip(leaves, self.leaves, strict=True)
        ):
            return False
        self.leaves = leaves
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to compile the same programs: of arrays, the shapes."""
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]
        specs = list(map(spec_of, self.leaves))
        kept = {name: value for name, value in vars(self).items() if name not in _NOT_PICKLED}
        model: Any = jax.tree.unflatten(cast(Any, self._treedef), shapes)
        return kept | {"model": model, "specs": specs}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """Restore a compiler without a store."""
        self.leaves, self._treedef = jax.tree.flatten(kept.pop("model"))
        specs = kept.pop("specs")
        vars(self).update(kept)
        self._mesh = make_mesh(self.model_config.split.devices)
        if self._mesh is not None:
            self.leaves = placed_shapes(self._mesh, self.leaves, specs)
        self._null_slots = _slot_table(self.config)

    def null_batch(self, bucket: Bucket) -> Int32[np.ndarray, " N"]:
        """Return a batch of padding only: it writes to no page and to no slot but the null one."""
        none = np.zeros(0, np.int32)
        plan = LaunchPlan(none, none, none, none.astype(bool), none.astype(np.int64))
        return pack(plan, self._null_slots, bucket)

    def null_load(self) -> SlotLoad[np.ndarray]:
        """Return the settings of a request without any, for the null slot."""
        return null_load(self._null_slots, self.model_config.vocab_size)

    def null_rows(self) -> tuple[Int32[np.ndarray, " 8"], Int32[np.ndarray, "8 M"]]:
        """Return slots and rows that change nothing in the page table."""
        return null_rows(self._null_slots)

    def state_maker(self, num_pages: int) -> Callable[[], DeviceState]:
        """Return the maker of an empty device state."""
        return partial(
            make_state,
            self.model_config,
            num_pages,
            self.config.block_size,
            self.config.max_num_seqs or 1,
            self.kv_dtype,
            max_pages=self._null_slots.max_pages,
        )

    def _shapes(self, num_pages: int) -> DeviceState:
        shapes = jax.eval_shape(self.state_maker(num_pages))
        if self._mesh is None:
            return shapes
        return placed_shapes(self._mesh, shapes, state_specs(len(shapes.kv), self.kv_dtype))

    def sampler_shapes(self) -> SamplerState:
        """Return the shapes of what the sampler keeps on the device."""
        return self._shapes(num_pages=2).sampler

    def table_shape(self) -> Any:
        """Return the shape of the page table on the device."""
        return self._shapes(num_pages=2).page_table

    def program(self, program: Program, num_pages: int) -> Compiled:
        """Compile a launch or a sampler; over a cache of so many pages."""
        if isinstance(program, Sampler):
            return self.sampler(program)
        return self.step(program, num_pages)

    def find(self, program: Program, num_pages: int) -> Compiled | None:
        """Load a launch or a sampler from a file; None where it must be compiled."""
        return self.store.find(program_name(program, num_pages))

    def has(self, program: Program, num_pages: int) -> bool:
        """Return whether `find` would find a file."""
        return self.store.has(program_name(program, num_pages))

    def step(self, bucket: Bucket, num_pages: int) -> Compiled:
        """Compile the launches of a bucket, over a cache of so many pages."""
        name = program_name(bucket, num_pages)
        return self.store.get(name, partial(self._lower_step, bucket, num_pages))

    def _lower_step(self, bucket: Bucket, num_pages: int) -> Lowered:
        run, arguments = self.step_call(bucket, num_pages)
        places: Any = (WHOLE, WHOLE, SECOND, WHOLE, PARTS)
        output = StepOutput(*places)
        results = state_specs(self.model_config.num_hidden_layers, self.kv_dtype), output
        return self._lower(run, *arguments, donate=1, results=results)

    def _lower(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        donate: int | tuple[int, ...] = (),
        results: Any = WHOLE,
    ) -> Lowered:
        """Lower a function of arrays, or of their shapes; of those it donates some.

        Args:
            results: how its results lie on a mesh.
        """
        if self._mesh is not None:
            function = mapped(self._mesh, function, arguments, results)
            arguments = placed_arguments(self._mesh, arguments)
        elif self._card is not None:
            return self._card.lower(function, arguments, donate)
        return self._lower_placed(jax.jit(function, donate_argnums=donate), arguments)

    def _lower_placed(self, program: Any, arguments: tuple[Any, ...] = ()) -> Lowered:
        """Lower what `jax.jit` made of a function; its arguments or results say where they lie."""
        if self._card is not None:
            return self._card.lower_placed(program, arguments)
        return program.lower(*arguments)

    def step_call(
        self, bucket: Bucket, num_pages: int
    ) -> tuple[
        Callable[..., tuple[DeviceState, StepOutput]],
        tuple[list[jax.Array], DeviceState, Int32[np.ndarray, " N"]],
    ]:
        """Return the launches of a bucket as a function, and arguments, or shapes, to trace it on.

        The second argument, the device state, is to be donated.
        """
        step = partial(decode_steps, most=bucket.num_steps)
        if bucket.num_steps == 1:
            step = partial(model_step, decode_only=bucket.decode_only)
        options: Any = {"greedy": bucket.greedy, "implementation": self.config.attention_backend}
        options["keeps_logits"] = bucket.keeps_logits

        def run(
            leaves: list[Array], state: DeviceState, words: Int32[Array, " N"]
        ) -> tuple[DeviceState, StepOutput]:
            batch = unpack(words, bucket.num_tokens, bucket.num_rows)
            with product_precision(self.config.float32_matmul_precision, self.dtype):
                return step(self._graphdef, self._treedef, leaves, state, batch, **options)

        return run, (self.leaves, self._shapes(num_pages), self.null_batch(bucket))

    def sampler(self, sampler: Sampler) -> Compiled:
        """Compile a sampler that follows steps of the most rows."""
        num_rows, most = sampler.num_rows, self.config.max_num_seqs or 1

        def run(
            last_token: Array, state: SamplerState, logits: Array, words: Int32[Array, " n"]
        ) -> tuple[Array, SamplerState, StepOutput]:
            batch = jax.tree.map(_first(num_rows), unpack(words, 0, most))
            columns = Columns.of(self.model_config)
            return choose_tokens(last_token, state, logits[:num_rows], batch, columns)

        def lower() -> Lowered:
            state = self._shapes(num_pages=2)
            words = jax.ShapeDtypeStruct((rows_size(most),), np.int32)
            logits = self._logits_shape(most)
            arguments = (state.last_token, state.sampler, logits, words)
            return self._lower(run, *arguments, donate=(0, 1))

        return self.store.get(program_name(sampler, 0), lower)

    def score(self, bucket: Bucket) -> Compiled:
        """Compile what scores the prompts of a bucket's steps."""

        def run(
            leaves: list[Array], output: StepOutput, words: Int32[Array, " N"]
        ) -> DeviceLogprobs:
            batch = unpack(words, bucket.num_tokens, bucket.num_rows)
            return score_positions(
                *(self._graphdef, self._treedef, leaves, output, self._null_slots.num_slots, batch),
                implementation=self.config.attention_backend,
            )

        def lower() -> Lowered:
            shape: Any = jax.ShapeDtypeStruct
            output = StepOutput(
                token_ids=shape((rows,), np.int32),
                logprobs=None,
                logits=self._logits_shape(rows),
                hidden=shape((bucket.num_tokens, config.hidden_size), self.dtype),
            )
            with product_precision(self.config.float32_matmul_precision, self.dtype):
                return self._lower(run, self.leaves, output, self.null_batch(bucket))

        rows, config = bucket.num_rows, self.model_config
        return self.store.get(f"score, {bucket}", lower)

    def project(self, bucket: Bucket) -> Compiled:
        """Compile the logits at a few positions of a bucket's steps."""
        options: Any = {"implementation": self.config.attention_backend}
        options["count"] = min(BLOCK, bucket.num_tokens)

        def run(leaves: list[Array], hidden: Array, start: Array, num_tokens: Array) -> Array:
            positions = (leaves, hidden, start, num_tokens)
            return project_positions(self._graphdef, self._treedef, *positions, **options)

        def lower() -> Lowered:
            shape: Any = jax.ShapeDtypeStruct
            hidden = shape((bucket.num_tokens, self.model_config.hidden_size), self.dtype)
            number = shape((), np.int32)
            with product_precision(self.config.float32_matmul_precision, self.dtype):
                return self._lower(run, self.leaves, hidden, number, number, results=SECOND)

        return self.store.get(f"project, {bucket}", lower)

    def make_state(self, num_pages: int) -> Compiled:
        """Compile the maker of an empty device state."""
        make = self.state_maker(num_pages)

        def lower() -> Lowered:
            if self._mesh is None:
                return self._lower(make)
            places = jax.tree.map(attrgetter("sharding"), self._shapes(num_pages))
            return self._lower_placed(jax.jit(make, out_shardings=places))

        return self.store.get(f"state, {num_pages} pages", lower)

    def _logits_shape(self, rows: int) -> Any:
        """Return the shape of logits, of which each device has some columns."""
        shape = jax.ShapeDtypeStruct((rows, padded_vocab(self.model_config)), self._logits)
        return shape if self._mesh is None else placed_shapes(self._mesh, shape, SECOND)

    def load_slot(self) -> Compiled:
        """Compile what writes a request's settings into the sampler's state."""
        load, shapes = self.null_load(), self.sampler_shapes()
        return self.store.get("load slot", lambda: self._lower(load_slot, shapes, load, donate=0))

    def set_rows(self) -> Compiled:
        """Compile what replaces whole rows of the page table."""
        table, rows = self.table_shape(), self.null_rows()
        return self.store.get("set rows", lambda: self._lower(set_rows, table, *rows, donate=0))

    def set_allowed(self, count: int) -> Compiled:
        """Compile what replaces the masks of so many slots in the sampler's state."""
        shapes = self.sampler_shapes()
        words = jax.ShapeDtypeStruct((count, shapes.allowed.shape[1]), np.uint32)
        slots = jax.ShapeDtypeStruct((count,), np.int32)
        return self.store.get(
            f"set allowed, {count}",
            lambda: self._lower(set_allowed, shapes, slots, words, donate=0),
        )


def _slot_table(config: EngineConfig) -> SlotTable:
    assert config.max_num_seqs and config.max_model_len
    return SlotTable(config.max_num_seqs, config.max_model_len, config.block_size)


def program_name(program: Program, num_pages: int) -> str:
    """Return the name of a launch or a sampler in the store; over a cache of so many pages."""
    if isinstance(program, Sampler):
        return str(program)
    apart = ", sampler apart" if program.keeps_logits else ""
    return f"{program}{apart}, {num_pages} pages"


def _first(count: int) -> Callable[[Array], Array]:
    """Return a function that takes the first entries of an array that has any axes."""
    return lambda array: array[:count] if array.ndim else array
