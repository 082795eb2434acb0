"""Attention of one query per row over the paged KV cache, on CPU, at the speed of the memory.

The work is a list of (row, kv head) pairs. The tokens of a pair are processed in blocks of BLOCK
tokens: the scores of a block, the softmax so far (FlashAttention, Dao et al. 2022), then the
weighted sum of the block's values in registers. Every cached key and value is read once. Pages are
anywhere in memory, so the processor cannot predict the next address. While a page is computed, the
kernel prefetches the next one, also across the end of a block and of a pair.

Keys are transposed in registers, tokens side by side, so that the scores of several tokens are
summed at once. Every sum is over the tokens of one pair, in blocks that are counted from position
0. So the result of a row is the same to the bit for any other rows and any number of threads. The
last query of a longer row has the same result too, because its kernel (`cpu/ragged.py`) adds in
this order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.arithmetic import exp2, float_type, stored_type, tanh, widened
from pallas_kernels.cpu.ffi import NAMES
from pallas_kernels.cpu.handler import part_bounds
from pallas_kernels.cpu.ir_builder import (
    I32,
    I64,
    LINE,
    POINTER,
    Code,
    const,
    element_bytes,
    filled,
    internal,
)
from pallas_kernels.cpu.paged import BLOCK, SCALE, PagedCode, PagedKernel

MOST_PARTS = 64
WORK_OF_A_PART = 1 << 17  # numbers in keys
TOKENS_OF_A_PAIR = 16  # cost of a pair in addition to its tokens, in tokens
BYTES_AHEAD = 4096  # distance of the prefetched address
PAGES_FARTHER = 2  # a line further on is prefetched for its address translation


@dataclass(frozen=True)
class PagedDecode(PagedKernel):
    """CPU kernel (generator of LLVM IR) for attention of rows of one query over the paged KV cache.

    Its operands are q, k, v, page_table, kv_len, sinks, window, numbers, and the scales of int8
    pages.
    """

    # whether there are longer rows too, whose results exist already. Then `query_start` and these
    # results are the last two operands.
    among: bool = False

    prefix = f"{NAMES}decode_"
    plain_operands = 8

    @property
    def operands(self) -> int:
        return super().operands + 2 * self.among

    @property
    def name(self) -> str:
        return f"{super().name}{'_among' if self.among else ''}"

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        *_, rows, _, _, heads, _ = fields
        total = code.mul(_total(code, self, fields), heads)
        work = code.mul(total, const(self.head_dim))
        parts = code.add(code.sdiv(work, const(WORK_OF_A_PART)), const(1))
        return code.smaller_int(code.smaller_int(parts, const(MOST_PARTS)), code.mul(rows, heads))

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Emit LLVM IR that computes attention of the (row, kv head) pairs of part `index`.

        A part is an equal share of the tokens of all pairs and of TOKENS_OF_A_PAIR for each pair. A
        pair belongs to the part in which it begins. `fields` are IR values: the addresses and sizes
        of the operands and results.
        """
        q, k, v, table, _, sinks, _, numbers, *rest = fields
        *rest, out, rows, columns, pages, heads, _ = rest
        scales = rest[: 2 * self.is_scaled]
        real, stored = float_type(np.dtype(self.dtype)), stored_type(self.pages)
        query_type = stored_type(self.query_dtype)
        pair = _Pair(self).function(code.module)
        total = code.mul(_total(code, self, fields), heads)
        low, high = part_bounds(code, total, index, parts)
        size, piece = const(self.page_size), const(self.page_size * self.head_dim)
        queries = const(self.group * self.head_dim)
        with code.loop(const(0), rows, carry=[const(0)]) as (row, begin):
            first, stop = _seen(code, self, fields, row)
            token, is_single = _token(code, self, fields, row)
            tokens = code.add(code.sub(stop, first), const(TOKENS_OF_A_PAIR))
            row_table = code.at(table, code.mul(row, columns), I32)
            below = code.smaller_int(code.add(row, const(1)), code.sub(rows, const(1)))
            below_first, _ = _seen(code, self, fields, below)
            below_table = code.at(table, code.mul(below, columns), I32)
            with code.loop(const(0), heads) as (head, _):
                place = code.add(begin[0], code.mul(tokens, head))
                mine = code.and_(
                    code.icmp_signed(">=", place, low), code.icmp_signed("<", place, high)
                )
                if self.among:
                    mine = code.and_(mine, is_single)
                with code.if_then(mine):
                    more = code.icmp_signed("<", code.add(head, const(1)), heads)
                    after = code.select(more, code.add(head, const(1)), const(0))
                    entry = code.at(
                        code.select(more, row_table, below_table),
                        code.sdiv(code.select(more, first, below_first), const(self.page_size)),
                        I32,
                    )
                    pair_index = code.add(code.mul(token, heads), head)
                    where = code.mul(pair_index, queries)
                    offset = code.mul(head, piece)
                    code.call(
                        pair,
                        [
                            code.at(q, where, query_type),
                            code.at(k, offset, stored),
                            code.at(v, offset, stored),
                            row_table,
                            code.at(sinks, code.mul(head, const(self.group)), real),
                            numbers,
                            code.at(out, where, query_type),
                            entry,
                            code.at(k, code.mul(after, piece), stored),
                            first,
                            stop,
                            code.mul(heads, piece),
                            pages,
                            *(code.at(each, code.mul(head, size), SCALE) for each in scales),
                        ],
                    )
            begin[0] = code.add(begin[0], code.mul(tokens, heads))


