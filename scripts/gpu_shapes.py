"""Shapes that the GPU scripts measure and compile: attention layers, whole models, a stand-in step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family; letters as in pallas_kernels, D hidden, F mlp, V vocabulary."""

    name: str
    L: int
    D: int
    N: int
    K: int
    H: int
    F: int
    V: int
    tied: bool = False

    @property
    def weights(self) -> int:
        """Parameters read by a decode step: everything but the rows of the embedding not used."""
        layer = self.D * (self.N + 2 * self.K) * self.H + self.N * self.H * self.D
        return self.L * (layer + 3 * self.D * self.F) + self.D * self.V

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache per token in bfloat16."""
        return 2 * 2 * self.L * self.K * self.H


MODELS = {
    "8b": ModelShape("8b", 32, 4096, 32, 8, 128, 14336, 128256),
    "1b": ModelShape("1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    "0.6b": ModelShape("0.6b", 28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    "tiny": ModelShape("tiny", 2, 64, 4, 2, 16, 128, 256),
}


def parameter_shapes(model: ModelShape, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Tree of ShapeDtypeStruct of the stand-in model's weights, input-major, layers in a list."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    layer = {
        "norm1": shape(model.D),
        "qkv": shape(model.D, (model.N + 2 * model.K) * model.H),
        "out": shape(model.N * model.H, model.D),
        "norm2": shape(model.D),
        "gate_up": shape(model.D, 2 * model.F),
        "down": shape(model.F, model.D),
    }
    return {
        "embed": shape(model.V, model.D),
        "layers": [layer] * model.L,
        "norm": shape(model.D),
        "head": shape(model.D, model.V),
    }


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * weight


def _rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
    """Rotary embedding of x [T, heads, H] by angle [T, H/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def stand_in_step(model: ModelShape, decode: bool, implementation: str = "auto"):
    """A forward pass of a Llama-shaped model over pages, layers unrolled, greedy token at the end.

    Returns:
        step(pages, params, tokens i32[T], positions i32[T], slots i32[T], table i32[R,M],
        query_start i32[R+1], kv_len i32[R]) -> (pages, next token i32[R]); pages is a list of
        (k_pages, v_pages) and should be donated.
    """

    def step(pages, params, tokens, positions, slots, table, query_start, kv_len):
        x = params["embed"][tokens]
        rate = 500000.0 ** (-jnp.arange(0, model.H, 2, dtype=jnp.float32) / model.H)
        angle = positions[:, None].astype(jnp.float32) * rate
        written = []
        for layer, (k_pages, v_pages) in zip(params["layers"], pages, strict=True):
            qkv = (_norm(x, layer["norm1"]) @ layer["qkv"]).reshape(x.shape[0], -1, model.H)
            q, k, v = jnp.split(qkv, (model.N, model.N + model.K), axis=1)
            q, k = _rotate(q, angle), _rotate(k, angle)
            k_pages, v_pages = pallas_kernels.kv_write(
                k, v, k_pages, v_pages, slots, implementation=implementation
            )
            written.append((k_pages, v_pages))
            if decode:
                mixed = pallas_kernels.paged_decode_attention(
                    q, k_pages, v_pages, table, kv_len, implementation=implementation
                )
            else:
                mixed = pallas_kernels.ragged_paged_attention(
                    q, k_pages, v_pages, table, query_start, kv_len, implementation=implementation
                )
            x = x + mixed.reshape(x.shape[0], -1) @ layer["out"]
            gate, up = jnp.split(_norm(x, layer["norm2"]) @ layer["gate_up"], 2, axis=-1)
            x = x + (jax.nn.silu(gate) * up) @ layer["down"]
        last = x if decode else x[query_start[1:] - 1]
        logits = _norm(last, params["norm"]) @ params["head"]
        return written, logits.argmax(axis=-1).astype(jnp.int32)

    return step


def step_shapes(
    model: ModelShape, T: int, R: int, M: int, P: int, S: int = 16, dtype: Any = jnp.bfloat16
) -> tuple[Any, ...]:
    """Shapes of the arguments of ``stand_in_step``'s function."""

    def ints(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    page = jax.ShapeDtypeStruct((P, model.K, S, model.H), dtype)
    pages = [(page, page)] * model.L
    rows = (ints(R, M), ints(R + 1), ints(R))
    return (pages, parameter_shapes(model, dtype), ints(T), ints(T), ints(T), *rows)
