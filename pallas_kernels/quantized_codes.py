"""Conversion of the codes of quantized weights to numbers, for XLA and for Triton kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8_bits import small_halves

FORMS = ("int8", "fp8", "int4")
GPU_BLOCK_BYTES = 64 << 20
"""Bytes of the column block of a weight that plain JAX dequantizes at a time on a GPU."""


def codes_a_row(form: str) -> int:
    """Return the number of codes that one element of the stored array holds: 2 for int4, else 1."""
    return 2 if form == "int4" else 1


def halves(x: jax.Array, form: str) -> list[jax.Array]:
    """Split x [T,I] like `decode` splits weights: into even and odd inputs for int4, else [x]."""
    return [x[:, half :: codes_a_row(form)] for half in range(codes_a_row(form))]


def decode(values: jax.Array, form: str, dtype: jnp.dtype) -> list[jax.Array]:
    """Convert codes [R,C] to unscaled numbers: a list of arrays [R,C] of `dtype`.

    The list has two arrays for int4, the low and the high half bytes, each minus 8. The conversion
    is exact in every dtype of activations.
    """
    if form == "int8":
        return [values.astype(dtype)]
    if form == "fp8":
        # NaN would become 480. Weights are never NaN.
        return [(small_halves(values, nan=False).astype(jnp.float32) * 256).astype(dtype)]
    low = lax.bitwise_and(values, jnp.full_like(values, 15))
    high = lax.shift_right_logical(values, jnp.full_like(values, 4))
    return [part.astype(jnp.int32).astype(dtype) - 8 for part in (low, high)]


def code_offset(form: str) -> int:
    """Return the number that `decode` has already subtracted from the codes."""
    return 8 if form == "int4" else 0


def is_minimum(zeros: Any) -> bool:
    """Return whether `zeros` holds minima, which are floats, rather than zero points."""
    return zeros is not None and jnp.issubdtype(zeros.dtype, jnp.floating)


def scaled(weight: jax.Array, scale: jax.Array, zero: jax.Array | None, form: str) -> jax.Array:
    """Convert the numbers that `decode` returns to weights, in their dtype.

    Args:
        weight: one array of the list that `decode` returns.
        scale: of the shape of `weight`, or broadcastable to it.
        zero: the same. Integers are zero points, subtracted from the codes before the scale is
            applied. Floats are minima, added after it. Or None.
        form: form of the codes.
    """
    offset, scale = code_offset(form), scale.astype(weight.dtype)
    if zero is None:
        return weight * scale
    if is_minimum(zero):
        return (weight + offset) * scale + zero.astype(weight.dtype)
    return (weight - (zero.astype(jnp.int32).astype(weight.dtype) - offset)) * scale
