"""Conversions between PTX's types that numpy lacks. bfloat16 and float8 numbers are bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from scripts.machine_code.interpreter.arithmetic import odd_sum

Array = np.ndarray

ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
EIGHT_BIT = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3": np.float32(448), "e5m2": np.float32(57344)}
# Values of all codes, so that widening is a look-up.
WIDE = {
    name: np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    for name, kind in EIGHT_BIT.items()
}
WIDE_HALF_BITS = {name: table.astype(np.float16).view(np.uint16) for name, table in WIDE.items()}


def round_integral(x: Array, rounding: str) -> Array:
    return ROUND[rounding](x)


def to_integer(x: Array, kind: type, rounding: str) -> Array:
    """Round floats and limit them to an integer type.

    A NaN becomes 0, or the highest bit alone where one of the types has 64 bits.
    """
    limits = np.iinfo(kind)
    has_64_bits = x.dtype == np.float64 or limits.bits == 64
    rounded = ROUND[rounding](x.astype(np.float64))
    low, high = rounded <= limits.min, rounded >= limits.max
    missing = np.isnan(rounded)
    inner = np.where(low | high | missing, 0, rounded)
    result = inner.astype(np.uint64 if limits.min == 0 else np.int64).astype(kind)
    result = np.where(low, kind(limits.min), np.where(high, kind(limits.max), result))
    if missing.any():
        highest = np.array(1 << (limits.bits - 1), f"u{limits.bits // 8}").view(kind)
        result = np.where(missing, highest if has_64_bits else kind(0), result)
    return result


def clip_integer(x: Array, kind: type) -> Array:
    """Limit integers to the range of another type."""
    own, limits = np.iinfo(x.dtype), np.iinfo(kind)
    return np.clip(x, max(limits.min, own.min), min(limits.max, own.max)).astype(kind)


def to_bfloat16(x: Array) -> Array:
    """Return the bits of float32 numbers rounded to bfloat16. Any NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_half(x: Array) -> Array:
    """Return the bits of floats rounded to float16. Any NaN becomes 0x7FFF."""
    bits = x.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def cut_to_half(x: Array) -> Array:
    """Return the bits of floats rounded to float16 towards zero. Any NaN becomes 0x7FFF."""
    nearest = x.astype(np.float16)
    is_larger = np.abs(nearest.astype(x.dtype)) > np.abs(x)
    cut = np.where(is_larger, np.nextafter(nearest, np.float16(0)), nearest)
    return np.where(np.isnan(x), np.uint16(0x7FFF), cut.view(np.uint16))


def from_half(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


TO_BITS = {"f16": to_half, "bf16": to_bfloat16}
FROM_BITS = {"f16": from_half, "bf16": from_bfloat16}


def unpack(bits: Array, kind: str) -> Array:
    """Return 16-bit floats as float32. Two in a word get a last axis, the lower one first."""
    if bits.dtype == np.uint32:
        bits = np.ascontiguousarray(bits).view(np.uint16).reshape(*bits.shape, 2)
    return FROM_BITS[kind](bits)


def pack(x: Array, kind: str) -> Array:
    """Return floats as bits of 16-bit floats. A last axis of two becomes a word."""
    bits = TO_BITS[kind](x)
    return np.ascontiguousarray(bits).view(np.uint32)[..., 0] if bits.ndim > 1 else bits


def split_singles(bits: Array) -> Array:
    """Return the two float32 of each 64-bit word, the lower one first, along a first axis."""
    words = np.atleast_1d(bits)
    halves = np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)])
    return halves.astype(np.uint32).view(np.float32)


def join_singles(x: Array) -> Array:
    """Return the 64-bit words of such pairs."""
    low, high = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    return high << np.uint64(32) | low


def to_odd_single(x: Array) -> Array:
    """Round float64 to float32, to odd where inexact, so that it can be rounded once more."""
    near = x.astype(np.float32)
    back = near.astype(np.float64)
    even = (near.view(np.uint32) & np.uint32(1)) == 0
    inexact = np.isfinite(x) & (back != x)
    towards = np.where(back < x, np.float32(np.inf), np.float32(-np.inf))
    infinite = inexact & np.isinf(near)
    near = np.where(infinite, np.nextafter(near, np.float32(0)), near)
    return np.where(inexact & even & ~infinite, np.nextafter(near, towards), near)


def join_halves(high: Array, low: Array, kind: str) -> Array:
    """Round two floats to 16 bits each, in one word."""
    halves = TO_BITS[kind](high).astype(np.uint32), TO_BITS[kind](low).astype(np.uint32)
    return (halves[0] << np.uint32(16)) | halves[1]


def to_eight_bits(x: Array, kind: str) -> Array:
    """Return the codes of float32 numbers limited to the range of `kind`. NaN becomes 0x7F."""
    top = LARGEST[kind]
    codes = np.clip(x, -top, top).astype(EIGHT_BIT[kind]).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def join_eight_bits(high: Array, low: Array, kind: str) -> Array:
    halves = to_eight_bits(high, kind).astype(np.uint16), to_eight_bits(low, kind)
    return (halves[0] << np.uint16(8)) | halves[1]


def widen_eight_bits(codes: Array, kind: str) -> Array:
    """Return two codes in a word as two float16 numbers in a word."""
    table = WIDE_HALF_BITS[kind]
    high = table[codes >> np.uint16(8)].astype(np.uint32)
    return (high << np.uint32(16)) | table[codes & np.uint16(0xFF)]


def to_tensor_float(x: Array) -> Array:
    """Return the bits of float32 numbers rounded to 10 bits of mantissa, ties away from zero."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFF_E000)
    return np.where(np.isnan(x), np.uint32(0x7FFF_FFFF), rounded)


def rectify(x: Array) -> Array:
    """Replace negative numbers by +0."""
    return np.where(x <= 0, np.float32(0), x)


def has_nan(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


def fused_half(a: Array, b: Array, c: Array) -> Array:
    """Compute `a * b + c` of 16-bit floats in float32, so that rounding it to them is exact."""
    exact = a.astype(np.float64) * b
    return to_odd_single(odd_sum(exact, c.astype(np.float64)))


def widen(x: Array) -> Array:
    return x.astype(np.uint64)


def split(x: Array, count: int) -> Array:
    """Return the parts of words, the lowest first: [part, thread]."""
    part = np.dtype(f"u{x.dtype.itemsize // count}")
    return np.ascontiguousarray(x).view(part).reshape(-1, count).T.copy()


def join(threads: int, parts: list[Array]) -> Array:
    """Return words made of parts, the lowest first."""
    columns = np.stack([np.broadcast_to(part, (threads,)) for part in parts], 1)
    word = np.dtype(f"u{columns.dtype.itemsize * len(parts)}")
    return np.ascontiguousarray(columns).view(word)[:, 0]
