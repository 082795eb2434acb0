"""Panels that the rows of a checkpoint fill, so that rows are read straight into them.

Checkpoints store most matrices as [O, I], outputs first, also those that are fused here. Where
PANEL rows in a row are the outputs of one panel, with their inputs in order, no parameter is needed
in its own shape in between. Nor is one of experts: where tensors share a panel each writes its own
columns, and where a tensor holds all experts' matrices, in whatever order, these are turned one by
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

import numpy as np

from jaxserve.models.weight_table import WeightName
from jaxserve.weights.safetensors import TensorEntry
from pallas_kernels.cpu.panels import PANEL, panel_shape

# The axes of a parameter that are inputs, and those that are outputs; one in front is the expert.
Axes = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class PanelRows:
    """Rows of a tensor that make panels.

    Attributes:
        rows: bounds of the rows, [first, last).
        panel: the first, all experts' counted.
        column: column of the first row in its panel, where others share the panels; None where
            none do.
    """

    rows: tuple[int, int]
    panel: int
    column: int | None = None

    def blocks(self, entry: TensorEntry, most: int) -> Iterator[PanelRows]:
        """Yield the rows in pieces of about `most` bytes, never splitting rows read together."""
        first, last = self.rows
        least = lcm(PANEL, entry.rows_together)
        row = max(1, entry.num_bytes // entry.shape[0])
        step = max(1, most // (least * row)) * least
        for start in range(first, last, step):
            stop = min(start + step, last)
            panel = self.panel + (start - first) // PANEL
            yield replace(self, rows=(start, stop), panel=panel)


@dataclass(frozen=True)
class PanelPlan:
    """Plan by which a parameter is read into panels.

    Attributes:
        shape: shape of the panels; that of experts is [E, ...].
        stored: dtype of the panels.
        dtype: dtype of the weights.
        inputs: number of inputs.
        outputs: sizes of the outputs' dimensions.
        rows: runs of rows by a tensor's name and the part of it, in the order of the file; None
            where a tensor holds all experts' matrices, to be turned one by one.
    """

    shape: tuple[int, ...]
    stored: np.dtype
    dtype: np.dtype
    inputs: int
    outputs: tuple[int, ...]
    rows: Mapping[tuple[str, int], Sequence[PanelRows]] | None


def panel_plan(
    parts: Sequence[WeightName],
    entries: Mapping[str, TensorEntry],
    dims: Mapping[str, int],
    shape: tuple[int, ...],
    dtype: np.dtype,
    axes: Axes,
) -> PanelPlan | None:
    """Plan how these tensors fill a parameter of `shape`; None where rows cannot become panels."""
    inputs, outputs = (tuple(shape[axis] for axis in group) for group in axes)
    leading = shape[: len(shape) - len(axes[0]) - len(axes[1])]
    panels, stored = panel_shape(prod(inputs), prod(outputs), dtype)

    def plan(rows: Mapping[tuple[str, int], Sequence[PanelRows]] | None) -> PanelPlan:
        return PanelPlan((*leading, *panels), stored, dtype, prod(inputs), outputs, rows)

    if leading and parts[0].index == (...,):
        return plan(None)
    rows = {}
    planned: dict[str, list[PanelRows] | None] = {}  # experts' tensors are alike
    for part in parts:
        expert, matrix = _matrix_of(part) if leading else (0, part)
        like = repr(replace(matrix, name=""))
        if like not in planned:
            matrix_axes = [tuple(axis - len(leading) for axis in group) for group in axes]
            order = _output_of_rows(
                matrix, dims, shape[len(leading) :], (matrix_axes[0], matrix_axes[1])
            )
            shared = bool(leading)
            planned[like] = None if order is None else _panel_rows(*order, prod(outputs), shared)
        found = planned[like]
        if found is None or any(
            row % entries[part.name].rows_together for run in found for row in run.rows
        ):
            return None
        first = expert * panels[0]
        rows[part.name, part.part] = [replace(run, panel=first + run.panel) for run in found]
    return plan(rows)


def _matrix_of(part: WeightName) -> tuple[int, WeightName]:
    expert, *place = part.index
    assert isinstance(expert, int)
    return expert, replace(part, index=tuple(place) or (...,))


def _output_of_rows(
    part: WeightName, dims: Mapping[str, int], shape: tuple[int, ...], axes: Axes
) -> tuple[int, np.ndarray] | None:
    """Return the first row of the part, and the output that each of its rows is.

    Numbers of rows and of their places go the way of the values, as arrays without memory: an axis
    along which they do not change has no stride. The result is None where rows are no
    outputs, or their inputs are not all of the parameter's in order.
    """
    stored = part.shape(dims)
    if len(stored) != 2:
        return None
    whole = next(part.blocks(dims, prod(stored)))
    first, last = whole.rows
    row, column = (
        whole.arrange(np.broadcast_to(numbers, (last - first, stored[1])))
        for numbers in (np.arange(last - first)[:, None], np.arange(stored[1])[None])
    )
    input_, output = (_numbered(shape, group)[part.index] for group in axes)
    if row.shape != output.shape:
        return None
    lines = _along(row, column, output, input_)
    if lines is None:
        return None
    row, output, column, input_ = lines
    if not np.array_equal(column, input_) or len(input_) != stored[1]:
        return None
    numbers = np.empty(last - first, np.int64)
    numbers[row] = output
    return first, numbers


def _numbered(shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    sizes = tuple(size if axis in axes else 1 for axis, size in enumerate(shape))
    return np.broadcast_to(np.arange(prod(sizes)).reshape(sizes), shape)


def _along(
    row: np.ndarray, column: np.ndarray, output: np.ndarray, input_: np.ndarray
) -> tuple[np.ndarray, ...] | None:
    """Return rows and outputs along their axes, columns and inputs along theirs.

    The result is None if both change along one axis.
    """
    of_rows, of_columns = [], []
    for axis, size in enumerate(row.shape):
        rows_stay = size == 1 or not (row.strides[axis] or output.strides[axis])
        columns_stay = size == 1 or not (column.strides[axis] or input_.strides[axis])
        if not (rows_stay or columns_stay):
            return None
        of_rows.append(0 if rows_stay else slice(None))
        of_columns.append(0 if columns_stay else slice(None))
    pairs = ((row, of_rows), (output, of_rows), (column, of_columns), (input_, of_columns))
    return tuple(numbers[tuple(index)].reshape(-1) for numbers, index in pairs)


def _panel_rows(first: int, outputs: np.ndarray, end: int, shared: bool) -> list[PanelRows] | None:
    """Return runs of rows that make panels, given each row's output; `end` counts the outputs.

    The result is None where tensors would share a panel, unless `shared` allows it.
    """
    breaks = np.flatnonzero(np.diff(outputs) != 1) + 1
    found = []
    for run in np.split(np.arange(len(outputs)), breaks):
        output = int(outputs[run[0]])
        whole = not output % PANEL and (not len(run) % PANEL or output + len(run) == end)
        if not whole and not shared:
            return None
        rows = (first + int(run[0]), first + int(run[-1]) + 1)
        found.append(PanelRows(rows, output // PANEL, None if whole else output % PANEL))
    return found
