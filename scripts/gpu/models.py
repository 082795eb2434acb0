"""Models that the GPU scripts measure and compile: shapes, floors, and the engine's own step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.execution.batch import pack, unpack
from jaxserve.execution.buckets import Bucket
from jaxserve.execution.state import make_state, memory_kinds
from jaxserve.execution.step import decode_steps, model_step
from jaxserve.models import parse_model_config
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.start.programs.compiler import product_precision
from jaxserve.weights.shapes import RANDOM, DeviceLayout, shapes_of_model

PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder, as in pallas_kernels: L layers, D hidden size, F mlp, V vocabulary."""

    architecture: str
    L: int
    D: int
    N: int
    K: int
    H: int
    F: int
    V: int
    tied: bool = False
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of config.json, besides

    @property
    def step_weights(self) -> int:
        """Parameters a step reads: all but the rows of the embedding that no token names."""
        attention = self.D * (2 * self.N + 2 * self.K) * self.H
        return self.L * (attention + 3 * self.D * self.F) + self.D * self.V

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache per token in bfloat16."""
        return 2 * 2 * self.L * self.K * self.H

    def floor(self, rows: int, tokens: int, context: int, copy: float, matmul: float) -> float:
        """Compute least seconds of a step: bytes at ``copy`` B/s, products at ``matmul`` FLOP/s.

        Args:
            rows: sequences, each of ``tokens`` new tokens that end at position ``context``.
        """
        seen = tokens * context - tokens * (tokens - 1) // 2
        head = self.D * self.V
        products = 2 * (self.step_weights - head) * rows * tokens + 2 * head * rows
        attention = 4 * self.L * self.N * self.H * rows * seen
        # Attention's bytes are not read while the products compute: it is a sum.
        weights = max(2 * self.step_weights / copy, products / matmul)
        return weights + max(rows * context * self.kv_bytes / copy, attention / matmul)

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.architecture.removesuffix("ForCausalLM").lower(),
            "hidden_size": self.D,
            "intermediate_size": self.F,
            "num_hidden_layers": self.L,
            "num_attention_heads": self.N,
            "num_key_value_heads": self.K,
            "head_dim": self.H,
            "vocab_size": self.V,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
        }
        found |= self.fields
        if pattern := found.get("hybrid_override_pattern"):
            # A model of fewer layers has the first ones, and attention.
            first = pattern[: self.L]
            found["hybrid_override_pattern"] = first if "*" in first else f"{first[:-1]}*"
        return {name: value for name, value in found.items() if value is not ABSENT}


ABSENT = object()
"""Value of a field that a config.json does not have."""
LLAMA, QWEN = "LlamaForCausalLM", "Qwen3ForCausalLM"
MODELS = {
    "8b": ModelShape(LLAMA, 32, 4096, 32, 8, 128, 14336, 128256),
    "1b": ModelShape(LLAMA, 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    "3b": ModelShape(LLAMA, 28, 3072, 24, 8, 128, 8192, 128256, tied=True),
    "14b": ModelShape(QWEN, 40, 5120, 40, 8, 128, 17408, 151936),
    "32b": ModelShape(QWEN, 64, 5120, 64, 8, 128, 25600, 151936),
    "70b": ModelShape(LLAMA, 80, 8192, 64, 8, 128, 28672, 128256),
    "0.6b": ModelShape(QWEN, 28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    "tiny": ModelShape(LLAMA, 2, 64, 4, 2, 16, 128, 256),
}


@dataclasses.dataclass(frozen=True)
class RecurrentShape(ModelShape):
    """Shape of a model that keeps a state per sequence in some layers."""

    def floor(self, rows: int, tokens: int, context: int, copy: float, matmul: float) -> float:
        """Compute least seconds of a decode of few rows, by the bytes that it reads and writes.

        These are all weights, the states of each row twice, and keys and values.
        """
        config = parse_model_config(self.config())
        weights = nnx.split(shapes_of_model(config, jnp.bfloat16, None, DeviceLayout(), RANDOM))[1]
        read = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
        read -= 0 if self.tied else 2 * self.D * self.V  # an embedding, of which few rows are read
        pages = 4 * context * config.num_page_layers * self.K * self.H
        return (read + rows * (2 * config.state_bytes + pages)) / copy


def empty_words(
    T: int, R: int, context: int, num_steps: int = 1, keeps_states: bool = False
) -> np.ndarray:
    """Pack a batch of padding in the shapes of a bucket, for ``context`` positions a row."""
    none = np.zeros(0, np.int32)
    plan = LaunchPlan(none, none, none, none.astype(bool), none.astype(np.int64))
    bucket = Bucket(T, R, decode_only=T == R, num_steps=num_steps)
    return pack(plan, SlotTable(R, context, PAGE_SIZE, keeps_states=keeps_states), bucket)


def full_words(
    T: int,
    R: int,
    context: int,
    draws: bool = False,
    num_steps: int = 1,
    keeps_states: bool = False,
) -> np.ndarray:
    """Pack a batch of R rows of T / R tokens each, whose pages were sent before.

    Args:
        context: tokens of each row after the last step.
        draws: with top_k 50 and top_p 0.9. Otherwise greedy.
    """
    each, rng = T // R, np.random.default_rng(0)
    words = empty_words(T, R, context, num_steps, keeps_states)
    batch = unpack(words, T, R, keeps_states)  # views, through which the words are written
    length = context - num_steps + 1
    batch.tokens[:] = rng.integers(0, 200, T)
    batch.positions[:] = length - each + np.tile(np.arange(each), R)
    batch.row_of_token[:] = np.repeat(np.arange(R), each)
    batch.query_start[:] = np.arange(R + 1) * each
    batch.kv_len[:] = length
    batch.slots[:] = batch.sample_slots[:] = np.arange(R)
    batch.sample_index[:] = (np.arange(R) + 1) * each - 1
    batch.temperature[:] = 1.0 if draws else 0.0
    batch.top_k[:] = 50 if draws else 0
    batch.top_p[:] = 0.9 if draws else 1.0
    batch.stop_length[:] = 2 * context
    batch.num_steps[...] = num_steps
    if batch.states is not None:  # each row goes on from its own states, and none is saved
        batch.states[:] = np.array([-1, 0, 0])[:, None]
    return words


def scattered_pages(R: int, context: int) -> np.ndarray:
    """Make a page table for R slots of `context` tokens and the null slot, in random order."""
    pages = -(-context // PAGE_SIZE)
    order = 1 + np.random.default_rng(0).permutation(R * pages)
    return np.concatenate([order, np.zeros(pages)]).astype(np.int32).reshape(R + 1, pages)


def step_call(
    model: ModelShape,
    T: int,
    R: int,
    context: int,
    dtype: Any,
    implementation: str = "auto",
    draws: bool = False,
    num_steps: int = 1,
    page_dtype: Any = None,
    form: str = "",
    output_rows: bool = False,
) -> tuple[Callable[..., Any], tuple[Any, Any, Any]]:
    """Return the engine's compiled program of one bucket, as a function of arrays alone.

    Args:
        draws: of a decode step, take the program that holds the sampler. Others always hold it.
        num_steps: of a launch. Only decodes may have more than one.
        page_dtype: of the pages, by default that of the weights.
        output_rows: lay their codes out as an engine does on a card without Triton.

    Returns:
        (step, (state, weights, words)) where step(state, weights, words) -> (state, output) should
        donate its first argument, and the rest are shapes of its arguments.
    """
    config = parse_model_config(model.config())
    layout = DeviceLayout(output_rows=output_rows)
    described = shapes_of_model(config, dtype, form or None, layout, RANDOM)
    graphdef, weights = nnx.split(described)
    leaves, treedef = jax.tree.flatten(weights)
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    keeps_states = config.num_state_layers > 0
    empty = empty_words(T, R, context, num_steps, keeps_states)
    words = jax.ShapeDtypeStruct(empty.shape, np.int32)
    max_pages = -(-context // PAGE_SIZE)
    memory = memory_kinds(config, PAGE_SIZE, page_dtype or dtype, R, R * max_pages + 1)
    state = jax.eval_shape(functools.partial(make_state, config, memory, max_pages))

    options = {"greedy": T == R and not draws, "implementation": implementation}
    if num_steps == 1:
        program = functools.partial(model_step, decode_only=T == R, **options)
    else:
        program = functools.partial(decode_steps, most=num_steps, **options)

    def step(state, leaves, words):
        with product_precision("highest", dtype):
            return program(graphdef, treedef, leaves, state, unpack(words, T, R, keeps_states))

    return step, (state, leaves, words)


def random_arrays(shapes: Any, scale: float = 0.02) -> Any:
    """Make arrays of the given shapes on the device: normal floats, zero integers."""
    leaves, treedef = jax.tree.flatten(shapes)
    make = jax.jit(
        lambda key, shape, dtype: scale * jax.random.normal(key, shape, dtype),
        static_argnums=(1, 2),
    )
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = [
        make(key, leaf.shape, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)
