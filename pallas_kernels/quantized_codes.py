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
    """Return how many codes an element of the array of a quantized weight holds.

    This is 2 for the form "int4", else 1.
    """
    return 2 if form == "int4" else 1


def halves(x: jax.Array, form: str) -> list[jax.Array]:
    """Split the columns of activations x [T,I] to match the arrays that `decode` returns.

    Returns:
        For the form "int4" two arrays [T,I/2], the even and the odd inputs. Otherwise a list of x.
    """
    return [x[:, half :: codes_a_row(form)] for half in range(codes_a_row(form))]


def decode(values: jax.Array, form: str, dtype: jnp.dtype) -> list[jax.Array]:
    """Convert stored codes [R,C] of a quantized weight to numbers of `dtype`, without scales.

    The conversion is exact in every dtype of activations.

    Args:
        values: codes: int8, bits of float8_e4m3fn, or bytes of two int4 codes.
        form: "int8", "fp8" or "int4".
        dtype: dtype of the numbers.

    Returns:
        A list with one array [R,C]. For "int4" two arrays, of the low and of the high half bytes,
        each code minus 8.
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
    """Return the number that `decode` subtracts from the codes of a form: 8 for int4, else 0."""
    return 8 if form == "int4" else 0


def is_minimum(zeros: Any) -> bool:
    """Return whether `zeros` of a quantized weight are minima, rather than zero points or None.

    Minima are floats, and zero points are integers.
    """
    return zeros is not None and jnp.issubdtype(zeros.dtype, jnp.floating)


def scaled(weight: jax.Array, scale: jax.Array, zero: jax.Array | None, form: str) -> jax.Array:
    """Dequantize: apply scales and zero points to numbers of `decode`. Return the weights.

    Args:
        weight: one array of the list that `decode` returns.
        scale: of the shape of `weight`, or broadcastable to it.
        zero: of the same shape, or None. Integers are zero points, subtracted from the codes before
            the scale is applied. Floats are minima, added after it.
        form: form of the codes, "int8", "fp8" or "int4".

    Returns:
        An array of the shape and dtype of `weight`.
    """
    offset, scale = code_offset(form), scale.astype(weight.dtype)
    if zero is None:
        return weight * scale
    if is_minimum(zero):
        return (weight + offset) * scale + zero.astype(weight.dtype)
    return (weight - (zero.astype(jnp.int32).astype(weight.dtype) - offset)) * scale
