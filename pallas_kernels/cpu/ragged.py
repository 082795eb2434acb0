"""Causal attention of rows of many queries over pages, on CPU: tiles of queries, blocks of keys.

This is FlashAttention-2 (Dao 2023) for one processor. The unit of work is a (row, tile of queries,
kv head). A block of keys is gathered from its pages, transposed, and multiplied with all queries of
the tile. Its values follow. Products are computed as in BLIS (Van Zee, van de Geijn 2015): sums of
a few queries times a few vectors stay in registers.

Every sum runs over the tokens of one query in their order, in blocks that are counted from position
0. So a result is the same to the bit for any other rows and wherever a prompt was cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from llvmlite import ir

from pallas_kernels.cpu.arithmetic import exp2, stored_type, tanh, widened
from pallas_kernels.cpu.ffi import NAMES
from pallas_kernels.cpu.handler import part_bounds
from pallas_kernels.cpu.ir_builder import (
    I32,
    I64,
    POINTER,
    Code,
    const,
    element_bytes,
    filled,
    internal,
)
from pallas_kernels.cpu.paged import BLOCK, SCALE, PagedCode, PagedKernel

TILE = 96  # queries times heads of a tile
MOST_PARTS = 64
UNROLLED = 4  # unrolled turns of the loop of a product
WORK_OF_A_PART = 1 << 21  # products


@dataclass(frozen=True)
class PagedTiles(PagedKernel):
    """CPU kernel (generator of LLVM IR) for attention of rows of two queries or more, in tiles.

    Its operands are q, k, v, page_table, query_start, kv_len, sinks, window, numbers, and the
    scales of int8 pages.
    """

    prefix = f"{NAMES}tiles_"
    plain_operands = 9
    fewest: ClassVar[int] = 2  # queries of a row, fewer are left to another kernel
    rows_at_once: ClassVar[int] = 6  # rows of a product whose sums are in registers

    @property
    def queries(self) -> int:
        """Number of tokens whose queries form a tile (of `group` query heads)."""
        return max(1, TILE // self.group)

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        total = code.mul(_total(code, self, fields), const(self.group * self.head_dim))
        parts = code.add(code.sdiv(total, const(WORK_OF_A_PART)), const(1))
        return code.smaller_int(parts, const(MOST_PARTS))

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Emit LLVM IR that computes attention of the tiles of queries that begin in part `index`.

        A part is an equal share of the products of all tiles. Part 0 also writes zeros to padding
        tokens. `fields` are IR values: the addresses and sizes of the operands and results.
        """
        rows, heads = fields[-5], fields[-2]
        tile = self.tile().function(code.module)
        with code.if_then(code.icmp_signed("==", index, const(0))):
            self._clear_padding(code, fields)
        total = _total(code, self, fields)
        low, high = part_bounds(code, total, index, parts)
        place = code.room(I64)
        code.store(const(0), place)
        with code.loop(const(0), rows) as (row, _):
            start, count, before = _row(code, self, fields, row)
            with code.loop(const(0), count, self.queries) as (nth, _):
                number, first, stop = _span(code, self, fields, count, before, nth)
                work = _work(code, number, first, stop)
                with code.loop(const(0), heads) as (head, _):
                    begin = code.load(place, typ=I64)
                    code.store(code.add(begin, work), place)
                    mine = code.and_(
                        code.icmp_signed(">=", begin, low), code.icmp_signed("<", begin, high)
                    )
                    with code.if_then(mine):
                        token = code.add(start, nth)
                        position = code.add(before, nth)
                        numbers = [row, head, token, number, position, first, stop]
                        code.call(tile, [*fields, *numbers])

    def tile(self) -> PagedTile:
        """Return the generator of the function that computes attention of a tile."""
        return PagedTile(self)

    @property
    def value_size(self) -> int:
        """Numbers of a value and of a result, the first ones of a cell."""
        return self.head_dim

    def _clear_padding(self, code: Code, fields: Sequence[Any]) -> None:
        starts, out, (rows, *_, heads, most) = fields[4], fields[-6], fields[-5:]
        end = code.larger_int(code.sext(code.read(starts, rows, I32), I64), const(0))
        size = code.mul(heads, const(self.group * self.value_size))
        zero = filled(ir.VectorType(stored_type(self.query_dtype), 1), 0)
        with code.loop(code.mul(end, size), code.mul(most, size)) as (index, _):
            code.write_vector(zero, out, index)


