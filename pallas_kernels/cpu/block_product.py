"""Products with weights in blocks, on CPU: whole numbers are multiplied, blocks stay packed.

Each row of x is written as whole numbers of 16 bits with a scale for 32 inputs, the largest of them
32,767. So a number is off by at most the largest of 32 over 65,534, which costs nothing that can be
seen, where 8 bits, as llama.cpp takes them, cost a model 0.3 to 0.4 % of its perplexity. Codes are
whole numbers too: the sums over a run of inputs are exact, in 32 bits, and only they are multiplied
by scales. A vector of words holds eight codes (of 4 bits) of each of its outputs; two shifts and
masks, of codes that stand in a table a look-up too, make a pair of numbers for each output, which
one instruction multiplies by a pair of x and adds (vpmaddwd or vpdpwssd, Intel 64 and IA-32
Architectures Software Developer's Manual).

Sums over runs are added in the order of the inputs: a row's result does not depend on the others.
As in `cpu/product.py`, rows that do not count are not multiplied, and groups of rows may have
weights of their own. `cpu/blocks.py` says how weights lie, and what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.blocks import FORMATS, UNIT, BlockFormat
from pallas_kernels.cpu.ffi import NAMES, Field, part_bounds, registered
from pallas_kernels.cpu.ir_builder import (
    I8,
    I16,
    I32,
    I64,
    LINE,
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

MOST = 32767.0
FLOAT = ir.FloatType()
_ROUNDS = 1.5 * 2.0**23  # added to a float, it leaves the nearest whole number in the lowest bits
AHEAD = 4608  # bytes of a panel that prefetches are ahead


@dataclass(frozen=True)
class BlockProduct:
    """Kernel for a format of blocks; x and sums are float32.

    Attributes:
        form: name of the format.
        cpu: the CPU that the code is generated for.
    """

    form: str
    cpu: Host = field(default_factory=host)

    operands = 3

    @property
    def name(self) -> str:
        """Name of the operation."""
        pairs = "_pairs" if self.cpu.pairs else ""
        return f"{NAMES}block_product_{self.form}_{self.cpu.vectors}{pairs}"

    @property
    def format(self) -> BlockFormat:
        """The format."""
        return FORMATS[self.form]

    @property
    def lanes(self) -> int:
        """Outputs of a vector."""
        return self.cpu.vector_bytes // 4

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """Rows of a tile, and vectors of outputs of a pass; two sums of each stay in registers."""
        most = self.cpu.registers * 3 // 8
        sizes = (6, 4, 2, 1) if most >= 12 else (4, 2, 1)
        widths = [width for width in (8, 4, 2, 1) if width * self.lanes <= PANEL]
        return [(size, next(w for w in widths if w == 1 or w * size <= most)) for size in sizes]

    @property
    def fields(self) -> Sequence[Field]:
        """Arguments: x, panels, rows of each weight, y, x in whole numbers; then sizes.

        The sizes are rows, weights, inputs, a weight's panels, and bytes of a row in whole numbers.
        """
        buffers = (Field(buffer) for buffer in range(5))
        return (*buffers, Field(0, 0), Field(1, 0), Field(0, 1), Field(1, 1), Field(4, 1))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        """Generate the number of parts; a weight takes half the time of one in floats."""
        *_, rows, experts, inputs, panels, _ = fields
        return parts_of(code, (fields[2], experts, rows), code.ashr(inputs, const(1)), panels)

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Generate part `index`'s panels of all weights, then zeros in rows that do not count.

        All parts write the same whole numbers for x to the same place: that takes less time than to
        wait for one that does.
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
            with code.loop(chunk, end) as (row, _):
                from_ = code.at(x, code.mul(row, inputs), FLOAT)
                code.call(rounding, [from_, code.at(whole, code.mul(row, between), I8), inputs])
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


def row_bytes(inputs: int) -> int:
    """Return the bytes of a row in whole numbers: they, their scales, and the sums of 16 each."""
    return 2 * inputs + inputs // UNIT * 12


def _places(code: Code, row: Any, inputs: Any) -> tuple[Any, Any]:
    """Return the addresses of the scales of a row in whole numbers, and of its sums."""
    scales = code.at(row, code.mul(inputs, const(2)), I8)
    return scales, code.at(scales, code.sdiv(inputs, const(UNIT // 4)), I8)


def _rounding(module: ir.Module, kernel: BlockProduct) -> ir.Function:
    """Generate a function of (x, to, inputs), which writes a row of x in whole numbers.

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
        totals = []
        for nth, vector in enumerate(read):
            shifted = code.multiply_add(vector, inverse, filled(real, _ROUNDS))
            number = code.sub(code.bitcast(shifted, whole), filled(whole, 0x4B400000))
            short = code.trunc(number, ir.VectorType(I16, lanes))
            place = code.at(to, code.add(start, const(nth * lanes)), I16)
            code.store(short, place, align=2)
            totals.append(code.sext(short, whole))
        for half, total in enumerate(_half_sums(code, totals)):
            place = code.at(sums, code.add(code.mul(unit, const(2)), const(half)), I32)
            code.store(code.mul(total, ir.Constant(I32, kernel.format.offset)), place, align=4)
        if kernel.format.has_minimum:
            runs = [code.lanes_folded(_folded(totals, code.add), code.add)]
            if kernel.format.run < UNIT:
                runs = _half_sums(code, totals)
            for run, total in enumerate(runs):
                least = code.fmul(scale, code.sitofp(total, FLOAT))
                place = code.add(code.mul(unit, const(2)), const(run))
                code.store(least, code.at(sums, place, FLOAT), align=4)
    code.ret_void()
    return function


