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
TILES_OF_A_CHUNK = 8  # their rows of x stay in the cache during the loop over panels
INPUTS_OF_A_CHUNK = 1024  # or pairs of them


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


def each_tile(code: Code, begin: Any, end: Any, sizes: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Generate loops over tiles of the rows from `begin` to before `end`, larger tiles first.

    The body is the body of the `for` statement.

    Yields:
        The rows of a tile, one of `sizes`, and its first row.
    """
    for size in sizes:
        with code.loop(begin, code.sub(end, const(size - 1)), size) as (start, _):
            yield size, start
        whole = code.sdiv(code.sub(end, begin), const(size))
        begin = code.add(begin, code.mul(whole, const(size)))


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


class TileSums:
    """Sums of a tile of `size` rows in memory: rows of y, `outputs` numbers apart."""

    def __init__(self, code: Code, y: Any, size: int, outputs: Any, vector: ir.VectorType) -> None:
        self._code, self._vector, real = code, vector, vector.element
        self._rows = [code.at(y, code.mul(const(row), outputs), real) for row in range(size)]

    def read(self, columns: range, begins: Any) -> list[Any]:
        """Generate code that loads the vectors `columns` of each row, or zeros if `begins`."""
        code, lanes, real = self._code, self._vector.count, self._vector.element
        zero = filled(self._vector, 0.0)
        return [
            code.select(begins, zero, code.read_vector(row, const(column * lanes), real, lanes))
            for row in self._rows
            for column in columns
        ]

    def write(self, columns: range, sums: Sequence[Any]) -> None:
        """Generate code that stores the vectors `columns` of each row."""
        for index, total in enumerate(sums):
            row, column = divmod(index, len(columns))
            place = const(columns[column] * self._vector.count)
            self._code.write_vector(total, self._rows[row], place)


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
    return groups_of(x, panels, num_rows)


def groups_of(
    x: jax.Array, panels: jax.Array, num_rows: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return panels [E, P, ...] and row counts i32[E]. A single weight [P, ...] is one group.

    Raises:
        ValueError: counts are missing or have a wrong shape or dtype.
    """
    if panels.ndim == 3:
        count = jnp.int32(x.shape[0]) if num_rows is None else num_rows
        return panels[None], count.astype(jnp.int32).reshape(1)
    if num_rows is None or num_rows.shape != panels.shape[:1] or num_rows.dtype != jnp.int32:
        got = "missing" if num_rows is None else f"{num_rows.dtype}{list(num_rows.shape)}"
        raise ValueError(f"num_rows are {got}; expected int32[{len(panels)}], of each group")
    return panels, num_rows
