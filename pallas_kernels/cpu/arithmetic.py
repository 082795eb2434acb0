"""Types of numbers in LLVM IR, and code that converts numbers and computes functions of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.ir_builder import I8, I16, I32, Code, element_bytes, filled, suffix

LOG2_E = math.log2(math.e)


def stored_type(dtype: str) -> ir.Type:
    """Return the LLVM type of numbers of a dtype in memory.

    It is i16 for bfloat16, i8 for "int8" codes and "uint8" (the bits of float8_e4m3fn), and half,
    float or double for other floats.
    """
    types = {"bfloat16": I16, "float16": ir.HalfType(), "uint8": I8, "int8": I8}
    return types[dtype] if dtype in types else float_type(np.dtype(dtype))


def widened(code: Code, vector: Any, real: ir.Type) -> Any:
    """Emit LLVM IR that converts a vector of stored numbers to `real`, the type of the sums.

    Elements of type i16 are the bits of bfloat16, and of type i8 the bits of float8_e4m3fn.
    Returns the IR vector of the converted numbers.
    """
    element, lanes = vector.type.element, vector.type.count
    if element == real:
        return vector
    if element == I8:
        return _from_float8(code, vector, ir.VectorType(real, lanes))
    if element == I16:  # bfloat16 is the upper half of float32
        upper: Any = code.zext(vector, ir.VectorType(I32, lanes))
        shifted = code.shl(upper, filled(upper.type, 16))
        element = ir.FloatType()
        vector = code.bitcast(shifted, ir.VectorType(element, lanes))
    return vector if element == real else code.fpext(vector, ir.VectorType(real, lanes))


def bfloat16_bits(code: Code, number: Any) -> Any:
    """Emit LLVM IR that rounds a float32 vector to bfloat16, to the nearest, ties to even.

    Returns the IR vector of the bits, i16 elements. NaN stays NaN.
    """
    words = ir.VectorType(I32, number.type.count)
    bits: Any = code.bitcast(number, words)
    last = code.and_(code.lshr(bits, filled(words, 16)), filled(words, 1))
    nearest = code.add(bits, code.add(last, filled(words, 0x7FFF)))
    is_nan = code.fcmp_unordered("uno", number, number)
    # A NaN whose upper bits are zeros would become infinite.
    chosen = code.select(is_nan, code.or_(bits, filled(words, 1 << 22)), nearest)
    return code.trunc(code.lshr(chosen, filled(words, 16)), ir.VectorType(I16, words.count))


def small_float8(code: Code, vector: Any, kind: Any) -> tuple[Any, Any]:
    """Emit LLVM IR that converts codes of float8_e4m3fn to 1/256 of their numbers.

    After a shift, exponent and mantissa of a code are exponent and mantissa of a float16 that is
    1/256 of the number, also for zero and subnormal numbers. Codes of NaN (all ones) become
    480 / 256.

    Args:
        code: builder of the IR.
        vector: IR vector of i8 codes.
        kind: float vector type of the result.

    Returns:
        The IR vectors of the converted numbers, and of the bits (i16) of these float16 numbers.
    """
    shorts = ir.VectorType(I16, kind.count)
    moved: Any = code.shl(code.sext(vector, shorts), filled(shorts, 7))
    bits = code.and_(moved, filled(shorts, 0xBFFF))
    halves = code.bitcast(bits, ir.VectorType(ir.HalfType(), kind.count))
    return code.fpext(halves, kind), bits


def _from_float8(code: Code, vector: Any, kind: Any) -> Any:
    small, bits = small_float8(code, vector, kind)
    number = code.fmul(small, filled(kind, 256.0))
    ones = filled(bits.type, 0x3F80)
    is_nan = code.icmp_signed("==", code.and_(bits, ones), ones)
    return code.select(is_nan, filled(kind, math.nan), number)


def float_type(dtype: np.dtype) -> ir.Type:
    """Return the LLVM type of a dtype: float for float32 and double for float64."""
    return {4: ir.FloatType(), 8: ir.DoubleType()}[dtype.itemsize]


def exp2(code: Code, x: Any) -> Any:
    """Emit LLVM IR that computes 2 ** x for a vector x of floats up to 100. Return the IR vector.

    The error is less than two units in the last place. Subnormal results are zero, and NaN
    stays NaN.
    """
    power, rest, least = _exp2_parts(code, x)
    value = code.multiply_add(power, rest, power)
    return code.select(code.fcmp_ordered("<", x, least), filled(x.type, 0.0), value)


def exp_down(code: Code, x: Any) -> Any:
    """Emit LLVM IR that computes exp(-|x|), which does not overflow."""
    size = code.intrinsic(f"llvm.fabs.{suffix(x.type)}", x.type, [x])
    return exp2(code, code.fmul(size, filled(x.type, -LOG2_E)))


def softplus(code: Code, x: Any) -> Any:
    """Emit LLVM IR that computes log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)).

    log1p(u) is 2 artanh(z) with z = u / (2 + u), at most 1/3, by the series of artanh.
    """
    power = exp_down(code, x)
    z = code.fdiv(power, code.fadd(power, filled(x.type, 2.0)))
    square = code.fmul(z, z)
    terms = 17 if x.type.element == ir.DoubleType() else 8
    series = filled(x.type, 1.0 / (2 * terms - 1))
    for nth in reversed(range(terms - 1)):
        series = code.multiply_add(series, square, filled(x.type, 1.0 / (2 * nth + 1)))
    logarithm = code.fmul(code.fmul(z, filled(x.type, 2.0)), series)
    return code.fadd(code.larger(filled(x.type, 0.0), x), logarithm)


def tanh(code: Code, x: Any) -> Any:
    """Emit LLVM IR that computes tanh(x) of a vector x of floats. Return the IR vector.

    The formula is -m / (m + 2) with m = exp(-2 |x|) - 1, which is accurate near zero too.
    """
    kind = x.type
    size = code.intrinsic(f"llvm.fabs.{suffix(kind)}", kind, [x])
    exponent = code.fmul(size, filled(kind, -2 * LOG2_E))
    power, rest, least = _exp2_parts(code, exponent)
    minus_one = filled(kind, -1.0)
    m = code.multiply_add(power, rest, code.fadd(power, minus_one))
    m = code.select(code.fcmp_ordered("<", exponent, least), minus_one, m)
    value = code.fdiv(m, code.fadd(m, filled(kind, 2.0)))
    return code.intrinsic(f"llvm.copysign.{suffix(kind)}", kind, [value, x])


def _exp2_parts(code: Code, x: Any) -> tuple[Any, Any, Any]:
    """Emit LLVM IR that splits 2^x of a float vector x into 2^n and 2^f - 1.

    x is n + f, with n an integer and f within 1/2. This is the reduction of Cody and Waite
    (Software Manual for the Elementary Functions, 1980). Adding 1.5 * 2^23 (2^52) rounds x to n
    and leaves n in the lowest bits.

    Returns:
        The IR vectors of 2^n, of 2^f - 1, and of the least allowed x. Below it the other two are
        undefined.
    """
    kind = x.type
    fraction, bias, degree = {4: (23, 127, 7), 8: (52, 1023, 13)}[element_bytes(kind.element)]
    whole = ir.VectorType(ir.IntType(8 * element_bytes(kind.element)), kind.count)
    shift = filled(kind, 1.5 * 2.0**fraction)
    shifted = code.fadd(x, shift)
    rest = code.fsub(x, code.fsub(shifted, shift))
    exponent = code.add(code.bitcast(shifted, whole), filled(whole, bias))
    power = code.bitcast(code.shl(exponent, filled(whole, fraction)), kind)
    *lower, value = (filled(kind, number) for number in exp2_polynomial(degree))
    for number in reversed(lower):
        value = code.multiply_add(value, rest, number)
    return power, code.fmul(value, rest), filled(kind, 1.0 - bias)


def exp2_polynomial(degree: int) -> list[float]:
    """Return the Taylor coefficients, lowest first, of the polynomial p in 2^f - 1 = f p(f).

    There are `degree` coefficients. For f within 1/2, degree 7 has a relative error of 5e-9 and
    degree 13 an error of 5e-18.
    """
    return [math.log(2) ** power / math.factorial(power) for power in range(1, degree + 1)]
