"""Operations over rows that a CPU computes by kernels of its own, and others in plain JAX.

On CPU a row's result is the same to the bit however many rows there are, which XLA does not
promise.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import deferred, has_llvm

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
