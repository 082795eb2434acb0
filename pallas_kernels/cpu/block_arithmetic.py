"""Integer arithmetic of products with GGUF blocks on CPU: rounded rows of x, and their products.

An integer row holds the integers, a float32 scale per UNIT inputs, the sums of each 16 inputs, and
a mark that tells the parts of a product whether the row is rounded.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.block_reader import FLOAT, SIGN, BlockReader, inputs_of_steps
from pallas_kernels.cpu.blocks import FORMATS, UNIT, BlockFormat
from pallas_kernels.cpu.ffi import Host, host
from pallas_kernels.cpu.ir_builder import I8, I16, I32, I64, POINTER, Code, const, filled, internal

# The largest 16-bit number whose upper byte and signed lower byte both have 8 bits.
MOST = 32639.0
_ROUNDS = 1.5 * 2.0**23  # added to a float, it leaves the nearest integer in the lowest bits


@dataclass(frozen=True)
class BlockArithmetic:
    """Base of the CPU kernel that multiplies x by a weight in a GGUF format in integers."""

    form: str  # name of the format
    cpu: Host = field(default_factory=host)  # the CPU that code is generated for

    @property
    def format(self) -> BlockFormat:
        """The `BlockFormat` of the GGUF format whose name is `form`."""
        return FORMATS[self.form]

    @property
    def lanes(self) -> int:
        """Number of outputs (32-bit lanes) of a vector register."""
        return self.cpu.vector_bytes // 4

    @property
    def count(self) -> int:
        """Number of inputs that one product instruction multiplies for each output, 4 or 2."""
        return 4 if self.cpu.quads else 2

    @property
    def offset(self) -> int:
        """Integer to subtract from an unpacked code of a weight before it is scaled."""
        return SIGN if self.cpu.quads and self.format.low == 8 else self.format.offset


def mark_of(code: Code, whole: Any, row: Any, between: Any) -> Any:
    """Emit LLVM IR that computes the address of a row's mark, an i32. Return the address.

    The mark is 1 if the row of x is rounded. `whole` is the address of the rounded rows, each of
    `between` bytes.
    """
    after = code.mul(code.add(row, const(1)), between)
    return code.at(whole, code.sub(after, const(4)), I8)


def round_row(
    code: Code, rounding: Any, buffers: tuple[Any, Any], row: Any, inputs: Any, between: Any
) -> None:
    """Emit LLVM IR that rounds a row of x to integers, unless another part has done it.

    The IR then sets the row's mark.

    Args:
        rounding: the function of `rounding_function`.
        buffers: addresses of x and of the rounded rows.
        row: number of the row.
        inputs: numbers of a row of x.
        between: bytes of a rounded row.
    """
    x, whole = buffers
    mark = mark_of(code, whole, row, between)
    written = code.load_atomic(mark, "acquire", 4, typ=I32)
    with code.if_then(code.icmp_signed("==", written, ir.Constant(I32, 0))):
        from_ = code.at(x, code.mul(row, inputs), FLOAT)
        code.call(rounding, [from_, code.at(whole, code.mul(row, between), I8), inputs])
        code.atomic_rmw("xchg", mark, ir.Constant(I32, 1), "release")  # after the row is written


def row_bytes(inputs: int) -> int:
    """Return the bytes of a rounded row of x: integers, scales, the sums of each 16, a mark."""
    return 2 * inputs + inputs // UNIT * 12 + 4


def places_of(code: Code, row: Any, inputs: Any) -> tuple[Any, Any]:
    """Emit LLVM IR for the addresses of the scales and of the sums in a rounded row of x.

    `row` is the address of the row, and `inputs` its length. Returns both addresses.
    """
    scales = code.at(row, code.mul(inputs, const(2)), I8)
    return scales, code.at(scales, code.sdiv(inputs, const(UNIT // 4)), I8)


def rounding_function(module: ir.Module, kernel: BlockArithmetic) -> ir.Function:
    """Add a function (x, to, inputs) to a module that rounds a row of x to integers. Return it.

    Its arguments are the addresses of the row and of the rounded row to write, and the number of
    inputs. NaN or infinity in 32 inputs makes their scale NaN.
    """
    lanes = kernel.lanes
    code, (x, to, inputs) = internal(module, "rounding", [POINTER, POINTER, I64])
    scales, sums = places_of(code, to, inputs)
    real, whole = ir.VectorType(FLOAT, lanes), ir.VectorType(I32, lanes)
    vectors = UNIT // lanes
    with code.loop(const(0), code.sdiv(inputs, const(UNIT))) as (unit, _):
        start = code.mul(unit, const(UNIT))
        read = [
            code.read_vector(code.at(x, start, FLOAT), const(nth * lanes), FLOAT, lanes)
            for nth in range(vectors)
        ]
        largest, nothing = filled(real, 0.0), filled(real, 0.0)
        for vector in read:
            size = code.intrinsic(f"llvm.fabs.v{lanes}f32", real, [vector])
            largest = code.larger(largest, size)
            nothing = code.multiply_add(vector, filled(real, 0.0), nothing)
        largest = code.lane_max(largest)
        is_none = code.fcmp_ordered("<=", largest, ir.Constant(FLOAT, 1e-35))
        inverse = code.fdiv(ir.Constant(FLOAT, MOST), largest)
        inverse = code.splat(code.select(is_none, ir.Constant(FLOAT, 0.0), inverse), lanes)
        scale = code.fdiv(largest, ir.Constant(FLOAT, MOST))
        scale = code.select(is_none, ir.Constant(FLOAT, 0.0), scale)
        scale = code.fadd(scale, code.lane_sum(nothing))
        code.store(scale, code.at(scales, unit, FLOAT), align=4)
        numbers = []
        for vector in read:
            shifted = code.multiply_add(vector, inverse, filled(real, _ROUNDS))
            numbers.append(code.sub(code.bitcast(shifted, whole), filled(whole, 0x4B400000)))
        _store_numbers(code, kernel, numbers, code.at(to, start, I16))
        if kernel.format.run < UNIT:
            runs = _half_sums(code, numbers)
        else:
            runs = [code.lanes_folded(functools.reduce(code.add, numbers), code.add)]
        for run, total in enumerate(runs):
            place = code.add(code.mul(unit, const(2)), const(run))
            if kernel.format.has_minimum:
                least = code.fmul(scale, code.sitofp(total, FLOAT))
                code.store(least, code.at(sums, place, FLOAT), align=4)
            elif kernel.offset:
                less = code.mul(total, ir.Constant(I32, -kernel.offset))
                code.store(less, code.at(sums, place, I32), align=4)
    code.ret_void()
    return code.function


def _store_numbers(code: Code, kernel: BlockArithmetic, numbers: Sequence[Any], to: Any) -> None:
    """Emit LLVM IR that stores 32 rounded inputs (a unit of a rounded row of x) at address `to`.

    For pairs (`kernel.count` 2) these are int16 in order. For quads each number is stored as two
    signed bytes, number = 256 * upper + lower: 32 upper bytes, then 32 lower bytes, in the order of
    `inputs_of_steps`.
    """
    if kernel.count == 2:
        for nth, vector in enumerate(numbers):
            short = code.trunc(vector, ir.VectorType(I16, kernel.lanes))
            code.write_vector(short, to, const(nth * kernel.lanes))
        return
    order = [place for inputs in inputs_of_steps(kernel.format, kernel.count) for place in inputs]
    whole, narrow = numbers[0].type, ir.VectorType(I8, kernel.lanes)
    upper = [
        code.ashr(code.add(vector, filled(whole, 128)), filled(whole, 8)) for vector in numbers
    ]
    for nth, vectors in enumerate((upper, numbers)):
        first, second = (code.trunc(vector, narrow) for vector in vectors)
        code.write_vector(code.lanes_of(first, second, order), to, const(nth * UNIT))


def _half_sums(code: Code, vectors: list[Any]) -> list[Any]:
    if len(vectors) == 1:
        (vector,) = vectors
        count = vector.type.count // 2
        halves = [range(count), range(count, 2 * count)]
        vectors = [code.lanes_of(vector, vector, half) for half in halves]
    middle = len(vectors) // 2
    return [
        code.lanes_folded(functools.reduce(code.add, half), code.add)
        for half in (vectors[:middle], vectors[middle:])
    ]


def add_unit(
    code: Code,
    kernel: BlockArithmetic,
    reader: BlockReader,
    rows: Sequence[Any],
    places: Sequence[tuple[Any, Any]],
    nth: Any,
    unit: Any,
    totals: list[Any],
) -> None:
    """Emit LLVM IR that adds the products of 32 inputs (a unit) of x and the weight to `totals`.

    Args:
        reader: reads a GGUF block of the weight.
        rows: addresses of the rounded rows of x.
        places: for each row, the addresses of its scales and of its sums.
        nth, unit: number of the unit in the GGUF block, and in the row.
        totals: IR vectors, one for each row and vector of outputs. The list gets the new totals.
    """
    layout, lanes, width = kernel.format, kernel.lanes, len(reader.columns)
    real, zero = ir.VectorType(FLOAT, lanes), filled(ir.VectorType(I32, lanes), 0)
    if reader.columns.start == 0:  # in later passes the panel is in the cache
        reader.prefetch(nth)
    numbers = reader.numbers(nth)
    words = [code.at(row, code.mul(unit, const(UNIT // 2)), I32) for row in rows]
    for run in range(UNIT // layout.run):
        where = code.add(code.mul(unit, const(2)), const(run))
        begin = [zero] * len(rows)
        if kernel.offset:
            less = [code.read(of_x, where, I32) for _, of_x in places]
            begin = [code.splat(number, lanes) for number in less]
        first = run * layout.run // kernel.count
        steps = range(first, first + layout.run // kernel.count)
        sums = _sums_of_run(code, kernel, numbers, words, steps, begin, width)
        scales, minima = reader.scales(nth, run)
        for row, (of_x, sums_of_x) in enumerate(places):
            step = code.splat(code.read(of_x, unit, FLOAT), lanes)
            for column in range(width):
                index = row * width + column
                if layout.has_minimum:
                    least = code.splat(code.read(sums_of_x, where, FLOAT), lanes)
                    totals[index] = code.multiply_add(minima[column], least, totals[index])
                factor = code.fmul(scales[column], step)
                number = code.sitofp(sums[index], real)
                totals[index] = code.multiply_add(number, factor, totals[index])


def _sums_of_run(
    code: Code,
    kernel: BlockArithmetic,
    numbers: Iterator[list[Any]],
    words: Sequence[Any],
    steps: range,
    begin: Sequence[Any],
    width: int,
) -> list[Any]:
    """Emit LLVM IR that multiplies a run of weights by rounded rows of x, in integers.

    Args:
        numbers: iterator over the steps, `width` vectors of weights each.
        words: for each row, the address of the unit's words of x.
        steps: the indices of the run's steps within the unit.
        begin: for each row, the initial value of each of its sums.
        width: number of vectors of weights in a step.

    Returns:
        The sums, `width` IR vectors of i32 for each row, the first row's first.
    """
    # Quads have a second sum, of the upper bytes of x, which is multiplied by 256. Pairs have as
    # many sums as hide the latency of an addition. Integer sums are exact in any order.
    quads = kernel.count == 4
    chains = 2 if quads else max(1, 8 // (len(words) * width))
    zero = filled(begin[0].type, 0)
    sums = [[first] + [zero] * (chains - 1) for first in begin for _ in range(width)]
    for step in steps:
        weights = next(numbers)
        places = [(UNIT // 4 + step, 0), (step, 1)] if quads else [(step, step % chains)]
        for (row, address), (place, chain) in itertools.product(enumerate(words), places):
            value = code.splat(code.read(address, const(place), I32), kernel.lanes)
            for each, weight in zip(sums[row * width : (row + 1) * width], weights, strict=True):
                each[chain] = _add_products(code, each[chain], value, weight, kernel.cpu)
    if quads:
        for each in sums:
            each[1] = code.shl(each[1], filled(zero.type, 8))
    return [functools.reduce(code.add, each) for each in sums]


def _add_products(code: Code, total: Any, x: Any, weight: Any, cpu: Host) -> Any:
    if not cpu.quads:
        return code.add(total, _pair_products(code, x, weight, cpu))
    return code.intrinsic("llvm.x86.avx512.vpdpbusd.512", total.type, [total, weight, x])


def _pair_products(code: Code, a: Any, b: Any, cpu: Host) -> Any:
    # A word of 32 bits holds a pair of 16-bit numbers. Both products of a pair are added.
    if cpu.pairs:
        shorts = ir.VectorType(I16, 2 * a.type.count)
        name = _MULTIPLY_PAIRS[cpu.vector_bytes]
        return code.intrinsic(name, a.type, [code.bitcast(a, shorts), code.bitcast(b, shorts)])
    half = filled(a.type, 16)
    upper = code.mul(code.ashr(a, half), code.ashr(b, half))
    low_a, low_b = (code.ashr(code.shl(word, half), half) for word in (a, b))
    return code.add(upper, code.mul(low_a, low_b))


_MULTIPLY_PAIRS = {
    64: "llvm.x86.avx512.pmaddw.d.512",
    32: "llvm.x86.avx2.pmadd.wd",
    16: "llvm.x86.sse2.pmadd.wd",
}
