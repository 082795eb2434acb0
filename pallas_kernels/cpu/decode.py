"""Decode attention over pages, on CPU: every cached key and value is read once, as fast as memory.

The work is a list of (row, kv head) pairs. A pair's tokens pass in blocks: scores of a block, the
softmax so far (FlashAttention, Dao et al. 2022), then the weighted sum of the block's values, held
in registers. Pages lie anywhere, so the processor cannot guess where the next one is; while one is
computed, the kernel asks for the next, past the end of a block and of a pair too.

Keys are turned in registers, tokens side by side: a score is added up number by number. Every sum
is over a pair's own tokens in blocks counted from position 0: a row's result is the same to the bit
whatever rows are beside it and however many threads share the work. It is that of the last query of
a longer row, too, whose kernel (`cpu/ragged.py`) adds in this order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels import xla
from pallas_kernels.arguments import NO_OPTIONS, AttentionOptions
from pallas_kernels.cpu.ffi import NAMES, Field, registered
from pallas_kernels.cpu.ir_builder import (
    I32,
    I64,
    LINE,
    LOG2_E,
    POINTER,
    VOID,
    Code,
    const,
    element_bytes,
    filled,
    float_type,
    host,
    stored_type,
    widened,
)

BLOCK = 64  # tokens
MOST_PARTS = 64
WORK_OF_A_PART = 1 << 17  # numbers in keys
TOKENS_OF_A_PAIR = 16  # what a pair costs besides its tokens
BYTES_AHEAD = 4096
PAGES_FARTHER = 2  # whose first line is asked for, so that their translation is known in time
ENDLESS = 2**31 - 1


@dataclass(frozen=True)
class PagedKernel:
    """For pages [., K, page_size, head_dim] and `group` query heads per kv head.

    Attributes:
        dtype: of queries, sums and results: "float32" or "float64".
        pages: of keys and values: those, "bfloat16", "float16", or "uint8", float8's bits.
        page_size: tokens.
        group: query heads per kv head.
        head_dim: numbers.
        capped: whether scores are soft-capped.
    """

    dtype: str
    pages: str
    page_size: int
    group: int
    head_dim: int
    capped: bool

    prefix: ClassVar[str]

    @property
    def name(self) -> str:
        kind = f"{self.dtype}_{self.pages}_{self.page_size}_{self.group}_{self.head_dim}"
        return f"{self.prefix}{kind}{'_capped' if self.capped else ''}"


@dataclass(frozen=True)
class PagedDecode(PagedKernel):
    """One query a row."""

    prefix = f"{NAMES}decode_"
    operands = 8

    @property
    def fields(self) -> Sequence[Field]:
        """q, k, v, page_table, kv_len, sinks, window, cap, out; R, M, P, K."""
        buffers = (Field(buffer) for buffer in range(self.operands + 1))
        return (*buffers, Field(3, 0), Field(3, 1), Field(1, 0), Field(1, 1))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        *_, rows, _, _, heads = fields
        total = code.mul(_total(code, self, fields), heads)
        work = code.mul(total, const(self.head_dim))
        parts = code.add(code.sdiv(work, const(WORK_OF_A_PART)), const(1))
        return code.smaller_int(code.smaller_int(parts, const(MOST_PARTS)), code.mul(rows, heads))

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """The pairs that begin in this part of all tokens of all heads."""
        q, k, v, table, _, sinks, _, cap, out, rows, columns, pages, heads = fields
        real, stored = float_type(np.dtype(self.dtype)), stored_type(self.pages)
        pair = _Pair(self).function(code.module)
        total = code.mul(_total(code, self, fields), heads)
        low, high = (
            code.sdiv(code.mul(total, at), parts) for at in (index, code.add(index, const(1)))
        )
        piece = const(self.page_size * self.head_dim)
        queries = const(self.group * self.head_dim)
        with code.loop(const(0), rows, carry=[const(0)]) as (row, begin):
            first, stop = _seen(code, self, fields, row)
            tokens = code.add(code.sub(stop, first), const(TOKENS_OF_A_PAIR))
            own = code.at(table, code.mul(row, columns), I32)
            below = code.smaller_int(code.add(row, const(1)), code.sub(rows, const(1)))
            below_first, _ = _seen(code, self, fields, below)
            below_table = code.at(table, code.mul(below, columns), I32)
            with code.loop(const(0), heads) as (head, _):
                at = code.add(begin[0], code.mul(tokens, head))
                mine = code.and_(code.icmp_signed(">=", at, low), code.icmp_signed("<", at, high))
                with code.if_then(mine):
                    more = code.icmp_signed("<", code.add(head, const(1)), heads)
                    after = code.select(more, code.add(head, const(1)), const(0))
                    entry = code.at(
                        code.select(more, own, below_table),
                        code.sdiv(code.select(more, first, below_first), const(self.page_size)),
                        I32,
                    )
                    which = code.add(code.mul(row, heads), head)
                    where = code.mul(which, queries)
                    offset = code.mul(head, piece)
                    code.call(
                        pair,
                        [
                            code.at(q, where, real),
                            code.at(k, offset, stored),
                            code.at(v, offset, stored),
                            own,
                            code.at(sinks, code.mul(head, const(self.group)), real),
                            cap,
                            code.at(out, where, real),
                            entry,
                            code.at(k, code.mul(after, piece), stored),
                            first,
                            stop,
                            code.mul(heads, piece),
                            pages,
                        ],
                    )
            begin[0] = code.add(begin[0], code.mul(tokens, heads))


def _seen(code: Code, kernel: PagedDecode, fields: Sequence[Any], row: Any) -> tuple[Any, Any]:
    """The first position that a row sees, and the one behind the last."""
    lengths, window, columns = fields[4], fields[6], fields[10]
    length = code.sext(code.read(lengths, row, I32), I64)
    length = code.larger_int(length, const(0))
    length = code.smaller_int(length, code.mul(columns, const(kernel.page_size)))
    span = code.sext(code.load(window, typ=I32), I64)
    return code.larger_int(code.sub(length, span), const(0)), length


def _total(code: Code, kernel: PagedDecode, fields: Sequence[Any]) -> Any:
    """Tokens of all rows of one head, and what a pair costs besides."""
    with code.loop(const(0), fields[9], carry=[const(0)]) as (row, sums):
        first, stop = _seen(code, kernel, fields, row)
        tokens = code.add(code.sub(stop, first), const(TOKENS_OF_A_PAIR))
        sums[0] = code.add(sums[0], tokens)
    return sums[0]


class _Pair:
    """The function that does one pair."""

    def __init__(self, kernel: PagedDecode) -> None:
        self.kernel = kernel
        self.real = float_type(np.dtype(kernel.dtype))
        self.stored = stored_type(kernel.pages)
        self.S, self.G, self.H = kernel.page_size, kernel.group, kernel.head_dim
        self.cpu = host()
        most = self.cpu.vector_bytes // element_bytes(self.real)
        self.lanes = math.gcd(self.H, most)  # of keys and values
        self.vectors = self.H // self.lanes
        self.width = most  # lanes of scores
        size = element_bytes(self.stored)
        self.packed = math.gcd(self.vectors, element_bytes(self.real) // size)
        self.word = ir.IntType(8 * size * self.packed)  # of several numbers of a key
        self.tokens = math.gcd(self.S, self.lanes)  # of a square of words
        self.most_scores = self.cpu.registers // 2 - 2  # vectors of them in registers
        two = self.S % (2 * self.tokens) == 0 and self.most_scores // 2 >= self.G
        self.squares = 2 if two else 1  # whose sums do not wait for one another
        piece = self.S * self.H * size
        self.ahead = min(max(1, BYTES_AHEAD // piece), max(1, BLOCK // self.S))
        self.farther = self.ahead + PAGES_FARTHER

    def function(self, module: ir.Module) -> ir.Function:
        """pair(q, k, v, table, sinks, cap, out, next entry, next k, first, stop, stride, pages).

        Addresses are those of the row and head. The next two say where the next pair's first page
        is found.
        """
        kind = ir.FunctionType(VOID, [POINTER] * 9 + [I64] * 4)
        function = ir.Function(module, kind, "pair")
        function.linkage = "internal"
        code = Code(function)
        self.q, self.k, self.v, self.table, sinks, self.cap, out, *others = function.args
        self.entry, self.next_k, self.first, self.stop, self.stride, self.pages = others
        self.scores = code.room(self.real, self.G * BLOCK)
        self.sums = code.room(self.real, self.G * self.H)
        self.tops, self.totals, self.shrinks = (code.room(self.real, self.G) for _ in range(3))
        self._begin(code, sinks)
        start = code.mul(code.sdiv(self.first, const(BLOCK)), const(BLOCK))
        with code.loop(start, self.stop, BLOCK) as (block, _):
            end = code.smaller_int(code.add(block, const(BLOCK)), self.stop)
            begin = code.larger_int(block, self.first)
            self._scores(code, block, begin, end)
            self._softmax(code, code.sub(begin, block), code.sub(end, block))
            self._values(code, block, begin, end)
        self._finish(code, out)
        code.ret_void()
        return function

    def _begin(self, code: Code, sinks: Any) -> None:
        """Softmax over nothing but the sinks, of which an absent one is -inf; sums of nothing."""
        lowest = float(np.finfo(self.kernel.dtype).min)
        for g in range(self.G):
            sink = code.splat(code.read(sinks, const(g), self.real), 1)
            top = code.larger(filled(sink.type, lowest), sink)
            total = code.exp2(code.fsub(sink, top))
            code.write_vector(top, self.tops, const(g))
            code.write_vector(total, self.totals, const(g))
        zero = filled(ir.VectorType(self.real, self.lanes), 0.0)
        with code.loop(const(0), const(self.G * self.H), self.lanes) as (at, _):
            code.write_vector(zero, self.sums, at)

    def _page(self, code: Code, base: Any, entry: Any) -> Any:
        """The address of a page whose number lies at `entry`; page 0 for one that is none."""
        page = code.zext(code.load(entry, typ=I32), I64)
        page = code.select(code.icmp_unsigned("<", page, self.pages), page, const(0))
        return code.at(base, code.mul(page, self.stride), self.stored)

    def _after_key(self, code: Code, at: Any, page: Any, after: Any, distance: int) -> Any:
        """Address of what is read `distance` pages after the keys of page `at` of a block."""
        later = code.add(at, const(distance))
        more = code.icmp_signed("<", later, after)
        last = code.sub(after, const(1))
        value = code.smaller_int(code.sub(later, code.sub(after, page)), last)
        entry = code.at(self.table, code.select(more, later, value), I32)
        return self._page(code, code.select(more, self.k, self.v), entry)

    def _after_value(self, code: Code, at: Any, after: Any, distance: int) -> Any:
        """The same of its values; behind the last of them, the next pair's first keys."""
        later = code.add(at, const(distance))
        more = code.icmp_signed("<", later, after)
        ended = code.icmp_signed(">=", code.mul(later, const(self.S)), self.stop)
        entry = code.select(ended, self.entry, code.at(self.table, later, I32))
        base = code.select(ended, self.next_k, code.select(more, self.v, self.k))
        return self._page(code, base, entry)

    def _pages(self, code: Code, begin: Any, end: Any) -> tuple[Any, Any]:
        """The pages that hold the tokens from `begin` to before `end`, from and to before."""
        after = code.sdiv(code.add(end, const(self.S - 1)), const(self.S))
        return code.sdiv(begin, const(self.S)), after

    def _within(self, code: Code, page: Any, begin: Any, end: Any) -> tuple[Any, Any]:
        """Which tokens of a page lie from `begin` to before `end`, from and to before."""
        start = code.mul(page, const(self.S))
        low = code.larger_int(code.sub(begin, start), const(0))
        return low, code.smaller_int(code.sub(end, start), const(self.S))

    def _look_ahead(self, code: Code, address: Any, start: Any, count: int) -> None:
        """Ask for so many numbers from number `start` of a page on."""
        for at in range(0, count, LINE // element_bytes(self.stored)):
            code.prefetch(code.at(address, code.add(start, const(at)), self.stored))

    def _read(self, code: Code, address: Any, token: Any, vector: int) -> Any:
        at = code.add(code.mul(token, const(self.H)), const(vector * self.lanes))
        return widened(code, code.read_vector(address, at, self.stored, self.lanes), self.real)

    def _scores(self, code: Code, block: Any, begin: Any, end: Any) -> None:
        """Products of the queries with the keys of a block."""
        page, after = self._pages(code, begin, end)
        step = self.squares * self.tokens
        with code.loop(page, after) as (at, _):
            keys = self._page(code, self.k, code.at(self.table, at, I32))
            ahead = self._after_key(code, at, page, after, self.ahead)
            code.prefetch(self._after_key(code, at, page, after, self.farther))
            low, high = self._within(code, at, begin, end)
            low = code.sub(low, code.srem(low, const(step)))
            place = code.sub(code.mul(at, const(self.S)), block)
            with code.loop(low, high, step) as (token, _):
                for some in _groups(self.G, self.most_scores // self.squares):
                    scores = self._products(code, keys, ahead, token, some)
                    for nth, vector in enumerate(scores):
                        square, which = divmod(nth, len(some))
                        to = const(some[which] * BLOCK + square * self.tokens)
                        to = code.add(code.add(place, token), to)
                        vector = code.lanes_of(vector, vector, range(self.tokens))
                        code.write_vector(vector, self.scores, to)

    def _products(self, code: Code, keys: Any, ahead: Any, token: Any, queries: range) -> list[Any]:
        """Of the keys of some squares with some queries: a vector for each square and query.

        Squares hold words of the keys; turned, a vector has the same word of all tokens.
        """
        zero = filled(ir.VectorType(self.real, self.lanes), 0.0)
        sums = [zero] * (self.squares * len(queries))
        step = self.lanes * self.packed
        tokens = self.squares * self.tokens
        with code.loop(const(0), const(self.H), step, carry=sums) as (at, inner):
            if queries.start == 0:  # a part in each turn: the processor waits for few at once
                start = code.add(code.mul(token, const(self.H)), code.mul(at, const(tokens)))
                self._look_ahead(code, ahead, start, tokens * step)
            for square in range(self.squares):
                words = self._turned(code, keys, code.add(token, const(square * self.tokens)), at)
                numbers = (
                    self._unpacked(code, word, part)
                    for word in words
                    for part in range(self.packed)
                )
                for nth, key in enumerate(numbers):
                    for which, g in enumerate(queries, square * len(queries)):
                        place = code.add(at, const(g * self.H + nth))
                        query = code.splat(code.read(self.q, place, self.real), self.lanes)
                        inner[which] = code.multiply_add(query, key, inner[which])
        return inner

    def _turned(self, code: Code, keys: Any, token: Any, number: Any) -> list[Any]:
        """Words of the keys of a square from `number` on: of each, those of all tokens."""
        size = element_bytes(self.stored)

        def read(row: int, first: int, count: int) -> Any:
            if row >= self.tokens:
                return filled(ir.VectorType(self.word, count), 0)
            at = code.add(code.mul(code.add(token, const(row)), const(self.H)), number)
            address = code.at(keys, code.add(at, const(first * self.packed)), self.stored)
            return code.read_vector(address, const(0), self.word, count, align=size)

        return code.columns(read, element_bytes(self.word), self.lanes)

    def _unpacked(self, code: Code, words: Any, part: int) -> Any:
        """Number `part` of each word."""
        size = 8 * element_bytes(self.stored)
        bits = ir.VectorType(ir.IntType(size), self.lanes)
        if part:
            words = code.lshr(words, filled(words.type, size * part))
        if bits != words.type:
            words = code.trunc(words, bits)
        stored = ir.VectorType(self.stored, self.lanes)
        return widened(code, code.bitcast(words, stored), self.real)

    def _softmax(self, code: Code, begin: Any, end: Any) -> None:
        """Scores from `begin` to `end` of a block become weights; others zero, or are not read."""
        kind = ir.VectorType(self.real, self.width)
        nothing, zero = filled(kind, -math.inf), filled(kind, 0.0)
        whole = ir.VectorType(I64, self.width)
        lane = ir.Constant(whole, list(range(self.width)))
        start = code.sub(begin, code.srem(begin, const(self.width)))
        begins, ends = (code.splat(at, self.width) for at in (begin, end))
        cap = code.splat(code.load(self.cap, typ=self.real), self.width)
        with code.loop(const(0), const(self.G)) as (g, _):
            row = code.at(self.scores, code.mul(g, const(BLOCK)), self.real)
            old = code.splat(code.read(self.tops, g, self.real), self.width)
            with code.loop(start, end, self.width, carry=[old]) as (at, tops):
                scores = code.read_vector(row, at, self.real, self.width)
                if self.kernel.capped:
                    scores = code.fmul(code.tanh(scores), cap)
                place = code.add(code.splat(at, self.width), lane)
                seen = code.and_(
                    code.icmp_signed(">=", place, begins), code.icmp_signed("<", place, ends)
                )
                scores = code.select(seen, scores, nothing)
                code.write_vector(scores, row, at)
                tops[0] = code.larger(tops[0], scores)
            peak = code.lane_max(tops[0])
            top = code.splat(peak, self.width)
            with code.loop(start, end, self.width, carry=[zero]) as (at, sums):
                scores = code.read_vector(row, at, self.real, self.width)
                weights = code.exp2(code.fsub(scores, top))
                code.write_vector(weights, row, at)
                sums[0] = code.fadd(sums[0], weights)
            shrink = code.exp2(code.fsub(old, top))
            shrink = code.extract_element(shrink, ir.Constant(I32, 0))
            total = code.fmul(code.read(self.totals, g, self.real), shrink)
            code.store(peak, code.at(self.tops, g, self.real))
            code.store(shrink, code.at(self.shrinks, g, self.real))
            total = code.fadd(total, code.lane_sum(sums[0]))
            code.store(total, code.at(self.totals, g, self.real))

    def _values(self, code: Code, block: Any, begin: Any, end: Any) -> None:
        """Adds the block's values, by their weights, to the sums so far."""
        page, after = self._pages(code, begin, end)
        for some in _groups(self.G, self.cpu.registers * 3 // 4 // self.vectors):
            places = [g * self.H + at for g in some for at in range(0, self.H, self.lanes)]
            shrinks = [
                code.splat(code.read(self.shrinks, const(g), self.real), self.lanes) for g in some
            ]
            before = [
                code.fmul(
                    code.read_vector(self.sums, const(at), self.real, self.lanes),
                    shrinks[nth // self.vectors],
                )
                for nth, at in enumerate(places)
            ]
            with code.loop(page, after, carry=before) as (at, sums):
                values = self._page(code, self.v, code.at(self.table, at, I32))
                ahead = self._after_value(code, at, after, self.ahead)
                code.prefetch(self._after_value(code, at, after, self.farther))
                low, high = self._within(code, at, begin, end)
                place = code.sub(code.mul(at, const(self.S)), block)
                with code.loop(low, high, carry=sums) as (token, inner):
                    if some.start == 0:
                        self._look_ahead(code, ahead, code.mul(token, const(self.H)), self.H)
                    value = [self._read(code, values, token, at) for at in range(self.vectors)]
                    for nth, g in enumerate(some):
                        which = code.add(code.add(place, token), const(g * BLOCK))
                        weight = code.read(self.scores, which, self.real)
                        weight = code.splat(weight, self.lanes)
                        for vector, part in enumerate(value):
                            to = nth * self.vectors + vector
                            inner[to] = code.multiply_add(weight, part, inner[to])
                sums[:] = inner
            for at, total in zip(places, sums, strict=True):
                code.write_vector(total, self.sums, const(at))

    def _finish(self, code: Code, out: Any) -> None:
        zero, one = (ir.Constant(self.real, value) for value in (0.0, 1.0))
        with code.loop(const(0), const(self.G)) as (g, _):
            total = code.read(self.totals, g, self.real)
            total = code.select(code.fcmp_ordered("==", total, zero), one, total)
            total = code.splat(total, self.lanes)
            for vector in range(self.vectors):
                at = code.add(code.mul(g, const(self.H)), const(vector * self.lanes))
                sums = code.read_vector(self.sums, at, self.real, self.lanes)
                code.write_vector(code.fdiv(sums, total), out, at)


def _groups(count: int, size: int) -> list[range]:
    """0 to `count` in ranges of `size`, at least 1."""
    size = max(1, size)
    return [range(at, min(at + size, count)) for at in range(0, count, size)]


def attend(
    kind: type[PagedKernel],
    q: jax.Array,
    kv_pages: xla.Pages,
    rows: tuple[jax.Array, ...],
    options: AttentionOptions,
) -> jax.Array:
    """Call a kernel of this kind; `rows` are the arrays that say where each row's pages are."""
    _, K, G, H = q.shape
    scale, window, cap = options.score_scale(H), options.window, options.soft_cap
    page_size = kv_pages[0].shape[2]
    kernel: Any = kind(q.dtype.name, kv_pages[0].dtype.name, page_size, G, H, cap is not None)
    sinks = jnp.full(K * G, -jnp.inf) if options.sinks is None else options.sinks
    # The kernel knows powers of 2: what it is given is that of exp() times log2(e).
    call = jax.ffi.ffi_call(registered(kernel), jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(
        q * (scale * LOG2_E if cap is None else scale / cap),
        *kv_pages,
        *rows,
        sinks.astype(q.dtype) * LOG2_E,
        np.array([ENDLESS if window is None else min(window, ENDLESS)], np.int32),
        np.array([0.0 if cap is None else cap * LOG2_E], q.dtype),
    )


def decode(
    q: jax.Array,
    kv_pages: xla.Pages,
    page_table: jax.Array,
    kv_len: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """One query a row; see `xla.Decode`."""
    return attend(PagedDecode, q, kv_pages, (page_table, kv_len), options)


def paged_decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_len: jax.Array,
    options: AttentionOptions = NO_OPTIONS,
) -> jax.Array:
    """Compute ``pallas_kernels.paged_decode_attention``: [R,N,H]."""
    return xla.paged_decode_attention(
        q, k_pages, v_pages, page_table, kv_len, options, decode=decode
    )
