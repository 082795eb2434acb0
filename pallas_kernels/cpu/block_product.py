"""Products with weights in GGUF blocks on CPU: integers are multiplied, and codes stay packed.

Each row of x is rounded to 16-bit integers with a scale per 32 inputs, the largest integer being
32,639. So the error of a number is at most the largest of 32 numbers over 65,278, which has no
visible effect. The 8 bits of llama.cpp increase the perplexity of a model by 0.3 to 0.4 %. Codes
are integers too, so the sums over a run of inputs are exact, in 32 bits, and only these sums are
multiplied by scales. `cpu/block_reader.py` converts a vector of words to pairs or quads of numbers.
One instruction multiplies them by as many numbers of x and adds the products: pairs directly
(vpmaddwd or vpdpwssd, Intel 64 and IA-32 Architectures Software Developer's Manual), quads once
with the upper bytes of x and once with the lower bytes (vpdpbusd). Quads need as many product
instructions as pairs, and half as many instructions that unpack.

The sums of runs are added in the order of the inputs, so the result of a row does not depend on
other rows. As in `cpu/product.py`, padding rows are not multiplied, and groups of rows may have
their own weights. `cpu/blocks.py` describes the layout of the weights and their values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.block_reader import FLOAT, SIGN, BlockReader, inputs_of_steps
from pallas_kernels.cpu.blocks import FORMATS, UNIT, BlockFormat
from pallas_kernels.cpu.ffi import NAMES, Field, part_bounds, registered
from pallas_kernels.cpu.ir_builder import (
    I8,
    I16,
    I32,
    I64,
    POINTER,
    VOID,
    Code,
    Host,
    const,
    filled,
    host,
)
from pallas_kernels.cpu.panels import PANEL
from pallas_kernels.cpu.product import TILES_OF_A_CHUNK, each_group, fill, parts_of

# The largest 16-bit number whose upper byte and signed lower byte both have 8 bits.
MOST = 32639.0
_ROUNDS = 1.5 * 2.0**23  # added to a float, it leaves the nearest integer in the lowest bits


@dataclass(frozen=True)
class BlockProduct:
    """Kernel for a GGUF format. x and sums are float32.

    Attributes:
        form: name of the format.
        cpu: the CPU that code is generated for.
    """

    form: str
    cpu: Host = field(default_factory=host)

    operands = 3

    @property
    def name(self) -> str:
        kind = "_quads" if self.cpu.quads else "_pairs" if self.cpu.pairs else ""
        return f"{NAMES}block_product_{self.form}_{self.cpu.vectors}{kind}"

    @property
    def format(self) -> BlockFormat:
        """The `BlockFormat`."""
        return FORMATS[self.form]

    @property
    def lanes(self) -> int:
        """Outputs of a vector."""
        return self.cpu.vector_bytes // 4

    @property
    def count(self) -> int:
        """Number of inputs that one instruction multiplies for each output."""
        return 4 if self.cpu.quads else 2

    @property
    def offset(self) -> int:
        """Difference between the unpacked numbers and the codes."""
        return SIGN if self.cpu.quads and self.format.low == 8 else self.format.offset

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """Pairs of (rows of a tile, vectors of outputs in a pass) whose sums fit in registers."""
        if self.cpu.quads:  # with three sums of each
            return [(8, 1), (4, 2), (2, 2), (1, 2)]
        most = self.cpu.registers * 3 // 8  # with two sums of each
        sizes = (6, 4, 2, 1) if most >= 12 else (4, 2, 1)
        widths = [width for width in (8, 4, 2, 1) if width * self.lanes <= PANEL]
        return [(size, next(w for w in widths if w == 1 or w * size <= most)) for size in sizes]

    @property
    def fields(self) -> Sequence[Field]:
        """Arguments of the code: x, panels, rows of each weight, y, integers of x, then sizes.

        The sizes are rows, weights, inputs, panels of a weight, and bytes of an integer row.
        """
        buffers = (Field(buffer) for buffer in range(5))
        return (*buffers, Field(0, 0), Field(1, 0), Field(0, 1), Field(1, 1), Field(4, 1))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        """Generate code that computes the number of parts, and marks all rows of x as not rounded.

        A weight in GGUF blocks takes half the time of a weight in floats.
        """
        _, _, counts, _, whole, rows, experts, inputs, panels, between = fields
        with code.loop(const(0), rows) as (row, _):
            code.store(ir.Constant(I32, 0), _mark(code, whole, row, between), align=4)
        return parts_of(code, (counts, experts, rows), code.ashr(inputs, const(1)), panels)

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Generate code that computes the panels of part `index` of all weights.

        Padding rows of y become zero. Each part also rounds rows of x that no other part has
        rounded yet. Parts start at different rows. Two parts may round the same row, which is
        faster than waiting.
        """
        x, w, counts, y, whole, rows, experts, inputs, panels, between = fields
        outputs = code.mul(panels, const(PANEL))
        first, last = part_bounds(code, panels, index, parts)
        tiles = self.tiles
        functions = {size: _tile(code.module, self, size, width) for size, width in tiles}
        rounding = _rounding(code.module, self)
        blocks = code.sdiv(inputs, const(self.format.size))
        chunk_rows = tiles[0][0] * TILES_OF_A_CHUNK
        size_of_panel = code.mul(blocks, const(PANEL * self.format.num_bytes))
        with (
            each_group(code, counts, experts, rows) as (expert, begin, ends),
            code.loop(begin, ends[0], chunk_rows) as (chunk, _),
        ):
            end = code.smaller_int(code.add(chunk, const(chunk_rows)), ends[0])
            from_, _ = part_bounds(code, code.sub(end, chunk), index, parts)
            from_ = code.add(chunk, from_)
            for some_rows in ((from_, end), (chunk, from_)):
                with code.loop(*some_rows) as (row, _):
                    _round_row(code, rounding, (x, whole), row, inputs, between)
            with code.loop(first, last) as (panel, _):
                of_all = code.add(code.mul(expert, panels), panel)
                here = code.at(w, code.mul(of_all, size_of_panel), I8)
                row = chunk
                for size, _ in tiles:
                    with code.loop(row, code.sub(end, const(size - 1)), size) as (start, _):
                        from_ = code.at(whole, code.mul(start, between), I8)
                        place = code.add(code.mul(start, outputs), code.mul(panel, const(PANEL)))
                        to = code.at(y, place, FLOAT)
                        code.call(functions[size], [from_, here, to, inputs, between, outputs])
                    done = code.sdiv(code.sub(end, row), const(size))
                    row = code.add(row, code.mul(done, const(size)))
        fill(code, y, (ends[0], rows), (first, last), outputs, FLOAT, self.lanes)