def _row(code: Code, kernel: PagedTiles, fields: Sequence[Any], row: Any) -> tuple[Any, Any, Any]:
    # The first token of a row, its number of queries (0 if it has too few), and its first
    # position.
    starts, lengths, columns, most = fields[4], fields[5], fields[-4], fields[-1]
    start, stop = (
        code.smaller_int(
            code.larger_int(code.sext(code.read(starts, index, I32), I64), const(0)), most
        )
        for index in (row, code.add(row, const(1)))
    )
    count = code.sub(stop, start)
    length = code.sext(code.read(lengths, row, I32), I64)
    length = code.smaller_int(length, code.mul(columns, const(kernel.page_size)))
    before = code.sub(length, count)
    return (
        start,
        code.select(code.icmp_signed(">", count, const(kernel.fewest - 1)), count, const(0)),
        before,
    )


def _span(
    code: Code, kernel: PagedTiles, fields: Sequence[Any], count: Any, before: Any, nth: Any
) -> tuple[Any, Any, Any]:
    # The number of queries of the tile that begins with query `nth`, the first position that it
    # sees, and the position after the last.
    number = code.smaller_int(code.sub(count, nth), const(kernel.queries))
    span = code.sext(code.load(fields[7], typ=I32), I64)
    position = code.add(before, nth)
    first = code.larger_int(code.sub(code.add(position, const(1)), span), const(0))
    return number, first, code.larger_int(code.add(position, number), const(0))


def _work(code: Code, number: Any, first: Any, stop: Any) -> Any:
    return code.mul(number, code.add(code.sub(stop, first), const(BLOCK)))


def _total(code: Code, kernel: PagedTiles, fields: Sequence[Any]) -> Any:
    with code.loop(const(0), fields[-5], carry=[const(0)]) as (row, sums):
        _, count, before = _row(code, kernel, fields, row)
        with code.loop(const(0), count, kernel.queries, carry=sums) as (nth, inner):
            work = _work(code, *_span(code, kernel, fields, count, before, nth))
            inner[0] = code.add(inner[0], work)
        sums[:] = inner
    return code.mul(sums[0], fields[-2])


