"""Arithmetic of PTX that numpy lacks, on arrays of one element a thread.

Everything is rounded once and to nearest even. So are the approximate functions, whose results on a
GPU may differ in the last bits.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

Array = np.ndarray

CANONICAL_NAN = np.uint32(0x7FFF_FFFF)
# A float64 that ends in these bits lies halfway between two float32 numbers.
TAIL = np.uint64((1 << 29) - 1)
HALFWAY = np.uint64(1 << 28)
SMALLEST_NORMAL = {np.dtype(kind): np.finfo(kind).tiny for kind in (np.float32, np.float64)}


# Integers


def shift_left(a: Array, count: Array) -> Array:
    """Shift left. A count of at least the width gives zero."""
    bits = 8 * a.dtype.itemsize
    shifted = a << np.minimum(count, bits - 1).astype(a.dtype)
    return np.where(count >= bits, a.dtype.type(0), shifted)


def shift_right(a: Array, count: Array) -> Array:
    """Shift right. A count of at least the width gives zero, or the sign in every bit."""
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(count, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(count >= bits, a.dtype.type(0), shifted)


def divide_integers(a: Array, b: Array) -> Array:
    """Divide towards zero. A division by zero gives all ones, as GPUs do."""
    kind = a.dtype
    divisor = np.where(b == 0, kind.type(1), b)
    quotient = a // divisor
    if kind.kind == "i":
        inexact = a - quotient * divisor != 0
        quotient = quotient + (inexact & ((a < 0) != (divisor < 0)))
    ones = kind.type(-1) if kind.kind == "i" else np.iinfo(kind).max
    return np.where(b == 0, ones, quotient).astype(kind)


def remainder(a: Array, b: Array) -> Array:
    """Return the remainder of `divide_integers`, with the sign of `a`."""
    return a - divide_integers(a, b) * b


def multiply_high(a: Array, b: Array) -> Array:
    """Return the upper half of a product of 64-bit integers."""
    a, b = np.broadcast_arrays(a, b)
    words = a.view(np.uint64), b.view(np.uint64)
    low_half, half = np.uint64(0xFFFF_FFFF), np.uint64(32)
    (low, high), (other_low, other_high) = ((word & low_half, word >> half) for word in words)
    middle = high * other_low + (low * other_low >> half)
    crossed = low * other_high + (middle & low_half)
    upper = high * other_high + (middle >> half) + (crossed >> half)
    if a.dtype.kind == "i":
        # Two's complement: a negative factor was taken for one that is larger by 2**64.
        upper = upper - np.where(a < 0, words[1], 0) - np.where(b < 0, words[0], 0)
    return upper.astype(np.uint64).view(a.dtype)


def low_mask(length: Array, kind: np.dtype) -> Array:
    """Return numbers whose `length` lowest bits are set, at most all of them."""
    bits = 8 * kind.itemsize
    single = kind.type(1) << np.minimum(length, bits - 1).astype(kind)
    return np.where(length >= bits, ~kind.type(0), single - kind.type(1))


def extract_bits(a: Array, position: Array, length: Array) -> Array:
    """Return a field of bits, extended by its highest bit where the type is signed.

    Bits past the number's highest bit equal that bit if the type is signed, else they are zero.
    """
    kind, bits = a.dtype, 8 * a.dtype.itemsize
    position, length = position & np.uint32(0xFF), length & np.uint32(0xFF)
    length = np.broadcast_to(length, np.broadcast(a, position, length).shape)
    keep = low_mask(length, np.dtype(f"u{kind.itemsize}"))
    # An arithmetic shift brings the highest bit where a field reaches beyond it.
    field = shift_right(a, position).view(keep.dtype) & keep
    if kind.kind == "i":
        top = np.minimum(position + length - np.uint32(1), np.uint32(bits - 1))
        negative = (shift_right(a, top) & kind.type(1)) != 0
        field = np.where(negative & (length > 0), field | ~keep, field)
    return field.view(kind)


def insert_bits(a: Array, b: Array, position: Array, length: Array) -> Array:
    """Return `b` with a field of bits replaced by the lowest ones of `a`."""
    position, length = position & np.uint32(0xFF), length & np.uint32(0xFF)
    field = shift_left(low_mask(length, b.dtype), position)
    return (b & ~field) | (shift_left(a, position) & field)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """Pick each byte of the result from the eight of `b` and `a`, or spread its sign."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
    for place in range(4):
        pick = selector >> np.uint32(4 * place)
        shift = (pick & np.uint32(7)).astype(np.uint64) * np.uint64(8)
        byte = ((both >> shift) & np.uint64(0xFF)).astype(np.uint32)
        sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        byte = np.where(pick & np.uint32(8), sign, byte)
        result |= byte << np.uint32(8 * place)
    return result


