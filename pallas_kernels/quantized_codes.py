"""Conversion of quantized weights' codes to numbers, in XLA and inside Triton kernels alike."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8_bits import small_halves

FORMS = ("int8", "fp8", "int4")
GPU_BLOCK_BYTES = 64 << 20
"""Bytes in floats of a block of weights that plain JAX dequantizes at a time on a GPU."""


def codes_a_row(form: str) -> int:
    """Return how many codes one element of the stored array holds."""
    return 2 if form == "int4" else 1


def halves(x: jax.Array, form: str) -> list[jax.Array]:
    """Split x [T,I] as `decode` splits weights: all of it, or for int4 even and odd inputs."""
    return [x[:, half :: codes_a_row(form)] for half in range(codes_a_row(form))]


def decode(values: jax.Array, form: str, dtype: jnp.dtype) -> list[jax.Array]:
    """Convert codes [R,C] to numbers, not yet scaled: parts [R,C] of `dtype`.

    int4 has two parts, the low halves and the high halves, each less 8. The conversion is exact in
    every dtype that activations have.
    """
    if form == "int8":
        return [values.astype(dtype)]
    if form == "fp8":
        # NaN, which no weight is, becomes 480.
        return [(small_halves(values, nan=False).astype(jnp.float32) * 256).astype(dtype)]
    low = lax.bitwise_and(values, jnp.full_like(values, 15))
    high = lax.shift_right_logical(values, jnp.full_like(values, 4))
    return [part.astype(jnp.int32).astype(dtype) - 8 for part in (low, high)]


def code_offset(form: str) -> int:
    """Return the number that `decode` has already subtracted from the codes."""
    return 8 if form == "int4" else 0


def is_minimum(zeros: Any) -> bool:
    """Return whether `zeros` are minima, which are floats, and not zero points."""
    return zeros is not None and jnp.issubdtype(zeros.dtype, jnp.floating)


def scaled(weight: jax.Array, scale: jax.Array, zero: jax.Array | None, form: str) -> jax.Array:
    """Turn what `decode` gives into weights, in its dtype.

    Args:
        weight: a part of the codes, less their offset.
        scale: as the weight, or to be broadcast to it.
        zero: likewise: an integer is a zero point, subtracted from codes before they are scaled; a
            float is a minimum, added to them thereafter; or None.
        form: of the codes.
    """
    offset, scale = code_offset(form), scale.astype(weight.dtype)
    if zero is None:
        return weight * scale
    if is_minimum(zero):
        return (weight + offset) * scale + zero.astype(weight.dtype)
    return (weight - (zero.astype(jnp.int32).astype(weight.dtype) - offset)) * scale