def _seen(code: Code, kernel: PagedDecode, fields: Sequence[Any], row: Any) -> tuple[Any, Any]:
    lengths, window, columns = fields[4], fields[6], fields[-4]
    length = code.sext(code.read(lengths, row, I32), I64)
    length = code.larger_int(length, const(0))
    if kernel.among:
        _, is_single = _token(code, kernel, fields, row)
        length = code.select(is_single, length, const(0))
    length = code.smaller_int(length, code.mul(columns, const(kernel.page_size)))
    span = code.sext(code.load(window, typ=I32), I64)
    return code.larger_int(code.sub(length, span), const(0)), length


def _token(code: Code, kernel: PagedDecode, fields: Sequence[Any], row: Any) -> tuple[Any, Any]:
    if not kernel.among:
        return row, None
    starts, most = fields[8 + 2 * kernel.is_scaled], fields[-1]
    start, stop = (
        code.sext(code.read(starts, index, I32), I64) for index in (row, code.add(row, const(1)))
    )
    is_single = code.icmp_signed("==", code.sub(stop, start), const(1))
    # As an unsigned number, a negative token is very large.
    return start, code.and_(is_single, code.icmp_unsigned("<", start, most))


def _total(code: Code, kernel: PagedDecode, fields: Sequence[Any]) -> Any:
    with code.loop(const(0), fields[-5], carry=[const(0)]) as (row, sums):
        first, stop = _seen(code, kernel, fields, row)
        tokens = code.add(code.sub(stop, first), const(TOKENS_OF_A_PAIR))
        sums[0] = code.add(sums[0], tokens)
    return sums[0]


