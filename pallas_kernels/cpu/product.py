"""Products with weights in panels, on CPU: weights are read once, in order, at the memory's speed.

A weight of I inputs and O outputs is stored as `[O / PANEL, I, PANEL]`: a panel holds PANEL outputs
of all inputs, input after input, so a thread that computes them reads memory sequentially. (In the
plain `[I, O]` order those outputs lie in pieces, each in another page of memory.) The sums of a
tile of rows stay in registers during the loop over a panel (Goto and van de Geijn 2008, with the
weights packed once). Every sum runs over the inputs in their order, so a row's result does not
depend on the other rows.

Weights of bfloat16 are stored in pairs of inputs. If x is bfloat16 too and the processor has dot
products of such pairs (AVX512-BF16), the kernel uses them: products are exact, the second of a pair
is added before the first, each addition rounds to float32, and subnormal numbers count as zeros.
Otherwise weights are widened, and products are added in the order of the inputs, rounded once.

The number of rows that count is an operand, because a batch is padded to one of few shapes: later
rows are not multiplied, and their results are zero.

If each group of rows has a weight of its own (the experts of a mixture), the operand is the number
of rows of each group. A part of the work takes the same panels of all of these weights, so that all
threads share a few rows; a weight without rows is not read.
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

from pallas_kernels.cpu.ffi import NAMES, Field, part_bounds, registered
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
TILES_OF_A_CHUNK = 8  # their rows of x stay in the cache during the loop over panels
INPUTS_OF_A_CHUNK = 1024  # or pairs of them
ROWS_TO_PREFETCH = 6  # from so many rows on, the processor does not read ahead by itself
AHEAD = 64  # inputs, or pairs of them, that prefetches are ahead
UNROLLED = 4  # turns of the loop over inputs that are written in a row


@dataclass(frozen=True)
class PanelProduct:
    """Kernel for a dtype of x and a dtype of weights.

    Sums have x's dtype, float32 or float64; those of bfloat16, which only a host with `dots` has
    and only for weights of bfloat16, are float32.
    """

    x: str
    weights: str
    cpu: Host = field(default_factory=host)

    operands = 3

    @property
    def name(self) -> str:
        """Name of the operation."""
        dots = "_dots" if self.cpu.dots else ""
        return f"{NAMES}product_{self.x}_{self.weights}_{self.cpu.vectors}{dots}"

    def __post_init__(self) -> None:
        """Raise ValueError for bfloat16 that this host cannot multiply."""
        if self.dots and not (self.cpu.dots and self.weights == "bfloat16"):
            raise ValueError(f"no product of {self.x} with {self.weights} on {self.cpu.name}")

    @property
    def dots(self) -> bool:
        """Whether pairs of bfloat16 are multiplied without widening."""
        return self.x == "bfloat16"

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the sums."""
        return np.dtype(np.float32 if self.dots else self.x)

    @property
    def read(self) -> ir.Type:
        """Type of a read of x: a number, or a pair of bfloat16."""
        return I32 if self.dots else float_type(self.dtype)

    @property
    def stored(self) -> ir.Type:
        """Type of a panel's elements: a weight, or a pair of weights."""
        return I32 if in_pairs(self.weights) else stored_type(self.weights)

    @property
    def reads(self) -> int:
        """Number of reads of x for an element of a panel."""
        return 2 if in_pairs(self.weights) and not self.dots else 1

    @property
    def sums(self) -> int:
        """Number of vectors of sums in registers; the other registers are for factors."""
        return self.cpu.registers * 3 // 4

    @property
    def fields(self) -> Sequence[Field]:
        """Arguments: x, panels, each group's rows, y; then sizes.

        The sizes are rows, groups, inputs (or pairs), a weight's panels.
        """
        buffers = (Field(buffer) for buffer in range(self.operands + 1))
        return (*buffers, Field(0, 0), Field(1, 0), Field(1, 2), Field(1, 1))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        """Generate the number of parts."""
        _, _, counts, _, rows, groups, inputs, panels = fields
        return parts_of(code, (counts, groups, rows), inputs, panels)

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Generate part `index`'s panels of all groups, then zeros in rows that do not count.

        The loops are over groups, chunks of rows, chunks of inputs, panels, and tiles of rows.
        """
        x, w, counts, y, rows, groups, inputs, panels = fields
        outputs = code.mul(panels, const(PANEL))
        first, last = part_bounds(code, panels, index, parts)
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
            column = code.mul(panel, const(PANEL))
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
                    to = code.at(
                        y, code.add(code.mul(start, outputs), column), float_type(self.dtype)
                    )
                    begins = code.icmp_signed("==", k, const(0))
                    code.call(tiles[size], [from_, here, to, ahead, count, inputs, outputs, begins])
                whole = code.sdiv(code.sub(end, row), const(size))
                row = code.add(row, code.mul(whole, const(size)))
        lanes = self.cpu.vector_bytes // element_bytes(float_type(self.dtype))
        fill(code, y, (ends[0], rows), (first, last), outputs, float_type(self.dtype), lanes)

    def _ahead(self, code: Code, here: Any, panels: Any, below: Any, nth: Any, count: Any) -> Any:
        """Return the first address that tile `nth` of a chunk prefetches, a line for each input.

        The first two tiles of full size prefetch a half each of the panel below, which has two
        lines an input; otherwise memory would be idle while the chunk's other tiles compute. Those
        prefetch their own panel.
        """
        panel, last = panels
        half = code.mul(code.mul(nth, count), const(LINE // element_bytes(self.stored)))
        is_below = code.and_(
            code.icmp_signed("<", code.add(panel, const(1)), last),
            code.icmp_signed("<", nth, const(2)),
        )
        return code.select(is_below, code.at(below, half, self.stored), here)


@contextmanager
def each_group(
    code: Code, counts: Any, groups: Any, rows: Any, carry: Sequence[Any] = ()
) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Generate a loop over consecutive groups of rows; the body is the `with` block.

    A group has as many rows as its i32 in `counts`, limited to 0 and to the rows left of `rows`.

    Yields:
        The group, its first row, and a list: the row after its last (after the loop, the row after
        all groups), then the values of `carry`.
    """
    with code.loop(const(0), groups, carry=[const(0), *carry]) as (group, values):
        begin = values[0]
        count = code.larger_int(code.sext(code.read(counts, group, I32), I64), const(0))
        values[0] = code.add(begin, code.smaller_int(count, code.sub(rows, begin)))
        yield group, begin, values