def funnel_shift(low: Array, high: Array, count: Array, left: bool, wraps: bool) -> Array:
    """Shift 64 bits and return the half that they are shifted towards."""
    count = count & np.uint32(31) if wraps else np.minimum(count, np.uint32(32))
    both = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    if left:
        return ((both << count.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
    return (both >> count.astype(np.uint64)).astype(np.uint32)


def logic(a: Array, b: Array, c: Array, table: int) -> Array:
    """Apply a table of three bits to each bit. `a` is the highest bit of the table's index."""
    result = np.zeros(np.broadcast(a, b, c).shape, a.dtype)
    for index in range(8):
        if table >> index & 1:
            first = a if index & 4 else ~a
            second = b if index & 2 else ~b
            result |= first & second & (c if index & 1 else ~c)
    return result


def leading_zeros(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    zeros = np.zeros(np.shape(a), np.uint32)
    rest = a
    for step in (32, 16, 8, 4, 2, 1):
        if step < bits:
            empty = rest < a.dtype.type(1) << a.dtype.type(bits - step)
            zeros = zeros + np.where(empty, np.uint32(step), np.uint32(0))
            rest = np.where(empty, rest << a.dtype.type(step), rest)
    return zeros + (rest == 0).astype(np.uint32)


def reverse_bits(a: Array) -> Array:
    result = np.zeros_like(a)
    bits = 8 * a.dtype.itemsize
    for place in range(bits):
        bit = (a >> a.dtype.type(place)) & a.dtype.type(1)
        result = result | bit << a.dtype.type(bits - 1 - place)
    return result


# Floats


def fused(a: Array, b: Array, c: Array) -> Array:
    """Compute `a * b + c` of float32, rounded once."""
    # The product is exact in float64. Its sum is rounded there, and once more on the way to
    # float32, which may differ from a single rounding where the first ends halfway.
    wide_sum = a.astype(np.float64) * b + c
    halfway = (wide_sum.view(np.uint64) & TAIL) == HALFWAY
    # Subnormal numbers end elsewhere.
    doubtful = halfway | (np.abs(wide_sum) < 2 * SMALLEST_NORMAL[np.dtype(np.float32)])
    if doubtful.any():
        return odd_sum(a.astype(np.float64) * b, c.astype(np.float64)).astype(np.float32)
    return wide_sum.astype(np.float32)


def fused_down(a: Array, b: Array, c: Array) -> Array:
    """Compute `a * b + c` of float32, rounded once, towards negative infinity."""
    product, c = np.broadcast_arrays(a.astype(np.float64) * b, c.astype(np.float64))
    exact = odd_sum(product, c)
    nearest = exact.astype(np.float32)
    down = np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    # Only the sum of two positive zeros is positive.
    is_negative_zero = (exact == 0) & (np.signbit(product) | np.signbit(c))
    return np.where(is_negative_zero, np.float32(-0.0), down)


def odd_sum(a: Array, b: Array) -> Array:
    """Add float64 numbers, rounded to odd: rounding the result once more is as rounding once."""
    a, b = np.broadcast_arrays(a, b)
    total = a + b
    # Knuth's exact error of a sum.
    other = total - a
    error = (a - (total - other)) + (b - other)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    inexact = np.isfinite(total) & (error != 0) & even
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where(inexact, np.nextafter(total, towards), total)


def fused_double(a: Array, b: Array, c: Array) -> Array:
    """Compute `a * b + c` of float64, rounded once."""
    a, b, c = (np.asarray(x) for x in np.broadcast_arrays(a, b, c))
    result = a * b + c
    for index in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(float(a[index])) * Fraction(float(b[index])) + Fraction(float(c[index]))
        # The sign of an exact zero is that of the sum in floats.
        if exact != 0:
            result[index] = to_double(exact)
    return result


def to_double(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return np.inf if number > 0 else -np.inf


def least(a: Array, b: Array) -> Array:
    """Return the smaller number, -0 before +0. Of a number and a NaN, return the number."""
    return ordered_zero(np.fmin(a, b), a, b, np.logical_or)


def greatest(a: Array, b: Array) -> Array:
    """Return the larger number, +0 before -0. Of a number and a NaN, return the number."""
    return ordered_zero(np.fmax(a, b), a, b, np.logical_and)


def least_or_nan(a: Array, b: Array) -> Array:
    return ordered_zero(np.minimum(a, b), a, b, np.logical_or)


def greatest_or_nan(a: Array, b: Array) -> Array:
    return ordered_zero(np.maximum(a, b), a, b, np.logical_and)


def ordered_zero(result: Array, a: Array, b: Array, negative: np.ufunc) -> Array:
    """Correct the sign where both operands are zero."""
    zeros = (a == 0) & (b == 0)
    if not zeros.any():
        return result
    kind = result.dtype.type
    signed = np.where(negative(np.signbit(a), np.signbit(b)), kind(-0.0), kind(0.0))
    return np.where(zeros, signed, result)


def power_of_two(x: Array) -> Array:
    return np.exp2(x.astype(np.float64)).astype(x.dtype)


def log_of_two(x: Array) -> Array:
    return np.log2(x.astype(np.float64)).astype(x.dtype)


def tangent(x: Array) -> Array:
    return np.tanh(x.astype(np.float64)).astype(x.dtype)


def sine(x: Array) -> Array:
    return np.sin(x.astype(np.float64)).astype(x.dtype)


def cosine(x: Array) -> Array:
    return np.cos(x.astype(np.float64)).astype(x.dtype)


def inverse_root(x: Array) -> Array:
    return (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype)


def flush(x: Array) -> Array:
    """Replace subnormal numbers by zeros of their sign."""
    kind = x.dtype.type
    return np.where(np.abs(x) < SMALLEST_NORMAL[x.dtype], np.copysign(kind(0), x), x)


def saturate(x: Array) -> Array:
    """Limit numbers to the range 0 to 1. NaN becomes +0."""
    kind = x.dtype.type
    return np.where(np.isnan(x) | (x <= 0), kind(0), np.minimum(x, kind(1)))


def canonical(x: Array) -> Array:
    """Replace every float32 NaN by the one that GPUs make."""
    nan = np.isnan(x)
    return np.where(nan, CANONICAL_NAN.view(np.float32), x) if nan.any() else x
