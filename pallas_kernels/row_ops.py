"""Operations over rows that a CPU computes by kernels of its own, and others in plain JAX.

On CPU a row's result is the same to the bit however many rows there are, which XLA does not
promise.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.implementation import deferred, has_llvm
from pallas_kernels.product_arguments import ACTIVATIONS, Activation

_draw = deferred("pallas_kernels.cpu.draw", "draw")
_gated = deferred("pallas_kernels.cpu.gated", "gated")
_row_sums = deferred("pallas_kernels.cpu.row_sums", "row_sums")
_row_shares = deferred("pallas_kernels.cpu.row_sums", "row_shares")


def row_sums(x: jax.Array, term: Literal["numbers", "squares", "exps"] = "numbers") -> jax.Array:
    """Sum over the last axis; on CPU in an order that depends on its length alone.

    So a row's sum is the same to the bit however many rows there are, which XLA does not promise.

    Args:
        x: [..., D], bfloat16, float16, float32 or float64.
        term: what is summed: the numbers, their squares, or exp(number - greatest of the row).

    Returns:
        [...] of x's dtype, float32 at least.
    """
    if has_llvm() and x.size:
        return _row_sums(x, term)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if term == "exps":
        x = jnp.exp(x - x.max(axis=-1, keepdims=True))
    return jnp.sum(jnp.square(x) if term == "squares" else x, axis=-1)


def softmax(x: jax.Array) -> jax.Array:
    """Compute the softmax over the last axis of [..., D], float32 or float64.

    On CPU a row's result is the same to the bit however many rows there are.

    Raises:
        ValueError: x is of another type.
    """
    return _row_shares(x, "softmax") if _has_kernel(x) else jax.nn.softmax(x, axis=-1)


def sigmoid(x: jax.Array) -> jax.Array:
    """Compute 1 / (1 + exp(-x)) of every number of [..., D], float32 or float64.

    On CPU a number's result is the same to the bit wherever it stands.

    Raises:
        ValueError: x is of another type.
    """
    return _row_shares(x, "sigmoid") if _has_kernel(x) else jax.nn.sigmoid(x)


def _has_kernel(x: jax.Array) -> bool:
    if x.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"x is {x.dtype}; allowed: float32, float64")
    return has_llvm() and x.size > 0


def gated(x: jax.Array, activation: Activation, dtype: DTypeLike | None = None) -> jax.Array:
    """Compute activation(gate) * up, in at least float32.

    Args:
        x: [T,2,F] gates and what they multiply, any float.
        activation: "silu", or "gelu_tanh", which is GELU by its approximation with tanh.
        dtype: what both are rounded to before, and what the result is; None for x's.

    Returns:
        [T,F].

    Raises:
        ValueError: naming the argument at fault and what is allowed.
    """
    if x.ndim != 3 or x.shape[1] != 2:
        raise ValueError(f"x has shape {x.shape}; expected [T,2,F]")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    exact = jnp.promote_types(dtype, jnp.float32)
    if has_llvm() and x.size and dtype != jnp.float16 and x.dtype in (dtype, exact):
        return _gated(x, activation, dtype)
    gate, up = x[:, 0].astype(dtype), x[:, 1].astype(dtype)
    # In 16 bits each operation would round, which costs more.
    wide = gate.astype(exact)
    active = jax.nn.silu(wide) if activation == "silu" else jax.nn.gelu(wide)
    return (active * up).astype(dtype)


def has_draw(logits: jax.Array) -> bool:
    """Return whether a kernel computes ``draw`` of rows like these, [R,V]."""
    return has_llvm() and logits.size > 0 and logits.dtype in (jnp.float32, jnp.float64)


def draw(
    logits: jax.Array,
    highest: jax.Array,
    greedy: jax.Array,
    temperature: jax.Array,
    min_p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """Draw a token of each row; where ``has_draw`` holds.

    Tokens have probabilities exp((logit - highest) / temperature). Those below min_p times the
    likeliest's are left out, then all but the top_k likeliest (equals of the last stay), then all
    but the smallest set of likely ones whose share of the rest reaches top_p. The likeliest stays.

    Args:
        logits: [R,V] float32 or float64.
        highest: [R] each row's greatest logit, of the dtype of logits.
        greedy: i32[R] the first token that has it, which a row without a temperature gets.
        temperature: f32[R]; 0 draws nothing.
        min_p: f32[R]; 0 leaves nothing out.
        top_k: i32[R]; 0 leaves nothing out.
        top_p: f32[R]; 1 leaves nothing out.
        seed: u32[R,2] the words of a threefry key.
        position: i32[R] of the token; with the seed it determines the number that draws.

    Returns:
        i32[R]; of a row that is not finite, any token.
    """
    return _draw(logits, highest, greedy, temperature, min_p, top_k, top_p, seed, position)