def place_in_panels(code: Code, panel: Any, rows: Any, row: Any) -> Any:
    """Return the element at which a row of a panel begins, in panels of so many rows."""
    return code.mul(code.add(code.mul(panel, rows), row), const(PANEL))


def parts_of(code: Code, groups: tuple[Any, Any, Any], inputs: Any, panels: Any) -> Any:
    """Return the number of parts of a product, each of whole panels.

    `groups` are counts, groups and rows as in `each_group`.
    """
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
    """Write zeros to rows and panels of y, each given as the first and the one after the last."""
    zero = filled(ir.VectorType(real, lanes), 0.0)
    low, high = (code.mul(panel, const(PANEL)) for panel in panels)
    with code.loop(*rows) as (row, _), code.loop(low, high, lanes) as (column, _):
        code.write_vector(zero, y, code.add(code.mul(row, outputs), column))


def row_tiles(sums: int) -> list[int]:
    """Return the sizes of tiles whose sums fit `sums` vectors in registers, from largest to 1.

    A row of the largest has two vectors of sums: then reads of x and of weights are in balance.
    """
    return [sums // 2, *(size for size in (8, 4, 2, 1) if size < sums // 2)]


def columns_at_once(sums: int, size: int, vectors: int) -> list[range]:
    """Split a panel's vectors into passes of a tile of `size` rows, whose sums fit in registers.

    A pass reads all inputs of its columns, so that tiles of few rows read whole panels once.
    """
    width = vectors
    while size * width > sums:
        width //= 2
    return [range(start, start + width) for start in range(0, vectors, width)]


def _tile(module: ir.Module, size: int, kernel: PanelProduct) -> ir.Function:
    """Generate a function of (x, panel, y, ahead, count, inputs, outputs, begins).

    y[:size, :PANEL] += x[:size] @ panel, over `count` inputs; rows of x are `inputs` apart, those
    of y `outputs`. If the sums begin (`begins`), the contents of y are replaced. Lines of memory
    from `ahead` on are prefetched.
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
            code.select(begins, zero, code.read_vector(result, const(vector * lanes), real, lanes))
            for result in results
            for vector in columns
        ]

        def turn(
            nth: int, k: Any, sums: list[Any], nth_pass: int = nth_pass, columns: range = columns
        ) -> None:
            here = code.at(w, code.mul(k, const(PANEL)), stored)
            if nth % len(passes) == 0:  # all passes together prefetch one line for each input
                all_k = code.add(k, code.mul(count, const(nth_pass)))
                line_ahead = code.ashr(all_k, const(len(passes).bit_length() - 1))
                code.prefetch(code.at(ahead, code.mul(line_ahead, const(line)), stored), 2)
            if size >= ROWS_TO_PREFETCH and nth_pass == 0:
                for offset in range(0, PANEL, line):
                    code.prefetch(code.at(here, const(AHEAD * PANEL + offset), stored))
            weights = [
                _factors(code, kernel, code.read_vector(here, const(vector * lanes), stored, lanes))
                for vector in columns
            ]
            for row in range(size):
                for read in range(kernel.reads):
                    place = code.add(code.mul(k, const(kernel.reads)), const(read))
                    value = code.splat(code.read(rows[row], place, kernel.read), lanes)
                    for column, factors in enumerate(weights):
                        to = row * len(columns) + column
                        sums[to] = _added(code, kernel, value, factors[read], sums[to])

        sums = code.unrolled_loop(count, max(1, UNROLLED // kernel.reads), before, turn)
        for index, total in enumerate(sums):
            row, column = divmod(index, len(columns))
            code.write_vector(total, results[row], const(columns[column] * lanes))
    code.ret_void()
    return function


def _factors(code: Code, kernel: PanelProduct, stored: Any) -> Sequence[Any]:
    """Return the factors in a vector of a panel, for each of `kernel.reads`."""
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
    """Add the products of value and factor to total."""
    add = code.add_pair_products if kernel.dots else code.multiply_add
    return add(value, factor, total)


def kernel_for(x: np.dtype, weights: str, cpu: Host | None = None) -> PanelProduct:
    """Return the kernel for x and weights of these dtypes on a host, by default this machine."""
    cpu = cpu or host()
    if not (cpu.dots and x.name == weights == "bfloat16"):
        x = np.promote_types(x, np.float32)
    return PanelProduct(x.name, weights, cpu)


def panel_product(
    x: jax.Array, panels: jax.Array, weights: str, num_rows: jax.Array | None = None
) -> jax.Array:
    """Multiply x by a weight in panels, or rows sorted by group each by the weight of its group.

    Args:
        x: [T, I], any float; widened to at least float32 unless the processor multiplies pairs of
            bfloat16 and both x and the weights are that.
        panels: of one weight, see `panel_shape`, or [E, ...] of a weight for each group.
        weights: dtype of the weights.
        num_rows: i32[], rows from this number on are zero. With groups i32[E], required: the rows
            of each, group after group; rows after the last group are zero.

    Returns:
        [T, O] of the dtype of the sums: x's, but at least float32.

    Raises:
        ValueError: naming the argument at fault and what is allowed.
    """
    return run(kernel_for(np.dtype(x.dtype), weights), x, panels, num_rows)


def run(
    kernel: PanelProduct, x: jax.Array, panels: jax.Array, num_rows: jax.Array | None = None
) -> jax.Array:
    """Compute `panel_product` by this kernel.

    Raises:
        ValueError: panels or num_rows do not fit.
    """
    inputs = -(-x.shape[1] // 2) if in_pairs(kernel.weights) else x.shape[1]
    panels, counts = grouped(x, panels, num_rows, inputs)
    name = registered(kernel)
    x = x.astype(kernel.x)
    if in_pairs(kernel.weights) and x.shape[1] % 2:
        x = jnp.pad(x, ((0, 0), (0, 1)))
    shape = jax.ShapeDtypeStruct((x.shape[0], panels.shape[1] * PANEL), kernel.dtype)
    return jax.ffi.ffi_call(name, shape)(x, panels, counts)


def grouped(
    x: jax.Array, panels: jax.Array, num_rows: jax.Array | None, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Return panels [E, P, rows, PANEL] and row counts i32[E]; one weight is one group.

    Raises:
        ValueError: panels or counts have another shape, or counts are missing.
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
