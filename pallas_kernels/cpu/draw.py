"""Sampling of tokens on CPU in one operation: probabilities, min_p, top_k, top_p and the draw.

XLA uses about 80 operations for it, which are most of the compile time of a small model's program.
Each row is computed alone, and sums have the order of `row_sums.py` or of the columns. So the token
of a row is the same for any other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.arithmetic import LOG2_E, exp2, float_type
from pallas_kernels.cpu.ffi import NAMES, registered
from pallas_kernels.cpu.handler import Field, part_bounds
from pallas_kernels.cpu.ir_builder import I32, Code, const, element_bytes, filled
from pallas_kernels.cpu.row_sums import RowKernel, Vectors

BLOCK = 128  # columns that are summed at once
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of Threefry
PARITY, ONE = 0x1BD11BDA, 0x3F800000
SETTING = ir.FloatType()  # of temperature, min_p and top_p
WORK_OF_A_COLUMN = 64  # cost of a column relative to reading a number, which `parts_of` counts


@dataclass(frozen=True)
class Draw(RowKernel):
    """CPU kernel (generator of LLVM IR) that samples a token for each row of logits.

    `dtype` is the dtype of the logits, "float32" or "float64".
    """

    operands = 9

    @property
    def name(self) -> str:
        return f"{NAMES}draw_{self.dtype}_{self.cpu.vector_bytes}"

    @property
    def fields(self) -> Sequence[Field]:
        return *map(Field, range(self.operands + 2)), Field(0, 0), Field(0, 1)

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        *_, rows, columns = fields
        return self.parts_of(code, rows, code.mul(columns, const(WORK_OF_A_COLUMN)))

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Emit LLVM IR that samples the tokens of the rows of part `index`, and stores them.

        A row with temperature 0 gets its argmax. `fields` are IR values: the addresses and sizes of
        the operands and results.
        """
        greedy, temperature, tokens, rows = fields[2], fields[3], fields[-4], fields[-2]
        least = code.room(self.bits)
        begin, end = part_bounds(code, rows, index, parts)
        with code.loop(begin, end) as (row, _):
            code.store(code.read(greedy, row, I32), code.at(tokens, row, I32))
            warmth = code.read(temperature, row, SETTING)
            with code.if_then(code.fcmp_ordered(">", warmth, ir.Constant(SETTING, 0.0))):
                _RowDraw(self, code, fields, row, least).draw()

    @property
    def real(self) -> ir.Type:
        """LLVM type of the logits: float or double."""
        return float_type(self.sums)

    @property
    def bits(self) -> Any:
        """LLVM integer type with as many bits as a logit."""
        return ir.IntType(8 * element_bytes(self.real))

    def keys(self, code: Code, x: Any) -> Any:
        """Emit LLVM IR that maps floats to unsigned integers of the same order. Return them."""
        kind = ir.VectorType(self.bits, x.type.count)
        raw = code.bitcast(x, kind)
        is_negative = code.icmp_signed("<", raw, filled(kind, 0))
        sign = filled(kind, 1 << (self.bits.width - 1))
        return code.select(is_negative, code.not_(raw), code.or_(raw, sign))