def _folded(values: Sequence[Any], combine: Any) -> Any:
    """Combine all values, one after the other."""
    first, *rest = values
    for value in rest:
        first = combine(first, value)
    return first


def _half_sums(code: Code, vectors: list[Any]) -> list[Any]:
    """Return the sums of the first and of the second half of the lanes of vectors in a row."""
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
    """Generate a function of (x in whole numbers, panel, y, inputs, between, outputs).

    y[:size, :PANEL] = x[:size] @ panel. Rows of x are `between` bytes apart, those of y `outputs`
    numbers. A pass over the panel makes `width` vectors of outputs.
    """
    made, lanes = kernel.format, kernel.lanes
    kind = ir.FunctionType(VOID, [POINTER] * 3 + [I64] * 3)
    function = ir.Function(module, kind, f"tile_{size}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    code = Code(function)
    x, panel, y, inputs, between, outputs = function.args
    rows = [code.at(x, code.mul(const(row), between), I8) for row in range(size)]
    places = [_places(code, row, inputs) for row in rows]
    zero = filled(ir.VectorType(FLOAT, lanes), 0.0)
    blocks = code.sdiv(inputs, const(made.size))
    for begin in range(0, PANEL // lanes, width):
        columns = range(begin, begin + width)
        with code.loop(const(0), blocks, carry=[zero] * (size * width)) as (block, totals):
            here = code.at(panel, code.mul(block, const(PANEL * made.num_bytes)), I8)
            reader = _Block(code, kernel, here, columns)
            units = made.size // UNIT
            with code.loop(const(0), const(units), carry=totals) as (nth, inner):
                unit = code.add(code.mul(block, const(units)), nth)
                _add_unit(code, reader, rows, places, nth, unit, inner)
            totals[:] = inner
        for index, total in enumerate(totals):
            row, column = divmod(index, width)
            to = code.at(y, code.mul(const(row), outputs), FLOAT)
            code.write_vector(total, to, const(columns[column] * lanes))
    code.ret_void()
    return function


def _add_unit(
    code: Code,
    reader: _Block,
    rows: Sequence[Any],
    places: Sequence[tuple[Any, Any]],
    nth: Any,
    unit: Any,
    totals: list[Any],
) -> None:
    """Add the products of a unit to the totals of each row and column.

    Args:
        nth: the unit in its block.
        unit: in the row.
    """
    made, lanes, width = reader.format, reader.lanes, len(reader.columns)
    whole, real = ir.VectorType(I32, lanes), ir.VectorType(FLOAT, lanes)
    if reader.columns.start == 0:  # later passes find the panel in the cache
        reader.prefetch(nth)
    codes = reader.pairs(nth)
    chains = _chains(len(rows) * width)
    for run in range(UNIT // made.run):
        sums: list[list[Any]] = [[filled(whole, 0)] * chains for _ in range(len(rows) * width)]
        for pair in range(made.run // 2):
            weights = next(codes)
            where = code.add(code.mul(unit, const(UNIT // 2)), const(run * made.run // 2 + pair))
            for row, address in enumerate(rows):
                value = code.splat(code.load(code.at(address, where, I32), typ=I32, align=4), lanes)
                for column, weight in enumerate(weights):
                    chain = sums[row * width + column]
                    product = pair_products(code, value, weight, reader.cpu)
                    chain[pair % chains] = code.add(chain[pair % chains], product)
        scales, minima = reader.scales(nth, run)
        for row, (of_x, sums_of_x) in enumerate(places):
            step = code.load(code.at(of_x, unit, FLOAT), typ=FLOAT, align=4)
            where = code.add(code.mul(unit, const(2)), const(run))
            for column in range(width):
                index = row * width + column
                number = _folded(sums[index], code.add)
                if made.has_minimum:
                    least = code.load(code.at(sums_of_x, where, FLOAT), typ=FLOAT, align=4)
                    least = code.splat(least, lanes)
                    totals[index] = code.multiply_add(minima[column], least, totals[index])
                elif made.offset:
                    offset = _offset(code, sums_of_x, where, made.run)
                    number = code.sub(number, code.splat(offset, lanes))
                factor = code.fmul(scales[column], code.splat(step, lanes))
                totals[index] = code.multiply_add(code.sitofp(number, real), factor, totals[index])


def _chains(count: int) -> int:
    """Return how many sums to make of each: as many as hide how long an addition takes.

    They are exact, so their order does not matter.
    """
    return max(1, 8 // count)


def _offset(code: Code, sums: Any, where: Any, run: int) -> Any:
    """Return what the offset of codes adds to the sum over a run of inputs."""
    first = code.load(code.at(sums, where, I32), typ=I32, align=4)
    if run < UNIT:
        return first
    following = code.at(sums, code.add(where, const(1)), I32)
    return code.add(first, code.load(following, typ=I32, align=4))


class _Block:
    """Generator of what a block of a panel holds, for some of its columns."""

    def __init__(self, code: Code, kernel: BlockProduct, address: Any, columns: range) -> None:
        self.format, self.lanes, self.columns = kernel.format, kernel.lanes, columns
        self.cpu = kernel.cpu
        self._code, self._address = code, address
        self._places = kernel.format.in_panel
        read = self._power if self.format.is_power else self._half
        self._whole = [read("scale", column) for column in columns]
        self._least = []
        if self.format.has_minimum:
            self._least = [self._half("minimum", column) for column in columns]

    def _read(self, name: str, unit: Any, nth: int, column: int, element: ir.Type) -> Any:
        """Load item `nth` of a field in a unit, for the outputs of a column."""
        place, code = self._places[name], self._code
        begin = code.mul(unit, const(PANEL * place.size))
        before = PANEL * (place.first + place.start + nth * place.item)
        address = code.at(code.at(self._address, const(before), I8), begin, I8)
        return code.read_vector(address, const(column * self.lanes), element, self.lanes)

    def _half(self, name: str, column: int) -> Any:
        halves = self._read(name, const(0), 0, column, ir.HalfType())
        return self._code.fpext(halves, ir.VectorType(FLOAT, self.lanes))

    def _power(self, name: str, column: int) -> Any:
        """Load exponents E8M0: halves of powers of two, the least of which are subnormal."""
        code, whole = self._code, ir.VectorType(I32, self.lanes)
        exponents = code.zext(self._read(name, const(0), 0, column, I8), whole)
        usual = code.shl(code.sub(exponents, filled(whole, 1)), filled(whole, 23))
        least = code.shl(filled(whole, 0x200000), exponents)
        is_least = code.icmp_unsigned("<", exponents, filled(whole, 2))
        bits = code.select(is_least, least, usual)
        return code.bitcast(bits, ir.VectorType(FLOAT, self.lanes))

    def scales(self, unit: Any, run: int) -> tuple[list[Any], list[Any]]:
        """Return the scales of a run of a unit, and its minima if it has some."""
        if not self.format.scaled:
            return self._whole, self._least
        code, whole = self._code, ir.VectorType(I32, self.lanes)
        real = ir.VectorType(FLOAT, self.lanes)
        widen = code.zext if self.format.has_minimum else code.sext

        def factors(name: str) -> list[Any]:
            return [
                code.sitofp(widen(self._read(name, unit, run, column, I8), whole), real)
                for column in self.columns
            ]

        pairs = zip(self._whole, factors("scales"), strict=True)
        scales = [code.fmul(scale, factor) for scale, factor in pairs]
        if not self.format.has_minimum:
            return scales, []
        pairs = zip(self._least, factors("minima"), strict=True)
        return scales, [code.fneg(code.fmul(least, factor)) for least, factor in pairs]

    def pairs(self, unit: Any) -> Iterator[list[Any]]:
        """Yield, for each two inputs of a unit, vectors of pairs of codes."""
        code, made = self._code, self.format
        whole = ir.VectorType(I32, self.lanes)
        in_word = WORD_PAIRS[made.low]
        in_high = 16 // made.high if made.high else UNIT
        low: list[Any] = []
        high: list[Any] = []
        for pair in range(UNIT // 2):
            if pair % in_word == 0:
                word = pair // in_word
                low = [self._read("low", unit, word, column, I32) for column in self.columns]
            if made.high and pair % in_high == 0:
                word = pair // in_high
                high = [self._read("high", unit, word, column, I32) for column in self.columns]
            found = [_pair(code, words, pair % in_word, made.low) for words in low]
            if made.high:
                mask = filled(whole, ((1 << made.high) - 1) * (0x00010001 << made.low))
                right = pair % in_high * made.high - made.low
                bits = [_shifted(code, words, right) for words in high]
                pairs = zip(found, bits, strict=True)
                found = [code.or_(number, code.and_(bit, mask)) for number, bit in pairs]
            if made.numbers:
                found = [_looked_up(code, words, made.numbers, self.cpu) for words in found]
            yield found

    def prefetch(self, unit: Any) -> None:
        """Fetch what lies behind a unit of the panel: as many lines as a unit has."""
        code, made = self._code, self.format
        size = PANEL * made.num_bytes * UNIT // made.size
        first = code.at(self._address, code.mul(unit, const(size)), I8)
        for line in range(0, size, LINE):
            code.prefetch(code.at(first, const(AHEAD + line), I8))


WORD_PAIRS = {2: 8, 4: 4, 8: 2}  # pairs of codes in a word


def _shifted(code: Code, words: Any, right: int) -> Any:
    """Shift words to the right, or to the left where that is negative."""
    if right == 0:
        return words
    shift = code.lshr if right > 0 else code.shl
    return shift(words, filled(words.type, abs(right)))


def _pair(code: Code, words: Any, nth: int, bits: int) -> Any:
    """Return pair `nth` of words of codes: unsigned of 2 or 4 bits, or signed of 8."""
    if bits < 8:
        mask = filled(words.type, ((1 << bits) - 1) * 0x00010001)
        return code.and_(_shifted(code, words, bits * nth), mask)
    shorts = ir.VectorType(I16, 2 * words.type.count)
    halves = code.bitcast(words, shorts)
    if nth == 0:
        halves = code.shl(halves, filled(shorts, 8))
    return code.bitcast(code.ashr(halves, filled(shorts, 8)), words.type)


def _looked_up(code: Code, words: Any, numbers: Sequence[int], cpu: Host) -> Any:
    """Replace pairs of codes of 4 bits in words by what they stand for in a table.

    One instruction looks up every byte (pshufb); those above the codes are 0, as is the table's
    first number. Without it, the steps from number to number that a code has passed are added.
    """
    if cpu.pairs and cpu.vector_bytes in _LOOK_UP:
        size = cpu.vector_bytes
        table = ir.Constant(ir.VectorType(I8, size), [*numbers] * (size // 16))
        found = code.bitcast(words, table.type)
        return code.bitcast(code.intrinsic(_LOOK_UP[size], table.type, [table, found]), words.type)
    shorts = ir.VectorType(I16, 2 * words.type.count)
    codes, total = code.bitcast(words, shorts), filled(shorts, 0)
    for least in range(1, len(numbers)):
        passed = code.icmp_unsigned(">=", codes, filled(shorts, least))
        step = filled(shorts, numbers[least] - numbers[least - 1])
        total = code.add(total, code.and_(code.sext(passed, shorts), step))
    return code.bitcast(total, words.type)


_LOOK_UP = {64: "llvm.x86.avx512.pshuf.b.512", 32: "llvm.x86.avx2.pshuf.b"}


def pair_products(code: Code, a: Any, b: Any, cpu: Host) -> Any:
    """Multiply pairs of 16-bit numbers in words of 32 bits, and add the products of each pair."""
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
    """Multiply x by a weight in blocks, or rows sorted by expert each by its weight.

    Args:
        x: [T, I], any float of at most 32 bits.
        panels: uint8, see `blocks.panel_shape`; for experts [E, ...].
        form: of the blocks.
        num_rows: as in `panel_product`.

    Returns:
        [T, P * PANEL] in float32.

    Raises:
        ValueError: naming the argument at fault and what is allowed.
    """
    return run(BlockProduct(form), x, panels, num_rows)


def run(
    kernel: BlockProduct, x: jax.Array, panels: jax.Array, num_rows: jax.Array | None = None
) -> jax.Array:
    """Compute `block_product` by this kernel.

    Raises:
        ValueError: naming the argument at fault and what is allowed.
    """
    made, inputs = kernel.format, x.shape[1]
    shape = (inputs // made.size, PANEL * made.num_bytes)
    has_shape = panels.ndim in (3, 4) and panels.shape[-2:] == shape and panels.dtype == np.uint8
    if inputs % made.size or not inputs or not has_shape:
        raise ValueError(
            f"panels are {panels.dtype}{list(panels.shape)}; expected uint8[P, {shape[0]}, "
            f"{shape[1]}] of {made.name} for {inputs} inputs, which are blocks of {made.size}"
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
    # Compiled less thoroughly, the product of one row takes up to a tenth longer.
    call = jax.ffi.ffi_call(registered(kernel, thorough=True), results)
    return call(x.astype(np.float32), panels, counts)[0]
