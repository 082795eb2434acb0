"""Programs of an engine, described so that they can be compiled for a card and found again.

Imported by the engine's process and by the compiler's, which has other versions of Python and JAX,
and neither tokenizers nor Transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from jaxserve.execution.buckets import Bucket, BucketSet
from jaxserve.execution.page_table import set_rows
from jaxserve.execution.sampler_state import load_slot, set_allowed
from jaxserve.settings.config import EngineConfig
from jaxserve.start.programs.compiler import Compiler
from scripts.lib.placed_model import plan_of_model
from tests.machine_code.steps.models import MODELS

STATE = "make state"
LOAD_SLOT = "load slot"
SET_ROWS = "set rows"


@dataclasses.dataclass(frozen=True)
class Setup:
    """Engine whose programs are compiled and executed: a model, and the sizes of its programs.

    Attributes:
        model: name of one of `MODELS`.
        precision: of a float32 model's products on a card: "highest" or "high".
        num_slots, num_tokens: rows and tokens of the largest step. There are no other buckets.
        num_pages: of the cache, the null page included.
        max_len: most tokens of a sequence.
        launch_steps: most decode steps of a launch, where it takes several. There are programs of
            one step too.
    """

    model: str
    precision: Literal["highest", "high"] = "highest"
    num_slots: int = 4
    num_tokens: int = 32
    num_pages: int = 26
    max_len: int = 80
    launch_steps: int = 4

    @property
    def name(self) -> str:
        """The model, and the settings that differ from the defaults."""
        is_plain = self.precision == Setup.precision
        return self.model if is_plain else f"{self.model}-{self.precision}"

    def config(self, num_steps: int = 1) -> EngineConfig:
        """Return the engine's settings, for launches of so many steps."""
        model = MODELS[self.model]
        config = EngineConfig(
            dtype=model.dtype,
            kv_cache_dtype="fp8" if model.kv_cache_dtype == "fp8" else "auto",
            max_model_len=self.max_len,
            max_num_seqs=self.num_slots,
            max_num_batched_tokens=self.num_tokens,
            decode_sizes=(self.num_slots,),
            token_sizes=(self.num_tokens,),
            num_gpu_blocks_override=self.num_pages,
            num_scheduler_steps=num_steps,
            float32_matmul_precision=self.precision,
            compilation_cache_dir="none",
            check_invariants=True,
        )
        return config.resolve("gpu", model.config().max_position_embeddings)

    def buckets(self, num_steps: int = 1) -> BucketSet:
        """Return the buckets of an engine on a card, where greedy decodes have their own."""
        config = self.config(num_steps)
        assert config.max_num_seqs and config.max_num_batched_tokens
        return BucketSet(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.decode_sizes,
            config.token_sizes,
            greedy_decode=True,
            num_steps=num_steps,
        )

    def steps(self) -> dict[str, Bucket]:
        """Return the buckets of both engines by the names of their programs."""
        both = (*self.buckets(), *self.buckets(self.launch_steps))
        return {str(bucket): bucket for bucket in both}

    def mask_counts(self) -> list[int]:
        """Return how many slots' masks programs replace at a time."""
        return sorted({1, self.num_slots})

    def programs(self) -> list[str]:
        """Return the names of all programs."""
        masks = [mask_program(count) for count in self.mask_counts()]
        return [STATE, LOAD_SLOT, SET_ROWS, *masks, *self.steps()]


def mask_program(count: int) -> str:
    """Name the program that replaces the masks of so many slots."""
    return f"set allowed, {count}"


@dataclasses.dataclass(frozen=True)
class Traced:
    """Program as a function of a flat list of arrays.

    Attributes:
        call: the function.
        shapes: of its arguments.
        donated: the arguments that it takes over.
    """

    call: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[int, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple[Any, ...], state: int) -> Traced:
        """Describe a function of trees. Argument number `state` is donated, unless it is -1."""
        leaves, treedef = jax.tree.flatten(arguments)
        counts = [len(jax.tree.leaves(argument)) for argument in arguments]
        first = sum(counts[:state])
        donated = range(first, first + counts[state]) if state >= 0 else ()
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return cls(
            lambda *arrays: function(*jax.tree.unflatten(treedef, arrays)), shapes, tuple(donated)
        )


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """One program of a setup."""

    setup: Setup
    program: str

    def trace(self, mesh: Any) -> Traced:
        """Return the program that the engine compiles for the card of a mesh."""
        setup, model = self.setup, MODELS[self.setup.model]
        decoder = model.build()
        with jax.sharding.use_abstract_mesh(mesh):
            config = model.config().for_length(setup.max_len)
            compiler = Compiler(plan_of_model(setup.config(), config, decoder))
            shapes = compiler.state_shapes()
            sampler = shapes.sampler
            if self.program == STATE:
                return Traced.of(compiler.make_state, (), -1)
            if self.program == LOAD_SLOT:
                return Traced.of(load_slot, (sampler, compiler.null_load()), 0)
            if self.program == SET_ROWS:
                return Traced.of(set_rows, (shapes.page_table, *compiler.null_rows()), 0)
            for count in setup.mask_counts():
                if self.program == mask_program(count):
                    words = jax.ShapeDtypeStruct((count, sampler.allowed.shape[1]), np.uint32)
                    slots = jax.ShapeDtypeStruct((count,), np.int32)
                    return Traced.of(set_allowed, (sampler, slots, words), 0)
            bucket = setup.steps()[self.program]
            run, arguments = compiler.step_call(bucket)
        return Traced.of(run, arguments, 1)