class _Pair(PagedCode):
    """Generator of the LLVM function that computes decode attention of one (row, kv head) pair."""

    def __init__(self, kernel: PagedDecode) -> None:
        """Choose the sizes of vectors and of transposed squares for a kernel on this host."""
        super().__init__(kernel)
        self.vectors = self.H // self.lanes
        size = element_bytes(self.stored)
        self.packed = math.gcd(self.vectors, element_bytes(self.real) // size)
        self.word = ir.IntType(8 * size * self.packed)  # a word holds several numbers of a key
        self.tokens = math.gcd(self.S, self.lanes)  # tokens of a square of words
        self.most_scores = self.cpu.registers // 2 - 2  # vectors of scores in registers
        # The sums of two squares are independent.
        two = self.S % (2 * self.tokens) == 0 and self.most_scores // 2 >= self.G
        self.squares = 2 if two else 1
        piece = self.S * self.H * size
        self.ahead = min(max(1, BYTES_AHEAD // piece), max(1, BLOCK // self.S))
        self.farther = self.ahead + PAGES_FARTHER

    def function(self, module: ir.Module) -> ir.Function:
        """Add the LLVM function "pair", attention of a (row, kv head) pair, to a module. Return it.

        Its arguments are q, k, v, table, sinks, numbers, out, next entry, next k, first, stop,
        stride, pages, and for int8 pages the scales of keys and of values. The addresses point to
        the row and head. The row sees the positions [first, stop). The next entry of the page table
        and the next k give the address of the first page of the next pair.
        """
        scales = [POINTER] * (2 * self.kernel.is_scaled)
        code, arguments = internal(module, "pair", [POINTER] * 9 + [I64] * 4 + scales)
        q, self.k, self.v, self.table, sinks, numbers, out, *others = arguments
        factor, self.cap = (code.read(numbers, const(nth), self.real) for nth in (0, 1))
        self.q = code.room(self.real, self.G * self.H)
        self.entry, self.next_k, self.first, self.stop, self.stride, self.pages = others[:6]
        self.scales = others[6:]
        self.scores = code.room(self.real, self.G * BLOCK)
        self.sums = code.room(self.real, self.G * self.H)
        self.tops, self.totals, self.shrinks = (code.room(self.real, self.G) for _ in range(3))
        self._begin(code, q, factor, sinks)
        start = code.mul(code.sdiv(self.first, const(BLOCK)), const(BLOCK))
        with code.loop(start, self.stop, BLOCK) as (block, _):
            end = code.smaller_int(code.add(block, const(BLOCK)), self.stop)
            begin = code.larger_int(block, self.first)
            self._scores(code, block, begin, end)
            self._softmax(code, code.sub(begin, block), code.sub(end, block))
            self._values(code, block, begin, end)
        self._finish(code, out)
        code.ret_void()
        return code.function

    def _begin(self, code: Code, q: Any, factor: Any, sinks: Any) -> None:
        """Emit LLVM IR that scales the queries by `factor`, and starts the softmax with the sinks.

        `q` and `sinks` are addresses. An absent sink is -inf. The sums of the values begin at zero.
        """
        factor = code.splat(factor, self.lanes)
        with code.loop(const(0), const(self.G * self.H), self.lanes) as (index, _):
            query = widened(
                code, code.read_vector(q, index, self.query_type, self.lanes), self.real
            )
            code.write_vector(code.fmul(query, factor), self.q, index)
        for g in range(self.G):
            sink = code.splat(code.read(sinks, const(g), self.real), 1)
            top = code.larger(filled(sink.type, self.lowest), sink)
            total = exp2(code, code.fsub(sink, top))
            code.write_vector(top, self.tops, const(g))
            code.write_vector(total, self.totals, const(g))
        zero = filled(ir.VectorType(self.real, self.lanes), 0.0)
        with code.loop(const(0), const(self.G * self.H), self.lanes) as (index, _):
            code.write_vector(zero, self.sums, index)

    def _prefetch_scales(self, code: Code, page: Any) -> None:
        # Prefetches the scales of a page's values, and of keys one block later.
        last = code.sdiv(code.sub(self.stop, const(1)), const(self.S))
        later = code.add(page, const(max(1, BLOCK // self.S)))
        code.prefetch(self._scales_of(code, 1, page))
        code.prefetch(self._scales_of(code, 0, code.smaller_int(later, last)))

    def _scales_of(self, code: Code, which: int, column: Any) -> Any:  # of keys (0) or values (1)
        return code.at(self.scales[which], self.scales_before(code, column), SCALE)

    def _after_key(self, code: Code, page: Any, first: Any, after: Any, distance: int) -> Any:
        # The keys of a block, in pages from `first` to before `after`, are followed by its values.
        later = code.add(page, const(distance))
        more = code.icmp_signed("<", later, after)
        last = code.sub(after, const(1))
        value = code.smaller_int(code.sub(later, code.sub(after, first)), last)
        entry = code.at(self.table, code.select(more, later, value), I32)
        return self.page(code, code.select(more, self.k, self.v), entry)

    def _after_value(self, code: Code, page: Any, after: Any, distance: int) -> Any:
        # The values of a block are followed by the keys of the next block, and the values of the
        # last block by the first keys of the next pair.
        later = code.add(page, const(distance))
        more = code.icmp_signed("<", later, after)
        ended = code.icmp_signed(">=", code.mul(later, const(self.S)), self.stop)
        entry = code.select(ended, self.entry, code.at(self.table, later, I32))
        base = code.select(ended, self.next_k, code.select(more, self.v, self.k))
        return self.page(code, base, entry)

    def _pages(self, code: Code, begin: Any, end: Any) -> tuple[Any, Any]:
        after = code.sdiv(code.add(end, const(self.S - 1)), const(self.S))
        return code.sdiv(begin, const(self.S)), after

    def _within(self, code: Code, page: Any, begin: Any, end: Any) -> tuple[Any, Any]:
        start = code.mul(page, const(self.S))
        low = code.larger_int(code.sub(begin, start), const(0))
        return low, code.smaller_int(code.sub(end, start), const(self.S))

    def _prefetch(self, code: Code, address: Any, start: Any, count: int) -> None:
        for offset in range(0, count, LINE // element_bytes(self.stored)):
            code.prefetch(code.at(address, code.add(start, const(offset)), self.stored))

    def _read(self, code: Code, address: Any, token: Any, vector: int) -> Any:
        place = code.add(code.mul(token, const(self.H)), const(vector * self.lanes))
        return self.numbers(code, code.read_vector(address, place, self.stored, self.lanes))

    def _scores(self, code: Code, block: Any, begin: Any, end: Any) -> None:
        """Emit LLVM IR that multiplies the queries by keys, and stores the scores.

        The keys are of the positions [begin, end) in the block of tokens that begins at `block`.
        The IR also prefetches pages.
        """
        first, after = self._pages(code, begin, end)
        step = self.squares * self.tokens
        with code.loop(first, after) as (page, _):
            keys = self.page(code, self.k, code.at(self.table, page, I32))
            ahead = self._after_key(code, page, first, after, self.ahead)
            code.prefetch(self._after_key(code, page, first, after, self.farther))
            scales = None
            if self.kernel.is_scaled:
                self._prefetch_scales(code, page)
                scales = self._scales_of(code, 0, page)
            low, high = self._within(code, page, begin, end)
            low = code.sub(low, code.srem(low, const(step)))
            place = code.sub(code.mul(page, const(self.S)), block)
            with code.loop(low, high, step) as (token, _):
                for queries in _groups(self.G, self.most_scores // self.squares):
                    scores = self._products(code, keys, ahead, token, queries)
                    for nth, vector in enumerate(scores):
                        square, which = divmod(nth, len(queries))
                        to = const(queries[which] * BLOCK + square * self.tokens)
                        to = code.add(code.add(place, token), to)
                        vector = code.lanes_of(vector, vector, range(self.tokens))
                        if scales is not None:
                            place_of_scale = code.add(token, const(square * self.tokens))
                            scale = code.read_vector(scales, place_of_scale, SCALE, self.tokens)
                            vector = code.fmul(vector, widened(code, scale, self.real))
                        code.write_vector(vector, self.scores, to)

    def _products(self, code: Code, keys: Any, ahead: Any, token: Any, queries: range) -> list[Any]:
        """Emit LLVM IR that multiplies some queries by the keys of a few tokens, from `token` on.

        Keys are read and transposed in squares: `tokens` tokens times as many words of a key as a
        vector has lanes. After transposition a vector has the same word of all tokens.

        Args:
            code: builder of the IR.
            keys: address of the page's keys.
            ahead: address of the page to prefetch.
            token: number of the first token in the page.
            queries: numbers of the queries.

        Returns:
            An IR vector with the scores of a square's tokens, for each square and query.
        """
        zero = filled(ir.VectorType(self.real, self.lanes), 0.0)
        sums = [zero] * (self.squares * len(queries))
        step = self.lanes * self.packed
        tokens = self.squares * self.tokens
        with code.loop(const(0), const(self.H), step, carry=sums) as (index, inner):
            if queries.start == 0:  # a few lines per turn, so that few are awaited at once
                start = code.add(code.mul(token, const(self.H)), code.mul(index, const(tokens)))
                self._prefetch(code, ahead, start, tokens * step)
            for square in range(self.squares):
                words = self._transposed(
                    code, keys, code.add(token, const(square * self.tokens)), index
                )
                numbers = (
                    self._unpacked(code, word, part)
                    for word in words
                    for part in range(self.packed)
                )
                for nth, key in enumerate(numbers):
                    for which, g in enumerate(queries, square * len(queries)):
                        place = code.add(index, const(g * self.H + nth))
                        query = code.splat(code.read(self.q, place, self.real), self.lanes)
                        inner[which] = code.multiply_add(query, key, inner[which])
        return inner

    def _transposed(self, code: Code, keys: Any, token: Any, number: Any) -> list[Any]:
        size = element_bytes(self.stored)

        def read(row: int, first: int, count: int) -> Any:
            if row >= self.tokens:
                return filled(ir.VectorType(self.word, count), 0)
            place = code.add(code.mul(code.add(token, const(row)), const(self.H)), number)
            address = code.at(keys, code.add(place, const(first * self.packed)), self.stored)
            return code.read_vector(address, const(0), self.word, count, align=size)

        return code.columns(read, element_bytes(self.word), self.lanes)

    def _unpacked(self, code: Code, words: Any, part: int) -> Any:
        size = 8 * element_bytes(self.stored)
        bits = ir.VectorType(ir.IntType(size), self.lanes)
        if part:
            words = code.lshr(words, filled(words.type, size * part))
        if bits != words.type:
            words = code.trunc(words, bits)
        stored = ir.VectorType(self.stored, self.lanes)
        return self.numbers(code, code.bitcast(words, stored))

    def _softmax(self, code: Code, begin: Any, end: Any) -> None:
        """Emit LLVM IR that turns scores [begin, end) of a block of tokens into softmax weights.

        It also updates the maxima and totals of the online softmax, and stores the factors
        `shrinks` for the sums so far. Scores outside [begin, end) become zero, or are not read.
        """
        kind = ir.VectorType(self.real, self.width)
        nothing, zero = filled(kind, -math.inf), filled(kind, 0.0)
        whole = ir.VectorType(I64, self.width)
        lane = ir.Constant(whole, list(range(self.width)))
        start = code.sub(begin, code.srem(begin, const(self.width)))
        begins, ends = (code.splat(bound, self.width) for bound in (begin, end))
        cap = code.splat(self.cap, self.width)
        with code.loop(const(0), const(self.G)) as (g, _):
            row = code.at(self.scores, code.mul(g, const(BLOCK)), self.real)
            old = code.splat(code.read(self.tops, g, self.real), self.width)
            with code.loop(start, end, self.width, carry=[old]) as (index, tops):
                scores = code.read_vector(row, index, self.real, self.width)
                if self.kernel.capped:
                    scores = code.fmul(tanh(code, scores), cap)
                place = code.add(code.splat(index, self.width), lane)
                seen = code.and_(
                    code.icmp_signed(">=", place, begins), code.icmp_signed("<", place, ends)
                )
                scores = code.select(seen, scores, nothing)
                code.write_vector(scores, row, index)
                tops[0] = code.larger(tops[0], scores)
            peak = code.lane_max(tops[0])
            top = code.splat(peak, self.width)
            with code.loop(start, end, self.width, carry=[zero]) as (index, sums):
                scores = code.read_vector(row, index, self.real, self.width)
                weights = exp2(code, code.fsub(scores, top))
                code.write_vector(weights, row, index)
                sums[0] = code.fadd(sums[0], weights)
            shrink = exp2(code, code.fsub(old, top))
            shrink = code.extract_element(shrink, ir.Constant(I32, 0))
            total = code.fmul(code.read(self.totals, g, self.real), shrink)
            code.store(peak, code.at(self.tops, g, self.real))
            code.store(shrink, code.at(self.shrinks, g, self.real))
            total = code.fadd(total, code.lane_sum(sums[0]))
            code.store(total, code.at(self.totals, g, self.real))

    def _values(self, code: Code, block: Any, begin: Any, end: Any) -> None:
        """Emit LLVM IR that adds the values of a block of tokens, times their weights, to the sums.

        The IR first rescales the attention sums of earlier blocks by `shrinks`.

        Args:
            code: builder of the IR.
            block: position of the first token of the block.
            begin, end: positions [begin, end) of the tokens to add.
        """
        first, after = self._pages(code, begin, end)
        for queries in _groups(self.G, self.cpu.registers * 3 // 4 // self.vectors):
            places = [
                g * self.H + column for g in queries for column in range(0, self.H, self.lanes)
            ]
            shrinks = [
                code.splat(code.read(self.shrinks, const(g), self.real), self.lanes)
                for g in queries
            ]
            before = [
                code.fmul(
                    code.read_vector(self.sums, const(place), self.real, self.lanes),
                    shrinks[nth // self.vectors],
                )
                for nth, place in enumerate(places)
            ]
            with code.loop(first, after, carry=before) as (page, sums):
                values = self.page(code, self.v, code.at(self.table, page, I32))
                ahead = self._after_value(code, page, after, self.ahead)
                code.prefetch(self._after_value(code, page, after, self.farther))
                low, high = self._within(code, page, begin, end)
                start = code.sub(code.mul(page, const(self.S)), block)
                scales = self._scales_of(code, 1, page) if self.kernel.is_scaled else None
                with code.loop(low, high, carry=sums) as (token, inner):
                    if queries.start == 0:
                        self._prefetch(code, ahead, code.mul(token, const(self.H)), self.H)
                    value = [self._read(code, values, token, nth) for nth in range(self.vectors)]
                    scale = None
                    if scales is not None:
                        scale = code.read_vector(scales, token, SCALE, 1)
                        scale = widened(code, scale, self.real)
                        scale = code.extract_element(scale, ir.Constant(I32, 0))
                    for nth, g in enumerate(queries):
                        which = code.add(code.add(start, token), const(g * BLOCK))
                        weight = code.read(self.scores, which, self.real)
                        if scale is not None:
                            weight = code.fmul(weight, scale)
                        weight = code.splat(weight, self.lanes)
                        for vector, part in enumerate(value):
                            to = nth * self.vectors + vector
                            inner[to] = code.multiply_add(weight, part, inner[to])
                sums[:] = inner
            for place, total in zip(places, sums, strict=True):
                code.write_vector(total, self.sums, const(place))

    def _finish(self, code: Code, out: Any) -> None:
        with code.loop(const(0), const(self.G)) as (g, _):
            total = self.divisor(code, g)
            for vector in range(self.vectors):
                place = code.add(code.mul(g, const(self.H)), const(vector * self.lanes))
                sums = code.read_vector(self.sums, place, self.real, self.lanes)
                self.kernel.stored(code, code.fdiv(sums, total), out, place)


def _groups(count: int, size: int) -> list[range]:
    size = max(1, size)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]
