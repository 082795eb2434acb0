"""Generation of code that reads the codes and scales of GGUF blocks from a panel.

A vector of words holds the codes of a few inputs of each of several outputs. Shifts and masks, and
a table look-up for some formats, convert it to

* pairs: two 16-bit numbers for each output, or
* quads: four unsigned 8-bit numbers for each output, if the processor multiplies them. Codes of 8
  bits are signed, so 128 is added to each. One instruction (vpmultishiftqb, Intel 64 and IA-32
  Architectures Software Developer's Manual) moves the high bits of codes, which are in other words
  than the low bits, to their place in all bytes.

`cpu/blocks.py` describes the order of words in a panel, and of codes in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.blocks import UNIT, WORD, BlockFormat
from pallas_kernels.cpu.ffi import Host
from pallas_kernels.cpu.ir_builder import I8, I16, I32, I64, LINE, Code, const, filled
from pallas_kernels.cpu.panels import PANEL

# Distance of prefetches in bytes of a panel, and the target cache, first (3) or second (2). For
# pairs, then for quads. 8-bit codes in quads are fastest without prefetches.
AHEAD = {2: ((4608, 3),), 4: ((8192, 2), (1024, 3))}
FLOAT = ir.FloatType()
SIGN = 128  # added to codes of 8 bits to make them unsigned


def inputs_of_steps(layout: BlockFormat, count: int) -> list[list[int]]:
    """Return which inputs of a unit (32 inputs of a GGUF block) each product step multiplies.

    Each item is a list of `count` (2 or 4) inputs, in the order of the lanes.
    """
    if count == 2:
        return [[first, first + 1] for first in range(0, UNIT, 2)]
    in_word = WORD // layout.low
    return [
        [
            first + 2 * (nth + half * (8 // layout.low)) + upper
            for upper in (0, 1)
            for half in (0, 1)
        ]
        for first in range(0, UNIT, in_word)
        for nth in range(in_word // 4)
    ]


class BlockReader:
    """Generator of LLVM IR that reads a GGUF block of some outputs from a panel.

    The IR that loads the scale and minimum of the block is emitted at once.
    """

    def __init__(
        self, code: Code, layout: BlockFormat, cpu: Host, count: int, address: Any, columns: range
    ) -> None:
        self.format, self.cpu, self.columns = layout, cpu, columns
        self.count, self.lanes = count, cpu.vector_bytes // 4
        self._code, self._address = code, address
        self._places = layout.in_panel
        read = self._power if self.format.is_power else self._half
        self._whole = [read("scale", column) for column in columns]
        self._least = []
        if self.format.has_minimum:
            self._least = [self._half("minimum", column) for column in columns]

    def _read(self, name: str, unit: Any, nth: int, column: int, element: ir.Type) -> Any:
        place, code = self._places[name], self._code
        begin = code.mul(unit, const(PANEL * place.size))
        before = PANEL * (place.first + place.start + nth * place.item)
        address = code.at(code.at(self._address, const(before), I8), begin, I8)
        return code.read_vector(address, const(column * self.lanes), element, self.lanes)

    def _half(self, name: str, column: int) -> Any:
        halves = self._read(name, const(0), 0, column, ir.HalfType())
        return self._code.fpext(halves, ir.VectorType(FLOAT, self.lanes))

    def _power(self, name: str, column: int) -> Any:
        code, whole = self._code, ir.VectorType(I32, self.lanes)
        exponents = code.zext(self._read(name, const(0), 0, column, I8), whole)
        usual = code.shl(code.sub(exponents, filled(whole, 1)), filled(whole, 23))
        least = code.shl(filled(whole, 0x200000), exponents)
        is_least = code.icmp_unsigned("<", exponents, filled(whole, 2))
        bits = code.select(is_least, least, usual)
        return code.bitcast(bits, ir.VectorType(FLOAT, self.lanes))

    def scales(self, unit: Any, run: int) -> tuple[list[Any], list[Any]]:
        """Emit LLVM IR that loads the scales and minima of a run (inputs that share a scale).

        The run is run `run` of unit `unit` (32 inputs) of the GGUF block.

        Returns:
            Two lists, of scales and of minima, with an IR vector for each vector of outputs. The
            list of minima is empty if the format has no minimum.
        """
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

    def numbers(self, unit: Any) -> Iterator[list[Any]]:
        """Emit LLVM IR that unpacks the codes of a unit (32 inputs) to integers, without scales.

        Yields for each step of `inputs_of_steps` a list with an IR vector of words for each vector
        of outputs. A word holds the numbers of 2 or 4 inputs.
        """
        code, layout = self._code, self.format
        steps = inputs_of_steps(layout, self.count)
        in_word = WORD // layout.low // self.count
        in_high = WORD // layout.high // self.count if layout.high else len(steps)
        low: list[Any] = []
        high: list[Any] = []
        for nth, inputs in enumerate(steps):
            if nth % in_word == 0:
                word = nth // in_word
                low = [self._read("low", unit, word, column, I32) for column in self.columns]
            if layout.high and nth % in_high == 0:
                word = nth // in_high
                high = [self._read("high", unit, word, column, I32) for column in self.columns]
            vectors = [self._lower_bits(words, nth % in_word) for words in low]
            if layout.high:
                bits = [self._further_bits(words, inputs) for words in high]
                pairs = zip(vectors, bits, strict=True)
                vectors = [code.or_(number, bit) for number, bit in pairs]
            if layout.numbers:
                vectors = [_looked_up(code, words, layout.numbers, self.cpu) for words in vectors]
            yield vectors

    def _lower_bits(self, words: Any, nth: int) -> Any:
        # Only 8-bit codes are signed.
        code, bits = self._code, self.format.low
        if bits < 8:
            lanes = 0x00010001 if self.count == 2 else 0x01010101
            mask = filled(words.type, ((1 << bits) - 1) * lanes)
            return code.and_(_shifted(code, words, bits * nth), mask)
        if self.count == 4:
            return code.xor(words, filled(words.type, SIGN * 0x01010101))
        shorts = ir.VectorType(I16, 2 * words.type.count)
        halves = code.bitcast(words, shorts)
        if nth == 0:
            halves = code.shl(halves, filled(shorts, 8))
        return code.bitcast(code.ashr(halves, filled(shorts, 8)), words.type)

    def _further_bits(self, words: Any, inputs: Sequence[int]) -> Any:
        # The high bits of the codes of some inputs, at their final position.
        code, layout = self._code, self.format
        in_word = WORD // layout.high
        # In a word the even inputs are in the lower half and the odd ones in the upper half.
        places = [place % 2 * 16 + place % in_word // 2 * layout.high for place in inputs]
        ones = (1 << layout.high) - 1 << layout.low
        if self.count == 2:
            moved = _shifted(code, words, places[0] - layout.low)
            return code.and_(moved, filled(words.type, ones * 0x00010001))
        eights = ir.VectorType(I64, words.type.count // 2)
        bytes_ = ir.VectorType(I8, 4 * words.type.count)
        begin = [(word + place - layout.low) % 64 for word in (0, WORD) for place in places]
        control = ir.Constant(bytes_, begin * eights.count)
        moved = code.intrinsic(
            "llvm.x86.avx512.pmultishift.qb.512", bytes_, [control, code.bitcast(words, bytes_)]
        )
        return code.and_(code.bitcast(moved, words.type), filled(words.type, ones * 0x01010101))

    def prefetch(self, unit: Any) -> None:
        """Emit LLVM IR that prefetches as many bytes of the panel as a unit (32 inputs) has.

        The bytes are at fixed distances after the unit's. Codes of 8 bits in quads are not
        prefetched.
        """
        code, layout = self._code, self.format
        if self.count == 4 and layout.low == 8:
            return
        size = PANEL * layout.num_bytes // layout.units
        first = code.at(self._address, code.mul(unit, const(size)), I8)
        for ahead, near in AHEAD[self.count]:
            for line in range(ahead, ahead + size, LINE):
                code.prefetch(code.at(first, const(line), I8), near)


def _shifted(code: Code, words: Any, right: int) -> Any:
    if right == 0:
        return words
    shift = code.lshr if right > 0 else code.shl
    return shift(words, filled(words.type, abs(right)))


def _looked_up(code: Code, words: Any, numbers: Sequence[int], cpu: Host) -> Any:
    """Emit LLVM IR that replaces 4-bit codes by the numbers of a table. Return the IR vector.

    The codes are bytes, two or four in a word. One instruction (pshufb) looks up every byte. The
    other bytes are 0, and the first number of the table is 0 too. Without that instruction, the IR
    adds the differences of consecutive numbers up to the code, for two codes in a word.
    """
    if cpu.pairs and cpu.vector_bytes in _LOOK_UP:
        size = cpu.vector_bytes
        table = ir.Constant(ir.VectorType(I8, size), [*numbers] * (size // 16))
        vectors = code.bitcast(words, table.type)
        return code.bitcast(
            code.intrinsic(_LOOK_UP[size], table.type, [table, vectors]), words.type
        )
    shorts = ir.VectorType(I16, 2 * words.type.count)
    codes, total = code.bitcast(words, shorts), filled(shorts, 0)
    for least in range(1, len(numbers)):
        passed = code.icmp_unsigned(">=", codes, filled(shorts, least))
        step = filled(shorts, numbers[least] - numbers[least - 1])
        total = code.add(total, code.and_(code.sext(passed, shorts), step))
    return code.bitcast(total, words.type)


_LOOK_UP = {64: "llvm.x86.avx512.pshuf.b.512", 32: "llvm.x86.avx2.pshuf.b"}
