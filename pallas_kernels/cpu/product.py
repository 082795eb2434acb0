"""Products with weights in panels on CPU. Weights are read once, in order, at memory speed.

A weight of I inputs and O outputs is stored as `[O / PANEL, I, PANEL]`. A panel holds PANEL outputs
of all inputs, input after input, so a thread reads memory sequentially. (In the plain `[I, O]`
order these outputs are pieces, each in another page of memory.) The sums of a tile of rows stay in
registers during the loop over a panel (Goto and van de Geijn 2008, with the weights packed once).
Every sum runs over the inputs in their order, so the result of a row does not depend on other rows.

bfloat16 weights are stored in pairs of inputs. If x is bfloat16 too and the processor has dot
products of such pairs (AVX512-BF16), the kernel uses them: products are exact, the second of a pair
is added before the first, each addition rounds to float32, and subnormal numbers count as zeros.
Otherwise weights are widened, and products are added in the order of the inputs with one rounding.

The number of rows is an operand, because a batch is padded to one of few shapes. Padding rows are
not multiplied, and their results are zero.

If each group of rows has its own weight (the experts of a mixture), the operand is the number of
rows per group. A part of the work takes the same panels of all these weights, so all threads share
the work of a few rows. A weight without rows is not read.
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
ROWS_TO_PREFETCH = 6  # from this many rows on, the processor does not prefetch by itself
AHEAD = 64  # distance of prefetches, in inputs or pairs of inputs
UNROLLED = 4  # unrolled turns of the loop over inputs


@dataclass(frozen=True)
class PanelProduct:
    """Kernel for a dtype of x and a dtype of weights.

    Sums have the dtype of x, float32 or float64. For bfloat16 x, which needs a host with `dots` and
    bfloat16 weights, sums are float32.
    """

    x: str
    weights: str
    cpu: Host = field(default_factory=host)

    operands = 3

    @property
    def name(self) -> str:
        dots = "_dots" if self.cpu.dots else ""
        return f"{NAMES}product_{self.x}_{self.weights}_{self.cpu.vectors}{dots}"

    def __post_init__(self) -> None:
        """Raise ValueError for bfloat16 that this host cannot multiply."""
        if self.dots and not (self.cpu.dots and self.weights == "bfloat16"):
            raise ValueError(f"no product of {self.x} with {self.weights} on {self.cpu.name}")

    @property
    def dots(self) -> bool:
        """Whether pairs of bfloat16 are multiplied without conversion."""
        return self.x == "bfloat16"

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the sums."""
        return np.dtype(np.float32 if self.dots else self.x)

    @property
    def read(self) -> ir.Type:
        """LLVM type of one read of x: a number, or a pair of bfloat16."""
        return I32 if self.dots else float_type(self.dtype)

    @property
    def stored(self) -> ir.Type:
        """LLVM type of an element of a panel: a weight, or a pair of weights."""
        return I32 if in_pairs(self.weights) else stored_type(self.weights)

    @property
    def reads(self) -> int:
        """Number of reads of x for an element of a panel."""
        return 2 if in_pairs(self.weights) and not self.dots else 1

    @property
    def sums(self) -> int:
        """Number of vectors of sums in registers. The other registers hold factors."""
        return self.cpu.registers * 3 // 4

    @property
    def fields(self) -> Sequence[Field]:
        """Arguments of the code: x, panels, rows per group, y, then sizes.

        The sizes are rows, groups, inputs (or pairs of inputs), panels of a weight.
        """
        buffers = (Field(buffer) for buffer in range(self.operands + 1))
        return (*buffers, Field(0, 0), Field(1, 0), Field(1, 2), Field(1, 1))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        _, _, counts, _, rows, groups, inputs, panels = fields
        return parts_of(code, (counts, groups, rows), inputs, panels)

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Generate code that computes the panels of part `index` of all groups.

        Padding rows of y become zero. The loops are over groups, chunks of rows, chunks of inputs,
        panels, and tiles of rows.
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
        """Generate code that computes the first address that tile `nth` of a chunk prefetches.

        A tile prefetches one line per input. The first two tiles of full size each prefetch half of
        the next panel, which has two lines per input. Otherwise the memory would be idle while the
        other tiles of the chunk compute. The other tiles prefetch their own panel.
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
    """Generate a loop over consecutive groups of rows. The body is the `with` block.

    The number of rows of a group is its i32 in `counts`, limited to 0 and to the remaining rows.

    Yields:
        The group, its first row, and a list: the row after its last row (after the loop, the row
        after all groups), then the values of `carry`.
    """
    with code.loop(const(0), groups, carry=[const(0), *carry]) as (group, values):
        begin = values[0]
        count = code.larger_int(code.sext(code.read(counts, group, I32), I64), const(0))
        values[0] = code.add(begin, code.smaller_int(count, code.sub(rows, begin)))
        yield group, begin, values


def place_in_panels(code: Code, panel: Any, rows: Any, row: Any) -> Any:
    """Generate code that computes the first element of a row of a panel of `rows` rows."""
    return code.mul(code.add(code.mul(panel, rows), row), const(PANEL))


def parts_of(code: Code, groups: tuple[Any, Any, Any], inputs: Any, panels: Any) -> Any:
    """Generate code that computes the number of parts of a product. Each part is whole panels.

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
    """Generate code that writes zeros to rows and panels of y, given as (first, end)."""
    zero = filled(ir.VectorType(real, lanes), 0.0)
    low, high = (code.mul(panel, const(PANEL)) for panel in panels)
    with code.loop(*rows) as (row, _), code.loop(low, high, lanes) as (column, _):
        code.write_vector(zero, y, code.add(code.mul(row, outputs), column))


