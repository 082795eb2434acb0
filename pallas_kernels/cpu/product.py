"""Products with weights in panels, on CPU: read once, in order, at the memory's speed.

A weight of I inputs and O outputs lies as `[O / PANEL, I, PANEL]`: a panel holds PANEL outputs of
all inputs, one after the other, so a thread that computes them reads memory straight through. (In
the plain `[I, O]` order those outputs lie in pieces, each in another page of memory.) The sums of a
tile of rows stay in registers while a panel passes (Goto and van de Geijn 2008, with the weights
packed once). Every sum runs over the inputs in their order, so a row's result does not depend on
the rows beside it.

Weights of bfloat16 lie in pairs of inputs. Where x is bfloat16 too and the processor has dot
products of such pairs (AVX512-BF16), these are used: products are exact, the second of a pair is
added before the first, each addition rounds to float32, and subnormal numbers count as zeros.
Otherwise weights are widened, and products are added in the order of the inputs, rounded once.

How many rows count is an operand, for a batch is padded to one of few shapes: rows behind them are
not multiplied, and their results are zero.

Where each group of rows has a weight of its own (the experts of a mixture), the operand is how many
rows each group has. A part of the work takes the same panels of all of these weights, so that a few
rows are shared by all threads; a weight without rows is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.ffi import NAMES, Field, registered
from pallas_kernels.cpu.ir_builder import (
    I1,
    I32,
    I64,
    LINE,
    POINTER,
    VOID,
    Code,
    Host,
    const,
    element_bytes,
    filled,
    float_type,
    host,
    stored_type,
    widened,
)
from pallas_kernels.cpu.panels import PANEL, in_pairs

MOST_PARTS = 16
WORK_OF_A_PART = 1 << 16  # weights (or pairs) read, or an eighth of the products
TILES_OF_A_CHUNK = 8  # whose rows of x stay in the cache while the panels pass
INPUTS_OF_A_CHUNK = 1024  # or pairs of them
ROWS_TO_PREFETCH = 6  # from here on, the sums leave the processor no time to look ahead
AHEAD = 64  # inputs, or pairs of them


@dataclass(frozen=True)
class PanelProduct:
    """The kernel for one dtype of x and one of weights.

    Sums have x's dtype, float32 or float64; those of bfloat16, which only a host with `dots` has
    and only for weights of bfloat16, are float32.
    """

    x: str
    weights: str
    cpu: Host = field(default_factory=host)

    operands = 3

    @property
    def name(self) -> str:
        vectors = f"{self.cpu.registers}x{self.cpu.vector_bytes}"
        dots = "_dots" if self.cpu.dots else ""
        return f"{NAMES}product_{self.x}_{self.weights}_{vectors}{dots}"

    def __post_init__(self) -> None:
        """Raises ValueError for bfloat16 that this host cannot multiply."""
        if self.dots and not (self.cpu.dots and self.weights == "bfloat16"):
            raise ValueError(f"no product of {self.x} with {self.weights} on {self.cpu.name}")

    @property
    def dots(self) -> bool:
        """Whether pairs of bfloat16 are multiplied as they are."""
        return self.x == "bfloat16"

    @property
    def dtype(self) -> np.dtype:
        """Of the sums."""
        return np.dtype(np.float32 if self.dots else self.x)

    @property
    def read(self) -> ir.Type:
        """What is read of x at once: a number, or a pair of bfloat16."""
        return I32 if self.dots else float_type(self.dtype)

    @property
    def stored(self) -> ir.Type:
        """What a panel consists of: a weight, or a pair of them."""
        return I32 if in_pairs(self.weights) else stored_type(self.weights)

    @property
    def reads(self) -> int:
        """How many of what is read of x belong to one of what is stored."""
        return 2 if in_pairs(self.weights) and not self.dots else 1

    @property
    def sums(self) -> int:
        """How many vectors of them are held in registers; the others are for factors."""
        return self.cpu.registers * 3 // 4

    @property
    def fields(self) -> Sequence[Field]:
        """x, panels, each group's rows, y; rows, groups, inputs (or pairs), a weight's panels."""
        buffers = (Field(buffer) for buffer in range(self.operands + 1))
        return (*buffers, Field(0, 0), Field(1, 0), Field(1, 2), Field(1, 1))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        _, _, counts, _, rows, groups, inputs, panels = fields
        return parts_of(code, (counts, groups, rows), inputs, panels)

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        x, w, counts, y, rows, groups, inputs, panels = fields
        outputs = code.mul(panels, const(PANEL))
        first, last = (
            code.sdiv(code.mul(panels, at), parts) for at in (index, code.add(index, const(1)))
        )
        sizes = row_tiles(self.sums)
        tiles = {size: _tile(code.module, size, self) for size in sizes}

        with (
            each_group(code, counts, groups, rows) as (group, begin, ends),
            code.loop(begin, ends[0], sizes[0] * TILES_OF_A_CHUNK) as (chunk, _),
            code.loop(const(0), inputs, INPUTS_OF_A_CHUNK) as (k, _),
            code.loop(first, last) as (panel, _),
        ):
            end = code.smaller_int(code.add(chunk, const(sizes[0] * TILES_OF_A_CHUNK)), ends[0])
            count = code.smaller_int(code.sub(inputs, k), const(INPUTS_OF_A_CHUNK))
            at = code.mul(panel, const(PANEL))
            of_all = code.add(code.mul(group, panels), panel)
            here = code.at(w, place_in_panels(code, of_all, inputs, k), self.stored)
            below = code.at(here, code.mul(inputs, const(PANEL)), self.stored)
            row = chunk
            for size in sizes:
                with code.loop(row, code.sub(end, const(size - 1)), size) as (start, _):
                    nth = code.sdiv(code.sub(start, chunk), const(sizes[0]))
                    ahead = self._ahead(code, here, (panel, last), below, nth, count)
                    first_x = code.mul(code.add(code.mul(start, inputs), k), const(self.reads))
                    from_ = code.at(x, first_x, self.read)
                    to = code.at(y, code.add(code.mul(start, outputs), at), float_type(self.dtype))
                    begins = code.icmp_signed("==", k, const(0))
                    code.call(tiles[size], [from_, here, to, ahead, count, inputs, outputs, begins])
                whole = code.sdiv(code.sub(end, row), const(size))
                row = code.add(row, code.mul(whole, const(size)))
        lanes = self.cpu.vector_bytes // element_bytes(float_type(self.dtype))
        fill(code, y, (ends[0], rows), (first, last), outputs, float_type(self.dtype), lanes)

    def _ahead(self, code: Code, here: Any, panels: Any, below: Any, nth: Any, count: Any) -> Any:
        """Where tile `nth` of a chunk begins to ask for memory, a line for each input.

        The first two of full size ask for a half each of the panel below (of two lines an input),
        which they leave no time to read when its turn comes: memory would wait while the others
        compute. The rest ask for their own.
        """
        panel, last = panels
        half = code.mul(code.mul(nth, count), const(LINE // element_bytes(self.stored)))
        asks = code.and_(
            code.icmp_signed("<", code.add(panel, const(1)), last),
            code.icmp_signed("<", nth, const(2)),
        )
        return code.select(asks, code.at(below, half, self.stored), here)


@contextmanager
def each_group(
    code: Code, counts: Any, groups: Any, rows: Any, carry: Sequence[Any] = ()
) -> Iterator[tuple[Any, Any, list[Any]]]:
    """A loop over groups of rows, one behind the other: which it is, its first row, and a list.

    The list begins with the row behind its last, after the loop the one behind all groups; then
    comes what else is carried. A group has as many rows as the i32 of its own at `counts` says, at
    least none and at most those that are left of so many.
    """
    with code.loop(const(0), groups, carry=[const(0), *carry]) as (group, values):
        begin = values[0]
        count = code.larger_int(code.sext(code.read(counts, group, I32), I64), const(0))
        values[0] = code.add(begin, code.smaller_int(count, code.sub(rows, begin)))
        yield group, begin, values


def place_in_panels(code: Code, panel: Any, rows: Any, row: Any) -> Any:
    """Where a row of a panel begins, in panels of so many rows."""
    return code.mul(code.add(code.mul(panel, rows), row), const(PANEL))


def parts_of(code: Code, groups: tuple[Any, Any, Any], inputs: Any, panels: Any) -> Any:
    """Into how many parts a product is cut, each of some panels; `groups` as for `each_group`."""
    weights = code.mul(code.mul(inputs, panels), const(PANEL))
    with each_group(code, *groups, carry=[const(0)]) as (_, begin, values):
        eighth = code.ashr(code.add(code.sub(values[0], begin), const(7)), const(3))
        values[1] = code.add(values[1], eighth)
    work = code.sdiv(code.mul(weights, values[1]), const(WORK_OF_A_PART))
    parts = code.add(work, const(1))
    for limit in (const(MOST_PARTS), panels):
        parts = code.smaller_int(parts, limit)
    return parts


def fill(
    code: Code, y: Any, rows: Any, panels: Any, outputs: Any, real: ir.Type, lanes: int
) -> None:
    """Zeros in rows and panels of y, from the first to before the last of each."""
    zero = filled(ir.VectorType(real, lanes), 0.0)
    low, high = (code.mul(at, const(PANEL)) for at in panels)
    with code.loop(*rows) as (row, _), code.loop(low, high, lanes) as (at, _):
        code.write_vector(zero, y, code.add(code.mul(row, outputs), at))


def row_tiles(sums: int) -> list[int]:
    """Rows whose sums are held in registers at once, from the most to one.

    The most take two of so many vectors each: then reading x and weights are in balance.
    """
    return [sums // 2, *(size for size in (8, 4, 2, 1) if size < sums // 2)]


def columns_at_once(sums: int, size: int, vectors: int) -> list[range]:
    """The vectors of a panel that a tile of `size` rows passes over together, one pass each.

    A pass reads all inputs of its columns, so few rows take whole panels, to read them once.
    """
    width = vectors
    while size * width > sums:
        width //= 2
    return [range(at, at + width) for at in range(0, vectors, width)]


def _tile(module: ir.Module, size: int, kernel: PanelProduct) -> ir.Function:
    """tile(x, panel, y, ahead, count, inputs, outputs, begins).

    y[:size, :PANEL] += x[:size] @ panel, over `count` inputs; rows of x are `inputs` apart, those
    of y `outputs`. Where the sums begin, what y holds is not read as a number. Lines of memory from
    `ahead` on are asked for.
    """
    real, stored = float_type(kernel.dtype), kernel.stored
    lanes = kernel.cpu.vector_bytes // element_bytes(real)
    kind = ir.FunctionType(VOID, [POINTER] * 4 + [I64] * 3 + [I1])
    function = ir.Function(module, kind, f"tile_{size}")
    function.linkage = "internal"
    code = Code(function)
    x, w, y, ahead, count, inputs, outputs, begins = function.args
    between = code.mul(inputs, const(kernel.reads))
    rows = [code.at(x, code.mul(const(row), between), kernel.read) for row in range(size)]
    results = [code.at(y, code.mul(const(row), outputs), real) for row in range(size)]
    zero = filled(ir.VectorType(real, lanes), 0.0)
    line = LINE // element_bytes(stored)
    passes = columns_at_once(kernel.sums, size, PANEL // lanes)
    for nth_pass, columns in enumerate(passes):
        before = [
            code.select(begins, zero, code.read_vector(to, const(at * lanes), real, lanes))
            for to in results
            for at in columns
        ]
        with code.loop(const(0), count, carry=before) as (k, sums):
            here = code.at(w, code.mul(k, const(PANEL)), stored)
            all_k = code.add(k, code.mul(count, const(nth_pass)))
            asked = code.mul(code.sdiv(all_k, const(len(passes))), const(line))
            code.prefetch(code.at(ahead, asked, stored), 2)
            if size >= ROWS_TO_PREFETCH and nth_pass == 0:
                for at in range(0, PANEL, line):
                    code.prefetch(code.at(here, const(AHEAD * PANEL + at), stored))
            weights = [
                _factors(code, kernel, code.read_vector(here, const(at * lanes), stored, lanes))
                for at in columns
            ]
            for row in range(size):
                for nth in range(kernel.reads):
                    place = code.add(code.mul(k, const(kernel.reads)), const(nth))
                    value = code.splat(code.read(rows[row], place, kernel.read), lanes)
                    for at, factors in enumerate(weights):
                        to = row * len(columns) + at
                        sums[to] = _added(code, kernel, value, factors[nth], sums[to])
        for at, total in enumerate(sums):
            row, column = divmod(at, len(columns))
            code.write_vector(total, results[row], const(columns[column] * lanes))
    code.ret_void()
    return function


def _factors(code: Code, kernel: PanelProduct, stored: Any) -> Sequence[Any]:
    """What a vector of a panel multiplies with, for each of `kernel.reads`."""
    if kernel.dots:
        return (stored,)
    real = float_type(kernel.dtype)
    if not in_pairs(kernel.weights):
        return (widened(code, stored, real),)
    floats = ir.VectorType(ir.FloatType(), stored.type.count)
    halves = (
        code.shl(stored, filled(stored.type, 16)),
        code.and_(stored, filled(stored.type, 0xFFFF0000)),
    )
    return [widened(code, code.bitcast(half, floats), real) for half in halves]


def _added(code: Code, kernel: PanelProduct, value: Any, factor: Any, total: Any) -> Any:
    add = code.add_pair_products if kernel.dots else code.multiply_add
    return add(value, factor, total)


def kernel_for(x: np.dtype, weights: str, cpu: Host | None = None) -> PanelProduct:
    """The kernel for x and weights of these dtypes on a host, by default this one."""
    cpu = cpu or host()
    if not (cpu.dots and x.name == weights == "bfloat16"):
        x = np.promote_types(x, np.float32)
    return PanelProduct(x.name, weights, cpu)


def panel_product(
    x: jax.Array, panels: jax.Array, weights: str, num_rows: jax.Array | None = None
) -> jax.Array:
    """x times a weight in panels, or rows sorted by group each times the weight of its group.

    Args:
        x: [T, I], any float. It is taken as it is where it is bfloat16 and the processor multiplies
            that, else in at least float32.
        panels: of one weight, or [E, ...] of one for each group; see `panel_shape`.
        weights: their dtype.
        num_rows: i32[], rows from there on are zero. Of groups i32[E], needed: how many rows each
            has, one group behind the other; rows behind the last one are zero.

    Returns:
        [T, O]; it, and the sums, are of x's dtype, float32 at least.

    Raises:
        ValueError: naming the argument at fault and what is allowed.
    """
    return run(kernel_for(np.dtype(x.dtype), weights), x, panels, num_rows)


def run(
    kernel: PanelProduct, x: jax.Array, panels: jax.Array, num_rows: jax.Array | None = None
) -> jax.Array:
    """`panel_product` by this kernel."""
    inputs = -(-x.shape[1] // 2) if in_pairs(kernel.weights) else x.shape[1]
    panels, counts = grouped(x, panels, num_rows, inputs)
    name = registered(kernel)
    x = x.astype(kernel.x)
    if in_pairs(kernel.weights) and x.shape[1] % 2:
        x = jnp.pad(x, ((0, 0), (0, 1)))
    if kernel.dots:  # as bits: XLA on CPU may convert 16-bit floats as a whole
        x = jax.lax.bitcast_convert_type(x, jnp.uint16)
    shape = jax.ShapeDtypeStruct((x.shape[0], panels.shape[1] * PANEL), kernel.dtype)
    return jax.ffi.ffi_call(name, shape)(x, panels, counts)


def grouped(
    x: jax.Array, panels: jax.Array, num_rows: jax.Array | None, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Panels [E, P, rows, PANEL], and i32[E] for `num_rows`; those of one weight are one group.

    Raises:
        ValueError: they are not such, or counts are missing.
    """
    if panels.ndim not in (3, 4) or panels.shape[-2:] != (rows, PANEL):
        raise ValueError(
            f"panels have shape {panels.shape}; expected [P, {rows}, {PANEL}], or [E, P, {rows}, "
            f"{PANEL}] of groups, for x with {x.shape[1]} inputs"
        )
    if panels.ndim == 3:
        panels = panels[None]
        count = jnp.int32(x.shape[0]) if num_rows is None else num_rows
        return panels, count.astype(jnp.int32).reshape(1)
    if num_rows is None or num_rows.shape != panels.shape[:1] or num_rows.dtype != jnp.int32:
        got = "missing" if num_rows is None else f"{num_rows.dtype}{list(num_rows.shape)}"
        raise ValueError(f"num_rows are {got}; expected int32[{len(panels)}], of each group")
    return panels, num_rows
