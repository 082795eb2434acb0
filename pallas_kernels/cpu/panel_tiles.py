"""Parts of CPU products with weights in panels: groups of rows, tiles of rows, and their sizes.

A product computes chunks of rows, whose x stays in the cache during the loop over panels. A chunk
is cut into tiles, whose sums stay in registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.cpu.ir_builder import I32, I64, Code, const, filled
from pallas_kernels.cpu.panels import PANEL

MOST_PARTS = 16
WORK_OF_A_PART = 1 << 16  # weights (or pairs) read, or an eighth of the products
# A row of a tile has an address and a number of x in registers. With 12 rows, LLVM's code for
# AVX-512 moves sums to memory and back in the loop, and is half as fast as with 8 (Zen 4).
MOST_ROWS = 8
TILES_OF_A_CHUNK = 12  # their rows of x stay in the cache during the loop over panels
INPUTS_OF_A_CHUNK = 1024  # or pairs of them


@contextmanager
def each_group(
    code: Code, counts: Any, groups: Any, rows: Any, carry: Sequence[Any] = ()
) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Emit an LLVM loop over groups of consecutive rows of x. The body is the `with` block.

    The number of rows of a group is its i32 in `counts`, limited to 0 and to the remaining rows.

    Yields:
        The group, its first row, and a list: the row after its last row (after the loop, the row
        after all groups), then the values of `carry`, which the body replaces by the next values.
    """
    with code.loop(const(0), groups, carry=[const(0), *carry]) as (group, values):
        begin = values[0]
        count = code.larger_int(code.sext(code.read(counts, group, I32), I64), const(0))
        values[0] = code.add(begin, code.smaller_int(count, code.sub(rows, begin)))
        yield group, begin, values


def each_tile(code: Code, begin: Any, end: Any, sizes: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Emit LLVM loops over tiles of the rows from `begin` to before `end`, larger tiles first.

    The body of the `for` statement emits the body of each loop.

    Yields:
        The rows of a tile (a Python int, one of `sizes`), and its first row (an i64).
    """
    for size in sizes:
        with code.loop(begin, code.sub(end, const(size - 1)), size) as (start, _):
            yield size, start
        whole = code.sdiv(code.sub(end, begin), const(size))
        begin = code.add(begin, code.mul(whole, const(size)))


def place_in_panels(code: Code, panel: Any, rows: Any, row: Any) -> Any:
    """Emit LLVM IR for the number of the first element of row `row` of a weight panel.

    `panel` is the number of the panel, and a panel has `rows` rows of PANEL elements. Returns the
    i64.
    """
    return code.mul(code.add(code.mul(panel, rows), row), const(PANEL))


def parts_of(code: Code, groups: tuple[Any, Any, Any], inputs: Any, panels: Any) -> Any:
    """Emit LLVM IR that computes into how many parts a product with panels is divided.

    Each part is whole panels. Returns the i64.

    Args:
        code: builder of the IR.
        groups: counts, groups and rows as in `each_group`.
        inputs: rows of a panel.
        panels: number of panels of a weight.
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
    """Emit LLVM IR that writes zeros to some rows and panels (groups of PANEL columns) of y.

    Args:
        code: builder of the IR.
        y: address of y.
        rows, panels: (first, end) of the rows and of the panels.
        outputs: columns of y.
        real: type of the elements.
        lanes: lanes of a vector.
    """
    zero = filled(ir.VectorType(real, lanes), 0.0)
    low, high = (code.mul(panel, const(PANEL)) for panel in panels)
    with code.loop(*rows) as (row, _), code.loop(low, high, lanes) as (column, _):
        code.write_vector(zero, y, code.add(code.mul(row, outputs), column))


class TileSums:
    """Sums of a tile of `size` rows of a product, in memory: rows of y, `outputs` numbers apart."""

    def __init__(self, code: Code, y: Any, size: int, outputs: Any, vector: ir.VectorType) -> None:
        self._code, self._vector, real = code, vector, vector.element
        self._rows = [code.at(y, code.mul(const(row), outputs), real) for row in range(size)]

    def read(self, columns: range, begins: Any) -> list[Any]:
        """Emit LLVM IR that loads some vectors of each row of the tile, or zeros if `begins`.

        `columns` are the numbers of the vectors in a row. Returns a list of IR vectors, the first
        row's first.
        """
        code, lanes, real = self._code, self._vector.count, self._vector.element
        zero = filled(self._vector, 0.0)
        return [
            code.select(begins, zero, code.read_vector(row, const(column * lanes), real, lanes))
            for row in self._rows
            for column in columns
        ]

    def write(self, columns: range, sums: Sequence[Any]) -> None:
        """Emit LLVM IR that stores a tile's sums, vectors in the order of `read`, to its rows."""
        for index, total in enumerate(sums):
            row, column = divmod(index, len(columns))
            place = const(columns[column] * self._vector.count)
            self._code.write_vector(total, self._rows[row], place)


def row_tiles(sums: int) -> list[int]:
    """Return the sizes (in rows) of tiles whose sums fit in `sums` vector registers, largest first.

    A row of the largest tile has two vectors of sums, which balances reads of x and of weights. The
    last size is 1.
    """
    largest = min(sums // 2, MOST_ROWS)
    return [largest, *(size for size in (4, 2, 1) if size < largest)]


def columns_at_once(sums: int, size: int, vectors: int) -> list[range]:
    """Split the `vectors` vectors of a panel's row into passes: ranges of vectors.

    The sums of a pass over a tile of `size` rows fit in `sums` registers. A pass reads all inputs
    of its columns, so tiles of few rows read whole panels once.
    """
    width = vectors
    while size * width > sums:
        width //= 2
    return [range(start, start + width) for start in range(0, vectors, width)]


def grouped(
    x: jax.Array, panels: jax.Array, num_rows: jax.Array | None, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Check the panels of a product, and return them with a leading axis of groups.

    Args:
        x: [T, I] operand of the product.
        panels: [P, rows, PANEL] of a single weight, or [E, P, rows, PANEL] of E groups.
        num_rows: rows of x to multiply, i32[] or i32[E]. None means all, for a single weight.
        rows: the expected rows of a panel.

    Returns:
        Panels [E, P, rows, PANEL] and row counts i32[E]. A single weight is one group.

    Raises:
        ValueError: panels or counts have a wrong shape, or counts are missing.
    """
    if panels.ndim not in (3, 4) or panels.shape[-2:] != (rows, PANEL):
        raise ValueError(
            f"panels have shape {panels.shape}; expected [P, {rows}, {PANEL}], or [E, P, {rows}, "
            f"{PANEL}] of groups, for x with {x.shape[1]} inputs"
        )
    return groups_of(x, panels, num_rows)


def groups_of(
    x: jax.Array, panels: jax.Array, num_rows: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return panels with a leading axis of groups, [E, P, ...], and row counts i32[E].

    A single weight, panels [P, ...], becomes one group. Its count is `num_rows`, or all rows of x
    if `num_rows` is None.

    Raises:
        ValueError: counts of several groups are missing or have a wrong shape or dtype.
    """
    if panels.ndim == 3:
        count = jnp.int32(x.shape[0]) if num_rows is None else num_rows
        return panels[None], count.astype(jnp.int32).reshape(1)
    if num_rows is None or num_rows.shape != panels.shape[:1] or num_rows.dtype != jnp.int32:
        got = "missing" if num_rows is None else f"{num_rows.dtype}{list(num_rows.shape)}"
        raise ValueError(f"num_rows are {got}; expected int32[{len(panels)}], of each group")
    return panels, num_rows