def row_tiles(sums: int) -> list[int]:
    """Return the sizes of tiles whose sums fit in `sums` vector registers, from the largest to 1.

    A row of the largest tile has two vectors of sums, which balances reads of x and of weights.
    """
    return [sums // 2, *(size for size in (8, 4, 2, 1) if size < sums // 2)]


def columns_at_once(sums: int, size: int, vectors: int) -> list[range]:
    """Split the vectors of a panel into passes of a tile of `size` rows, whose sums fit registers.

    A pass reads all inputs of its columns, so tiles of few rows read whole panels once.
    """
    width = vectors
    while size * width > sums:
        width //= 2
    return [range(start, start + width) for start in range(0, vectors, width)]


def _tile(module: ir.Module, size: int, kernel: PanelProduct) -> ir.Function:
    """Generate a function (x, panel, y, ahead, count, inputs, outputs, begins).

    It computes y[:size, :PANEL] += x[:size] @ panel over `count` inputs. Rows of x are `inputs`
    apart and rows of y `outputs`. If `begins`, the previous contents of y are ignored. Lines of
    memory from `ahead` on are prefetched.
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
            if nth % len(passes) == 0:  # all passes together prefetch one line per input
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
    """Generate code that converts a vector of a panel to factors, one per `kernel.reads`."""
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
    """Return the kernel for the dtypes of x and weights on a host, by default this machine."""
    cpu = cpu or host()
    if not (cpu.dots and x.name == weights == "bfloat16"):
        x = np.promote_types(x, np.float32)
    return PanelProduct(x.name, weights, cpu)


def panel_product(
    x: jax.Array, panels: jax.Array, weights: str, num_rows: jax.Array | None = None
) -> jax.Array:
    """Multiply x by a weight in panels, or rows sorted by group each by the weight of its group.

    Args:
        x: [T, I], any float. It is converted to float32 or wider, unless the processor multiplies
            pairs of bfloat16 and both x and the weights are bfloat16.
        panels: panels of one weight, see `panel_shape`, or [E, ...] with a weight per group.
        weights: dtype of the weights.
        num_rows: i32[] number of rows to multiply. The results of later rows are zero. With groups
            it is required: i32[E] rows per group, in order.

    Returns:
        [T, O] of the dtype of the sums: that of x, or float32 if x is narrower.

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """
    return run(kernel_for(np.dtype(x.dtype), weights), x, panels, num_rows)


def run(
    kernel: PanelProduct, x: jax.Array, panels: jax.Array, num_rows: jax.Array | None = None
) -> jax.Array:
    """Compute `panel_product` with `kernel`: [T, O].

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
    """Return panels [E, P, rows, PANEL] and row counts i32[E]. A single weight is one group.

    Raises:
        ValueError: panels or counts have a wrong shape, or counts are missing.
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
