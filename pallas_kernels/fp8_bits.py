"""Conversion of float8_e4m3fn by integer operations, for cards without such instructions.

Both directions are exact: equal to a cast for every code and for every float32, including NaN and
signed zeros. The results do not depend on whether float32 subnormals are flushed to zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

SIGN, NUMBER = 0x80, 0x7F
LARGEST, NAN = 0x7E, 0x7F
"""Codes of 448 and of NaN."""


def _and(bits: jax.Array, mask: int) -> jax.Array:
    return lax.bitwise_and(bits, jnp.full_like(bits, mask))


def _right(bits: jax.Array, count: int) -> jax.Array:
    return lax.shift_right_logical(bits, jnp.full_like(bits, count))


def _left(bits: jax.Array, count: int) -> jax.Array:
    return lax.shift_left(bits, jnp.full_like(bits, count))


def small_halves(bits: jax.Array, nan: bool) -> jax.Array:
    """Convert codes of float8_e4m3fn exactly to float16 numbers that are 1/256 of their value.

    After a shift, exponent and mantissa of a code are exponent and mantissa of that float16, also
    for zero and subnormal numbers.

    Args:
        bits: uint8 codes.
        nan: keep NaN. Without it, codes of NaN become 480 / 256.
    """
    wide = bits.astype(jnp.int32)
    number = _left(_and(wide, NUMBER), 7)
    if nan:
        # Only the code of NaN carries into the highest bit of the exponent, which makes the float16
        # a NaN.
        number = lax.bitwise_or(number, _and(number + (1 << 7), 0x4000))
    half = lax.bitwise_or(_left(_and(wide, SIGN), 8), number).astype(jnp.uint16)
    return lax.bitcast_convert_type(half, jnp.float16)


def widen(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Convert uint8 codes of float8_e4m3fn exactly to numbers of a float dtype of >= 16 bits."""
    if dtype == jnp.float16:
        return small_halves(bits, nan=True) * jnp.float16(256)
    return (small_halves(bits, nan=True).astype(jnp.float32) * 256).astype(dtype)


def narrow(x: jax.Array) -> jax.Array:
    """Round float32 numbers to float8_e4m3fn and return its uint8 codes. Ties round to even.

    Numbers beyond 448 become 448 and NaN stays NaN, as in a cast of `clip(x, -448, 448)`.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    size = _and(bits, 0x7FFFFFFF)
    # Normal codes: round off 20 bits of the mantissa, and rebase the exponent from 127 to 7.
    even = _and(_right(size, 20), 1)
    code = _right(size + (0x7FFFF + even), 20) - (120 << 3)
    code = jnp.minimum(code, jnp.full_like(code, LARGEST))
    # Subnormal codes count units of 2^-9, the spacing of float32 numbers from 2^14 on.
    base = jnp.full_like(x, 2.0**14)
    unit = lax.bitcast_convert_type(jnp.abs(x) + base, jnp.int32)
    unit = unit - lax.bitcast_convert_type(base, jnp.int32)
    code = jnp.where(size < (121 << 23), unit, code)
    code = jnp.where(size > (255 << 23), NAN, code)
    return lax.bitwise_or(code, _and(_right(bits, 24), SIGN)).astype(jnp.uint8)