class _RowDraw:
    """Generator of the LLVM IR that samples the token of one row of logits."""

    def __init__(
        self, kernel: Draw, code: Code, fields: Sequence[Any], row: Any, least: Any
    ) -> None:
        """Emit LLVM IR that reads the sampling settings of row `row`.

        A key is an unsigned integer in the order of the logits. `least` is the address of the least
        key whose token can be drawn.
        """
        self.kernel, self.code, self.row, self.least = kernel, code, row, least
        logits, highest, _, *settings, tokens, probs, _, self.columns = fields
        temperature, min_p, self.top_k, top_p, seed, position = settings
        self.place = code.at(tokens, row, I32)
        first = code.mul(row, self.columns)
        self.logits, self.probs = (code.at(x, first, kernel.real) for x in (logits, probs))
        self.highest = code.read(highest, row, kernel.real)
        self.temperature, self.min_p, self.top_p = (
            self._widened(code.read(x, row, SETTING)) for x in (temperature, min_p, top_p)
        )
        words = code.at(seed, code.mul(row, const(2)), I32)
        self.seed = [code.read(words, const(nth), I32) for nth in (0, 1)]
        self.position = code.read(position, row, I32)

    def _widened(self, setting: Any) -> Any:
        real = self.kernel.real
        return setting if setting.type == real else self.code.fpext(setting, real)

    def draw(self) -> None:
        code, kernel = self.code, self.kernel
        kernel.for_each(code, const(0), self.columns, self._write_probability)
        code.store(ir.Constant(kernel.bits, 0), self.least)
        chosen = code.read(self.top_k, self.row, I32)
        count = code.smaller_int(code.sext(chosen, self.columns.type), self.columns)
        with code.if_then(code.icmp_signed(">", chosen, ir.Constant(I32, 0))):
            self._raise_least(self._unit, code.sitofp(count, kernel.real))
        with code.if_then(code.fcmp_ordered("<", self.top_p, ir.Constant(kernel.real, 1.0))):
            total = kernel.folded(code, self._kept, self.columns, 0.0, code.fadd, code.fadd)
            self._raise_least(self._kept, code.fmul(self.top_p, total))
        # The likeliest token stays, whatever rounding does to a setting.
        likeliest = code.extract_element(kernel.keys(code, code.splat(self.highest, 1)), const(0))
        least = code.load(self.least, typ=kernel.bits)
        is_less = code.icmp_unsigned("<", least, likeliest)
        code.store(code.select(is_less, least, likeliest), self.least)
        code.store(self._token(), self.place)

    def _write_probability(self, index: Any, lanes: int) -> None:
        code = self.code  # p = exp((logit - highest) / temperature), or zero below min_p
        # The difference comes first: a quotient of large logits and a small temperature may
        # overflow.
        below: Any = code.fsub(self._logits(index, lanes), code.splat(self.highest, lanes))
        zero = filled(below.type, 0.0)
        quotient = code.fdiv(below, code.splat(self.temperature, lanes))
        p = exp2(code, code.fmul(quotient, filled(below.type, LOG2_E)))
        is_likely = code.fcmp_ordered(">=", p, code.splat(self.min_p, lanes))
        stays = code.or_(is_likely, code.fcmp_ordered("==", below, zero))
        code.write_vector(code.select(stays, p, zero), self.probs, index)

    def _logits(self, index: Any, lanes: int) -> Any:
        return self.code.read_vector(self.logits, index, self.kernel.real, lanes)

    def _at_least(self, key: Any, index: Any, lanes: int) -> Any:
        keys = self.kernel.keys(self.code, self._logits(index, lanes))
        return self.code.icmp_unsigned(">=", keys, self.code.splat(key, lanes))

    def _kept(self, index: Any, lanes: int) -> Any:
        code = self.code  # the probabilities of tokens below the least key are zero
        p = code.read_vector(self.probs, index, self.kernel.real, lanes)
        stays = self._at_least(code.load(self.least, typ=self.kernel.bits), index, lanes)
        return code.select(stays, p, filled(p.type, 0.0))

    def _unit(self, index: Any, lanes: int) -> Any:
        return filled(ir.VectorType(self.kernel.real, lanes), 1.0)

    def _raise_least(self, mass: Vectors, target: Any) -> None:
        """Emit LLVM IR that raises the least key to the greatest t with mass(keys >= t) >= target.

        A key is an unsigned integer in the order of the logits. Tokens below the least key cannot
        be drawn. The least key never decreases. The search sets the bits of t from the highest to
        the lowest, so it is exact and needs no sort.

        Args:
            mass: function that emits IR for the mass of tokens, such as their probabilities.
            target: IR value of the mass to keep.
        """
        code, kernel = self.code, self.kernel
        none, unit = ir.Constant(kernel.bits, 0), ir.Constant(kernel.bits, 1)
        width = kernel.bits.width
        with code.loop(const(0), const(width), carry=[none]) as (step, greatest):
            shift: Any = code.sub(const(width - 1), step)
            shift = shift if kernel.bits == shift.type else code.trunc(shift, kernel.bits)
            trial = code.or_(greatest[0], code.shl(unit, shift))

            def reached(index: Any, lanes: int) -> Any:
                weight = mass(index, lanes)
                return code.select(
                    self._at_least(trial, index, lanes), weight, filled(weight.type, 0.0)
                )

            total = kernel.folded(code, reached, self.columns, 0.0, code.fadd, code.fadd)
            greatest[0] = code.select(code.fcmp_ordered(">=", total, target), trial, greatest[0])
        least = code.load(self.least, typ=kernel.bits)
        is_more = code.icmp_unsigned(">", greatest[0], least)
        code.store(code.select(is_more, greatest[0], least), self.least)

    def _token(self) -> Any:
        """Emit LLVM IR that draws a token of the row by its probability. Return the token, an i32.

        It is the token at which the cumulative probability passes u * total, for the row's random
        number u (inverse transform sampling), in two levels of sums.
        """
        code, real = self.code, self.kernel.real
        zero = ir.Constant(real, 0.0)
        with code.loop(const(0), self.columns, BLOCK, carry=[zero]) as (start, sums):
            sums[0] = code.fadd(sums[0], self._block_sum(start))
        total = sums[0]
        # Less than the total, even if the product rounds up to it: there is no token at the total.
        raw = code.bitcast(total, self.kernel.bits)
        lower = code.bitcast(code.sub(raw, ir.Constant(self.kernel.bits, 1)), real)
        lower = code.select(code.fcmp_ordered(">", total, zero), lower, zero)
        target = code.smaller(code.fmul(self._uniform(), total), lower)
        carry = [zero, zero, const(0)]  # sum so far, sum before the block, the block
        with code.loop(const(0), self.columns, BLOCK, carry=carry) as (start, values):
            reached = code.fadd(values[0], self._block_sum(start))
            is_before = code.fcmp_ordered("<=", reached, target)
            values[0] = reached
            values[1] = code.select(is_before, reached, values[1])
            values[2] = code.select(is_before, code.add(start, const(BLOCK)), values[2])
        _, before, begin = values
        # A row of zeros or NaN has no token to draw. Any token will do, because it is not used.
        begin = code.smaller_int(begin, code.sub(self.columns, const(1)))
        end = code.smaller_int(code.add(begin, const(BLOCK)), self.columns)
        rest = code.fsub(target, before)
        # Rounding may put the target at the end of the block. Then its last possible token is
        # drawn.
        with code.loop(begin, end, carry=[zero, begin, begin]) as (index, values):
            p = code.extract_element(self._kept(index, 1), const(0))
            values[0] = code.fadd(values[0], p)
            is_passed = code.fcmp_ordered("<=", values[0], rest)
            values[1] = code.select(is_passed, code.add(index, const(1)), values[1])
            values[2] = code.select(code.fcmp_ordered(">", p, zero), index, values[2])
        return code.trunc(code.smaller_int(values[1], values[2]), I32)

    def _block_sum(self, start: Any) -> Any:
        code = self.code
        end = code.smaller_int(code.add(start, const(BLOCK)), self.columns)

        def shifted(index: Any, lanes: int) -> Any:
            return self._kept(code.add(start, index), lanes)

        size = code.sub(end, start)
        return self.kernel.folded(code, shifted, size, 0.0, code.fadd, code.fadd)

    def _uniform(self) -> Any:
        # The number is jax.random.uniform(fold_in(key, position)).
        code, zero = self.code, ir.Constant(I32, 0)
        key = self._threefry(self.seed, [zero, self.position])
        high, low = self._threefry(key, [zero, zero])
        mantissa = code.lshr(code.xor(high, low), ir.Constant(I32, 9))
        number = code.bitcast(code.or_(mantissa, ir.Constant(I32, ONE)), SETTING)
        return self._widened(code.fsub(number, ir.Constant(SETTING, 1.0)))

    def _threefry(self, key: Sequence[Any], count: Sequence[Any]) -> list[Any]:
        """Emit LLVM IR that computes Threefry-2x32 with 20 rounds (Salmon et al., SC 2011).

        `key` and `count` are two i32 words each. Returns two i32 words, the random bits.
        """
        code = self.code
        words = [*key, code.xor(code.xor(*key), ir.Constant(I32, PARITY))]
        x, y = code.add(count[0], words[0]), code.add(count[1], words[1])
        for group in range(5):
            for rotation in ROTATIONS[group % 2]:
                x = code.add(x, y)
                turned = (ir.Constant(I32, rotation), ir.Constant(I32, 32 - rotation))
                y = code.xor(x, code.or_(code.shl(y, turned[0]), code.lshr(y, turned[1])))
            x = code.add(x, words[(group + 1) % 3])
            y = code.add(y, code.add(words[(group + 2) % 3], ir.Constant(I32, group + 1)))
        return [x, y]


def draw(logits: jax.Array, *others: jax.Array) -> jax.Array:
    """Sample a token for each row of logits [R,V] with the CPU kernel: i32[R].

    The `others` are highest, greedy, temperature, min_p, top_k, top_p, seed and position, as in
    ``pallas_kernels.draw`` and `DrawSettings`.
    """
    tokens = jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32)
    probs = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    kernel = Draw(np.dtype(logits.dtype).name)
    return jax.ffi.ffi_call(registered(kernel), [tokens, probs])(logits, *others)[0]
