"""Plan how rows of a checkpoint are read directly into panels, without an intermediate array.

Checkpoints store most matrices as [O, I], outputs first, including the matrices that are fused
here. If PANEL consecutive rows are the outputs of one panel, with their inputs in order, they can
be written to the panel directly. The tensors of experts may share a panel; each tensor then writes
its own columns. If one tensor holds the matrices of all experts, in any order of axes, the matrices
are transposed one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

import numpy as np

from jaxserve.models.placed_weight import PlacedWeight
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.fused_parameters import by_path, contracted, holds_experts
from jaxserve.weights.layouts import Axes, number_panels, panel_axes
from jaxserve.weights.placement import Parameters, in_blocks
from jaxserve.weights.safetensors import TensorEntry
from pallas_kernels.cpu.panels import PANEL


@dataclass(frozen=True)
class PanelRows:
    """Consecutive rows of a tensor, which are outputs, and the panels that they fill.

    Attributes:
        rows: bounds of the rows, [first, last).
        panel: index of the first panel, counted over all experts.
        column: column of the first row in its panel, if other tensors share the panels. None if the
            rows fill their panels alone.
    """

    rows: tuple[int, int]
    panel: int
    column: int | None = None

    def blocks(self, entry: TensorEntry, most: int) -> Iterator[PanelRows]:
        """Yield PanelRows that split these rows into row blocks of about `most` bytes.

        A row block ends only at a panel border and at a multiple of `entry.rows_together`.
        """
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
    """Plan for reading the tensors of a parameter directly into panels.

    Attributes:
        weight: the parameter, with the shape of its panels.
        rows: consecutive rows by tensor name and part number, in the order of the file. None if a
            tensor holds the matrices of all experts, which are transposed one by one.
    """

    weight: PlacedWeight
    rows: Mapping[tuple[str, int], Sequence[PanelRows]] | None


def panel_plans(
    table: Iterable[WeightName],
    entries: Mapping[str, TensorEntry],
    dims: Mapping[str, int],
    parameters: Parameters,
    form: str | None,
) -> dict[str, PanelPlan]:
    """Return the plans, by path, of the parameters that are read directly into panels.

    Parameters that `form` quantizes, and parameters whose rows do not fit panels, have no plan.

    Args:
        table: the tensors of the parameters.
        entries: the tensors of the checkpoint by name.
        dims: sizes of the dimensions that the table names.
        parameters: the model's parameters by path.
        form: "int8", "fp8" or "int4" to quantize to, or None.
    """
    plans = {}
    for path, parts in by_path(table).items():
        parameter = parameters[path]
        dtype = np.dtype(parameter.dtype)
        axes = panel_axes(parameter.get_metadata()["axes"], dtype)
        matrices = contracted(parameter) is not None or holds_experts(parameter)
        blocked = in_blocks(parameter, form, panels=True) is not None
        quantized = blocked or (form is not None and matrices)
        if axes is not None and not quantized:
            plan = panel_plan(parts, entries, dims, parameter.shape, dtype, axes)
            if plan is not None:
                plans[path] = plan
    return plans


def panel_plan(
    parts: Sequence[WeightName],
    entries: Mapping[str, TensorEntry],
    dims: Mapping[str, int],
    shape: tuple[int, ...],
    dtype: np.dtype,
    axes: Axes,
) -> PanelPlan | None:
    """Return the plan to read a parameter into panels, or None if its rows do not fit panels.

    Args:
        parts: the tensors of the parameter.
        entries: the tensors of the checkpoint by name.
        dims: sizes of the dimensions that the parts name.
        shape: shape of the parameter.
        dtype: dtype of the parameter.
        axes: result of `panel_axes`.
    """
    weight = number_panels(shape, dtype, axes)
    leading = shape[: len(shape) - len(axes[0]) - len(axes[1])]
    if leading and parts[0].index == (...,):
        return PanelPlan(weight, None)
    rows = {}
    planned: dict[str, list[PanelRows] | None] = {}  # equal layouts are planned only once
    for part in parts:
        expert, matrix = _matrix_of(part) if leading else (0, part)
        like = repr(replace(matrix, name=""))
        if like not in planned:
            matrix_axes = [tuple(axis - len(leading) for axis in group) for group in axes]
            order = _output_of_rows(
                matrix, dims, shape[len(leading) :], (matrix_axes[0], matrix_axes[1])
            )
            shared = bool(leading)
            planned[like] = (
                None if order is None else _panel_rows(*order, prod(weight.outputs), shared)
            )
        runs = planned[like]
        if runs is None or any(
            row % entries[part.name].rows_together for run in runs for row in run.rows
        ):
            return None
        first = expert * weight.values.shape[-3]
        rows[part.name, part.part] = [replace(run, panel=first + run.panel) for run in runs]
    return PanelPlan(weight, rows)


def _matrix_of(part: WeightName) -> tuple[int, WeightName]:
    expert, *place = part.index
    assert isinstance(expert, int)
    return expert, replace(part, index=tuple(place) or (...,))


def _output_of_rows(
    part: WeightName, dims: Mapping[str, int], shape: tuple[int, ...], axes: Axes
) -> tuple[int, np.ndarray] | None:
    """Return the first row of a part in its stored tensor, and the output index of each row.

    To find them, the indices of rows and columns are arranged as the part's values would be. They
    are broadcast arrays, in which an axis has stride zero if the index is constant along it.

    Args:
        part: the part, which knows its place in the parameter.
        dims: sizes by name, which give the shape of the stored tensor.
        shape: shape of the parameter.
        axes: the parameter's axes of inputs, and those of outputs.

    Returns:
        None if the stored tensor does not have two axes, or if a row is not one output with all
        inputs of the parameter in order.
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
    """Flatten index arrays of one shape, each along the axes on which it may change.

    Row and output indices are taken along the axes of rows, column and input indices along the axes
    of columns.

    Returns:
        Flat arrays of rows, outputs, columns and inputs, or None if rows and columns change along
        the same axis.
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
    """Return the runs of consecutive outputs among the rows of a part, as PanelRows.

    Args:
        first: first row of the part in its tensor.
        outputs: output index of each row.
        end: number of outputs of the parameter.
        shared: allow panels that are shared with other tensors.

    Returns:
        The runs, or None if a panel would be shared and `shared` is false.
    """
    breaks = np.flatnonzero(np.diff(outputs) != 1) + 1
    runs = []
    for run in np.split(np.arange(len(outputs)), breaks):
        output = int(outputs[run[0]])
        whole = not output % PANEL and (not len(run) % PANEL or output + len(run) == end)
        if not whole and not shared:
            return None
        rows = (first + int(run[0]), first + int(run[-1]) + 1)
        runs.append(PanelRows(rows, output // PANEL, None if whole else output % PANEL))
    return runs