class PagedTile(PagedCode):
    """Generator of the LLVM function that computes attention of a query tile of one kv head.

    Where `shared` is true, all heads read the same cells as keys and, in part, as values.
    """

    shared: ClassVar[bool] = False

    def __init__(self, kernel: PagedTiles) -> None:
        super().__init__(kernel)
        self.most_vectors = 4 if self.cpu.registers >= 32 else 2
        self.at_once, self.V = kernel.rows_at_once, kernel.value_size
        self.lanes = math.gcd(self.lanes, self.V)
        self.rows = -(-kernel.queries * self.G // self.at_once) * self.at_once

    def function(self, module: ir.Module) -> ir.Function:
        """Add the LLVM function "tile" to a module, and return it.

        It computes attention of a tile of queries and stores it. Its arguments are the fields of
        the kernel, then row, head, token, queries, position, first, stop. `token` and `position`
        are of the first query. The tile sees the positions from `first` to before `stop`.
        """
        kinds = [POINTER if field.size is None else I64 for field in self.kernel.fields]
        code, arguments = internal(module, "tile", [*kinds, *[I64] * 7])
        buffers = self.kernel.operands + 1
        q, k, v, table, _, _, sinks, window, numbers, *scales, out = arguments[:buffers]
        sizes = arguments[buffers:]
        _, columns, self.pages, heads, _, row, head, token, self.number, *rest = sizes
        self.position, self.first, self.stop = rest
        self.count = code.mul(self.number, const(self.G))
        self.span = code.sext(code.load(window, typ=I32), I64)
        self.factor = code.splat(code.read(numbers, const(0), self.real), self.lanes)
        self.cap = code.splat(code.read(numbers, const(1), self.real), self.width)
        piece = const(self.S * self.H)
        if self.shared:
            self.stride, self.k, self.v = piece, k, v
        else:
            self.stride = code.mul(heads, piece)
            self.k, self.v = (code.at(x, code.mul(head, piece), self.stored) for x in (k, v))
        self.table = code.at(table, code.mul(row, columns), I32)
        self.between = code.mul(heads, const(self.G * self.H))  # distance of consecutive queries
        here = code.mul(head, const(self.G * self.H))
        where = result = code.add(code.mul(token, self.between), here)
        self.apart = self.between  # distance of consecutive results
        if self.V != self.H:
            self.apart = code.mul(heads, const(self.G * self.V))
            here = code.mul(head, const(self.G * self.V))
            result = code.add(code.mul(token, self.apart), here)
        self.queries = code.room(self.real, self.rows * self.H)
        self.sums = code.room(self.real, self.rows * self.V)
        self.scores = code.room(self.real, self.rows * BLOCK)
        self.gathered, self.transposed = (code.room(self.real, BLOCK * self.H) for _ in range(2))
        self.tops, self.totals, self.shrinks = (code.room(self.real, self.rows) for _ in range(3))
        if not self.shared:
            scales = [code.at(each, code.mul(head, const(self.S)), SCALE) for each in scales]
        self.scales = [code.room(self.real, BLOCK) for _ in scales]
        products = [
            self._product(
                module, "scores", BLOCK // self.width, self.width, self.H, (BLOCK, BLOCK)
            ),
            self._product(
                module, "values", self.V // self.lanes, self.lanes, BLOCK, (self.H, self.V)
            ),
        ]
        self._begin(
            code,
            code.at(q, where, self.query_type),
            code.at(sinks, code.mul(head, const(self.G)), self.real),
        )
        start = code.mul(code.sdiv(self.first, const(BLOCK)), const(BLOCK))
        with code.loop(start, self.stop, BLOCK) as (block, _):
            for source, target in zip(scales, self.scales, strict=True):
                self._gather_scales(code, source, target, block)
            self._gather(code, self.k, block)
            self._transpose(code)
            with code.loop(const(0), self.count, self.at_once) as (m, _):
                self._ahead(code, block, m)
                a = code.at(self.queries, code.mul(m, const(self.H)), self.real)
                c = code.at(self.scores, code.mul(m, const(BLOCK)), self.real)
                code.call(products[0], [a, self.transposed, c, const(self.H), self.shrinks])
            if not self.shared:
                self._gather(code, self.v, block)
            self._softmax(code, block)
            depth = code.smaller_int(code.sub(self.stop, block), const(BLOCK))
            with code.loop(const(0), self.count, self.at_once) as (m, _):
                a = code.at(self.scores, code.mul(m, const(BLOCK)), self.real)
                c = code.at(self.sums, code.mul(m, const(self.V)), self.real)
                shrinks = code.at(self.shrinks, m, self.real)
                code.call(products[1], [a, self.gathered, c, depth, shrinks])
        self._finish(code, code.at(out, result, self.query_type))
        code.ret_void()
        return code.function

    def _begin(self, code: Code, q: Any, sinks: Any) -> None:
        """Emit LLVM IR that gathers a tile's scaled queries, and starts the softmax with the sinks.

        `q` and `sinks` are addresses. An absent sink is -inf. The sums of the values begin at zero.
        """
        zero = filled(ir.VectorType(self.real, self.lanes), 0.0)
        last = const(self.rows * self.H)
        end = code.mul(self.count, const(self.H))
        with code.loop(end, last, self.lanes) as (index, _):
            code.write_vector(zero, self.queries, index)
        last = const(self.rows * self.V)
        with code.loop(const(0), last, self.lanes) as (index, _):
            code.write_vector(zero, self.sums, index)
        scalar = ir.VectorType(self.real, 1)
        with code.loop(const(0), const(self.rows)) as (m, _):
            code.write_vector(filled(scalar, 0.0), self.shrinks, m)
        size = const(self.G * self.H)
        with code.loop(const(0), self.number) as (i, _):
            source = code.at(q, code.mul(i, self.between), self.query_type)
            target = code.at(self.queries, code.mul(i, size), self.real)
            with code.loop(const(0), size, self.lanes) as (index, _):
                query = code.read_vector(source, index, self.query_type, self.lanes)
                query = code.fmul(widened(code, query, self.real), self.factor)
                code.write_vector(query, target, index)
            with code.loop(const(0), const(self.G)) as (g, _):
                m = code.add(code.mul(i, const(self.G)), g)
                sink = code.splat(code.read(sinks, g, self.real), 1)
                top = code.larger(filled(scalar, self.lowest), sink)
                code.write_vector(top, self.tops, m)
                code.write_vector(exp2(code, code.fsub(sink, top)), self.totals, m)

    def _ahead(self, code: Code, block: Any, m: Any) -> None:
        """Emit prefetches of a share of the next block, between two products. Here there are none.

        `block` is the position of the first token, and `m` the first row of the next product.
        """

    def _gather(self, code: Code, base: Any, block: Any) -> None:
        """Emit LLVM IR that gathers the keys or values of a block of tokens from their pages.

        The IR writes numbers of the type of the sums to `self.gathered`, zero for tokens that the
        tile does not see. `base` is the address of the first page, and `block` the position of the
        first token.
        """
        begin = code.larger_int(self.first, block)
        end = code.smaller_int(self.stop, code.add(block, const(BLOCK)))
        zero = filled(ir.VectorType(self.real, self.lanes), 0.0)
        spans = (const(0), code.sub(begin, block)), (code.sub(end, block), const(BLOCK))
        for low, high in spans:
            low, high = (code.mul(bound, const(self.H)) for bound in (low, high))
            with code.loop(low, high, self.lanes) as (index, _):
                code.write_vector(zero, self.gathered, index)
        after = code.sdiv(code.add(end, const(self.S - 1)), const(self.S))
        with code.loop(code.sdiv(begin, const(self.S)), after) as (column, _):
            start = code.mul(column, const(self.S))
            source = self.page(code, base, code.at(self.table, column, I32))
            low = code.larger_int(code.sub(begin, start), const(0))
            high = code.smaller_int(code.sub(end, start), const(self.S))
            target = code.mul(code.sub(start, block), const(self.H))
            target = code.at(self.gathered, target, self.real)
            low, high = (code.mul(bound, const(self.H)) for bound in (low, high))
            with code.loop(low, high, self.lanes) as (index, _):
                vector = code.read_vector(source, index, self.stored, self.lanes)
                code.write_vector(self.numbers(code, vector), target, index)

    def _gather_scales(self, code: Code, base: Any, target: Any, block: Any) -> None:
        """Emit LLVM IR that copies the scales of a block of tokens to address `target`.

        They are scales of int8 keys or values, at address `base`, and zero for tokens that the tile
        does not see. `block` is the position of the first token.
        """
        begin = code.larger_int(self.first, block)
        end = code.smaller_int(self.stop, code.add(block, const(BLOCK)))
        zero = filled(ir.VectorType(self.real, self.width), 0.0)
        with code.loop(const(0), const(BLOCK), self.width) as (index, _):
            code.write_vector(zero, target, index)
        with code.loop(begin, end) as (position, _):
            column = code.sdiv(position, const(self.S))
            before = self.scales_before(code, column)
            place = code.add(before, code.srem(position, const(self.S)))
            scale = widened(code, code.read_vector(base, place, SCALE, 1), self.real)
            code.write_vector(scale, target, code.sub(position, block))

    def _transpose(self, code: Code) -> None:
        """Emit LLVM IR that transposes the gathered keys of a block, [BLOCK, H], to [H, BLOCK]."""
        n = self.lanes
        with (
            code.loop(const(0), const(BLOCK), n) as (token, _),
            code.loop(const(0), const(self.H), n) as (h, _),
        ):

            def read(row: int, first: int, count: int, token: Any = token, h: Any = h) -> Any:
                place = code.add(code.mul(code.add(token, const(row)), const(self.H)), h)
                place = code.add(place, const(first))
                return code.read_vector(self.gathered, place, self.real, count)

            for i, column in enumerate(code.columns(read, element_bytes(self.real), n)):
                place = code.add(code.mul(code.add(h, const(i)), const(BLOCK)), token)
                code.write_vector(column, self.transposed, place)

    def _product(
        self,
        module: ir.Module,
        name: str,
        vectors: int,
        lanes: int,
        across: int,
        strides: tuple[int, int],
    ) -> ir.Function:
        """Add a function (a, b, c, depth, shrinks) to a module, c = c * shrinks + a @ b. Return it.

        a is [rows, across], of which the first `depth` columns are used, for `at_once` rows. A row
        of b and c has `vectors` vectors of `lanes` lanes, and `strides` are the distances of rows
        of b and of c. The function "scores" ignores `shrinks` and the previous contents of c.
        """
        columns, apart = strides
        code, arguments = internal(module, name, [POINTER, POINTER, POINTER, I64, POINTER])
        a, b, c, depth, shrinks = arguments
        zero = filled(ir.VectorType(self.real, lanes), 0.0)
        for begin in range(0, vectors, self.most_vectors):
            pass_vectors = range(begin, min(begin + self.most_vectors, vectors))
            places = [
                row * apart + vector * lanes
                for row in range(self.at_once)
                for vector in pass_vectors
            ]
            sums = [zero] * len(places)
            if name == "values":
                sums = [
                    code.fmul(
                        code.read_vector(c, const(place), self.real, lanes),
                        code.splat(code.read(shrinks, const(place // apart), self.real), lanes),
                    )
                    for place in places
                ]

            def turn(_: int, k: Any, inner: list[Any], pass_vectors: range = pass_vectors) -> None:
                start = code.mul(k, const(columns))
                row_of_b = [
                    code.read_vector(b, code.add(start, const(vector * lanes)), self.real, lanes)
                    for vector in pass_vectors
                ]
                for row in range(self.at_once):
                    factor = code.read(a, code.add(k, const(row * across)), self.real)
                    factor = code.splat(factor, lanes)
                    for nth, vector in enumerate(row_of_b):
                        to = row * len(pass_vectors) + nth
                        inner[to] = code.multiply_add(factor, vector, inner[to])

            inner = code.unrolled_loop(depth, UNROLLED, sums, turn)
            for place, total in zip(places, inner, strict=True):
                code.write_vector(total, c, const(place))
        code.ret_void()
        return code.function

    def _softmax(self, code: Code, block: Any) -> None:
        """Emit LLVM IR that turns the scores of a block of tokens into softmax weights.

        Weights of tokens that a query does not see are zero. The IR also updates the maxima and
        totals of the online softmax, and stores the factors `shrinks` for the sums so far.
        """
        kind = ir.VectorType(self.real, self.width)
        nothing, zero = filled(kind, -math.inf), filled(kind, 0.0)
        whole = ir.IntType(8 * element_bytes(self.real))
        numbers = ir.VectorType(whole, self.width)
        edge = const(2 * BLOCK)  # any bound beyond the block is the same
        with (
            code.loop(const(0), self.number) as (i, _),
            code.loop(const(0), const(self.G)) as (g, _),
        ):
            m = code.add(code.mul(i, const(self.G)), g)
            stop = code.sub(code.add(code.add(self.position, i), const(1)), block)
            first = code.smaller_int(code.larger_int(code.sub(stop, self.span), const(0)), edge)
            stop = code.smaller_int(code.larger_int(stop, const(0)), edge)
            if whole != I64:
                first, stop = (code.trunc(bound, whole) for bound in (first, stop))
            first, stop = (code.splat(bound, self.width) for bound in (first, stop))
            row = code.at(self.scores, code.mul(m, const(BLOCK)), self.real)
            old = code.splat(code.read(self.tops, m, self.real), self.width)
            top, scores = old, []
            for start in range(0, BLOCK, self.width):
                score = code.read_vector(row, const(start), self.real, self.width)
                if self.scales:
                    scale = code.read_vector(self.scales[0], const(start), self.real, self.width)
                    score = code.fmul(score, scale)
                if self.kernel.capped:
                    score = code.fmul(tanh(code, score), self.cap)
                lane = ir.Constant(numbers, list(range(start, start + self.width)))
                seen = code.and_(
                    code.icmp_signed("<=", first, lane), code.icmp_signed(">", stop, lane)
                )
                scores.append(code.select(seen, score, nothing))
                top = code.larger(top, scores[-1])
            peak = code.lane_max(top)
            top = code.splat(peak, self.width)
            total = zero
            for nth, score in enumerate(scores):
                weights = exp2(code, code.fsub(score, top))
                total = code.fadd(total, weights)
                place = const(nth * self.width)
                if self.scales:
                    scale = code.read_vector(self.scales[1], place, self.real, self.width)
                    weights = code.fmul(weights, scale)
                code.write_vector(weights, row, place)
            shrink = exp2(code, code.fsub(old, top))
            shrink = code.extract_element(shrink, ir.Constant(I32, 0))
            code.store(peak, code.at(self.tops, m, self.real))
            code.store(shrink, code.at(self.shrinks, m, self.real))
            to = code.at(self.totals, m, self.real)
            before = code.fmul(code.load(to, typ=self.real), shrink)
            code.store(code.fadd(before, code.lane_sum(total)), to)

    def _finish(self, code: Code, out: Any) -> None:
        with (
            code.loop(const(0), self.number) as (i, _),
            code.loop(const(0), const(self.G)) as (g, _),
        ):
            m = code.add(code.mul(i, const(self.G)), g)
            total = self.divisor(code, m)
            source = code.at(self.sums, code.mul(m, const(self.V)), self.real)
            target = code.add(code.mul(i, self.apart), code.mul(g, const(self.V)))
            target = code.at(out, target, self.query_type)
            with code.loop(const(0), const(self.V), self.lanes) as (index, _):
                sums = code.read_vector(source, index, self.real, self.lanes)
                self.kernel.stored(code, code.fdiv(sums, total), target, index)