def _mark(code: Code, whole: Any, row: Any, between: Any) -> Any:
    after = code.mul(code.add(row, const(1)), between)
    return code.at(whole, code.sub(after, const(4)), I8)


def _round_row(
    code: Code, rounding: Any, buffers: tuple[Any, Any], row: Any, inputs: Any, between: Any
) -> None:
    """Generate code that rounds a row of x to integers, unless another part has done it.

    `buffers` are x and the integers.
    """
    x, whole = buffers
    mark = _mark(code, whole, row, between)
    written = code.load_atomic(mark, "acquire", 4, typ=I32)
    with code.if_then(code.icmp_signed("==", written, ir.Constant(I32, 0))):
        from_ = code.at(x, code.mul(row, inputs), FLOAT)
        code.call(rounding, [from_, code.at(whole, code.mul(row, between), I8), inputs])
        code.atomic_rmw("xchg", mark, ir.Constant(I32, 1), "release")  # after the row is written


def row_bytes(inputs: int) -> int:
    """Return the bytes of an integer row: integers, their scales, the sums of each 16, a mark."""
    return 2 * inputs + inputs // UNIT * 12 + 4


def _places(code: Code, row: Any, inputs: Any) -> tuple[Any, Any]:
    scales = code.at(row, code.mul(inputs, const(2)), I8)
    return scales, code.at(scales, code.sdiv(inputs, const(UNIT // 4)), I8)


def _rounding(module: ir.Module, kernel: BlockProduct) -> ir.Function:
    """Generate a function (x, to, inputs) that rounds a row of x to integers.

    NaN or infinity in x makes the scale NaN.
    """
    lanes = kernel.lanes
    function = ir.Function(module, ir.FunctionType(VOID, [POINTER, POINTER, I64]), "rounding")
    function.linkage = "internal"
    code = Code(function)
    x, to, inputs = function.args
    scales, sums = _places(code, to, inputs)
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
            runs = [code.lanes_folded(_folded(numbers, code.add), code.add)]
        for run, total in enumerate(runs):
            place = code.add(code.mul(unit, const(2)), const(run))
            if kernel.format.has_minimum:
                least = code.fmul(scale, code.sitofp(total, FLOAT))
                code.store(least, code.at(sums, place, FLOAT), align=4)
            elif kernel.offset:
                less = code.mul(total, ir.Constant(I32, -kernel.offset))
                code.store(less, code.at(sums, place, I32), align=4)
    code.ret_void()
    return function


def _store_numbers(code: Code, kernel: BlockProduct, numbers: Sequence[Any], to: Any) -> None:
    """Generate code that stores 32 rounded inputs (a unit) in the layout that the products read.

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


def _folded(values: Sequence[Any], combine: Any) -> Any:
    first, *rest = values
    for value in rest:
        first = combine(first, value)
    return first


def _half_sums(code: Code, vectors: list[Any]) -> list[Any]:
    """Generate code that sums the first half and the second half of the lanes of all vectors."""
    if len(vectors) == 1:
        (vector,) = vectors
        count = vector.type.count // 2
        halves = [range(count), range(count, 2 * count)]
        vectors = [code.lanes_of(vector, vector, half) for half in halves]
    middle = len(vectors) // 2
    return [
        code.lanes_folded(_folded(half, code.add), code.add)
        for half in (vectors[:middle], vectors[middle:])
    ]


def _tile(module: ir.Module, kernel: BlockProduct, size: int, width: int) -> ir.Function:
    """Generate a function (integers of x, panel, y, inputs, between, outputs).

    It computes y[:size, :PANEL] = x[:size] @ panel. Rows of x are `between` bytes apart, rows of y
    `outputs` numbers. A pass over the panel computes `width` vectors of outputs.
    """
    layout, lanes = kernel.format, kernel.lanes
    kind = ir.FunctionType(VOID, [POINTER] * 3 + [I64] * 3)
    function = ir.Function(module, kind, f"tile_{size}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    code = Code(function)
    x, panel, y, inputs, between, outputs = function.args
    rows = [code.at(x, code.mul(const(row), between), I8) for row in range(size)]
    places = [_places(code, row, inputs) for row in rows]
    zero = filled(ir.VectorType(FLOAT, lanes), 0.0)
    blocks = code.sdiv(inputs, const(layout.size))
    for begin in range(0, PANEL // lanes, width):
        columns = range(begin, begin + width)
        with code.loop(const(0), blocks, carry=[zero] * (size * width)) as (block, totals):
            here = code.at(panel, code.mul(block, const(PANEL * layout.num_bytes)), I8)
            reader = BlockReader(code, layout, kernel.cpu, kernel.count, here, columns)
            units = layout.size // UNIT
            with code.loop(const(0), const(units), carry=totals) as (nth, inner):
                unit = code.add(code.mul(block, const(units)), nth)
                _add_unit(code, kernel, reader, rows, places, nth, unit, inner)
            totals[:] = inner
        for index, total in enumerate(totals):
            row, column = divmod(index, width)
            to = code.at(y, code.mul(const(row), outputs), FLOAT)
            code.write_vector(total, to, const(columns[column] * lanes))
    code.ret_void()
    return function


def _add_unit(
    code: Code,
    kernel: BlockProduct,
    reader: BlockReader,
    rows: Sequence[Any],
    places: Sequence[tuple[Any, Any]],
    nth: Any,
    unit: Any,
    totals: list[Any],
) -> None:
    """Generate code that adds the products of a unit to the totals of each row and column.

    Args:
        nth: number of the unit in its block.
        unit: number of the unit in the row.
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
    kernel: BlockProduct,
    numbers: Iterator[list[Any]],
    words: Sequence[Any],
    steps: range,
    begin: Sequence[Any],
    width: int,
) -> list[Any]:
    """Generate code that multiplies a run and sums the products, for each row and column.

    Args:
        numbers: iterator over the steps, `width` vectors of weights each.
        words: for each row, the address of the unit's words of x.
        begin: initial value of the sums of each row.

    Returns:
        The integer sums: `width` vectors per row.
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
    return [_folded(each, code.add) for each in sums]


def _add_products(code: Code, total: Any, x: Any, weight: Any, cpu: Host) -> Any:
    if not cpu.quads:
        return code.add(total, pair_products(code, x, weight, cpu))
    return code.intrinsic("llvm.x86.avx512.vpdpbusd.512", total.type, [total, weight, x])


def pair_products(code: Code, a: Any, b: Any, cpu: Host) -> Any:
    """Generate code that multiplies pairs of 16-bit numbers and adds both products of each pair.

    Each pair is a word of 32 bits.
    """
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


def block_product(
    x: jax.Array, panels: jax.Array, form: str, num_rows: jax.Array | None = None
) -> jax.Array:
    """Multiply x by a weight in GGUF blocks, or rows sorted by expert each by its expert's weight.

    Args:
        x: [T, I], any float of at most 32 bits.
        panels: uint8 of `blocks.panel_shape`. For experts [E, ...].
        form: name of the GGUF format.
        num_rows: as in `panel_product`.

    Returns:
        [T, P * PANEL] in float32.

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """
    return run(BlockProduct(form), x, panels, num_rows)


def run(
    kernel: BlockProduct, x: jax.Array, panels: jax.Array, num_rows: jax.Array | None = None
) -> jax.Array:
    """Compute `block_product` with `kernel`: float32 [T, P * PANEL]."""
    layout, inputs = kernel.format, x.shape[1]
    shape = (inputs // layout.size, PANEL * layout.num_bytes)
    has_shape = panels.ndim in (3, 4) and panels.shape[-2:] == shape and panels.dtype == np.uint8
    if inputs % layout.size or not inputs or not has_shape:
        raise ValueError(
            f"panels are {panels.dtype}{list(panels.shape)}; expected uint8[P, {shape[0]}, "
            f"{shape[1]}] of {layout.name} for {inputs} inputs, which are blocks of {layout.size}"
        )
    if panels.ndim == 3:
        count = jnp.int32(x.shape[0]) if num_rows is None else num_rows
        panels, counts = panels[None], count.astype(jnp.int32).reshape(1)
    elif num_rows is None or num_rows.shape != panels.shape[:1]:
        raise ValueError(f"num_rows must be int32[{len(panels)}], of each group")
    else:
        counts = num_rows
    results = (
        jax.ShapeDtypeStruct((x.shape[0], panels.shape[1] * PANEL), np.float32),
        jax.ShapeDtypeStruct((x.shape[0], row_bytes(inputs)), np.uint8),
    )
    # Without thorough compilation, the product of one row takes up to a tenth longer.
    call = jax.ffi.ffi_call(registered(kernel, thorough=True), results)
    return call(x.astype(np.float32), panels, counts)[0]
