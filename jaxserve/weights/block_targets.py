"""Destinations of the row blocks of a tensor, which are cast and copied or laid out in panels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from threading import local

import numpy as np

from jaxserve.models.weight_table import Block
from jaxserve.weights.block_copy import SCRATCH_BYTES, all_finite, copy_checked
from jaxserve.weights.layouts import aligned_empty
from pallas_kernels import inputs_in_panels, rows_in_panels
from pallas_kernels.cpu.panels import PANEL, panel_shape, rows_as_columns

BYTES = np.dtype(np.uint8)


class Memory(local):
    """Reusable buffers of one thread, for reading and casting row blocks.

    New memory for each row block would cost more time than reading it, because the kernel clears
    every page.
    """

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}
        self.scratch = aligned_empty((SCRATCH_BYTES,), BYTES)

    def of(self, use: str, size: int) -> np.ndarray:
        """Return the buffer for the purpose `use`, uint8, with at least `size` bytes."""
        if len(self._kept.get(use, ())) < size:
            self._kept[use] = aligned_empty((size,), BYTES)
        return self._kept[use]


@dataclass(frozen=True)
class Strided:
    """Destination of a row block in a parameter in its normal layout; `target` is a view of it."""

    block: Block
    target: np.ndarray

    @property
    def rows(self) -> tuple[int, int]:
        return self.block.rows

    @property
    def dtype(self) -> np.dtype:
        return self.target.dtype

    def fill(self, rows: np.ndarray, memory: Memory, check_finite: bool) -> bool:
        """Write rows of the tensor to the parameter, cast to its dtype.

        Return False if `check_finite` and a value is not finite, otherwise True.
        """
        return copy_checked(self.target, self.block.arrange(rows), memory.scratch, check_finite)


@dataclass(frozen=True)
class InPanels:
    """Destination of rows of a tensor, which are outputs, in panels of the parameter.

    Attributes:
        rows: first row, and one past the last.
        panels: the panels that the rows fill.
        column: column of the first row in its panel, if the panels have rows of other tensors too.
            None if the rows fill the panels alone.
    """

    rows: tuple[int, int]
    panels: np.ndarray
    dtype: np.dtype
    column: int | None = None

    def fill(self, rows: np.ndarray, memory: Memory, check_finite: bool) -> bool:
        """Write rows of the tensor to the panels, cast to their dtype.

        Return False if `check_finite` and a value is not finite, otherwise True.
        """
        rows = _castable(rows, self.dtype, memory)
        if self.column is not None:
            rows = rows.astype(self.dtype, copy=False)
            rows_as_columns(rows, self.panels, self.column)
            return not check_finite or all_finite(rows)
        return rows_in_panels(rows, self.panels, self.dtype) or not check_finite


@dataclass(frozen=True)
class TransposedPanels:
    """Destination of one expert's whole matrix in panels, whatever the order of its axes."""

    block: Block
    panels: np.ndarray
    dtype: np.dtype

    @property
    def rows(self) -> tuple[int, int]:
        return self.block.rows

    def fill(self, rows: np.ndarray, memory: Memory, check_finite: bool) -> bool:
        """Write the matrix of one expert to its panels, cast to their dtype.

        Return False if `check_finite` and a value is not finite, otherwise True.
        """
        rows = _castable(rows, self.dtype, memory)
        (matrix,) = self.block.arrange(rows)
        inputs = _inputs_first(matrix)
        if inputs is not None:
            return inputs_in_panels(inputs, self.panels, self.dtype) or not check_finite
        columns = np.moveaxis(matrix, 0, -1)
        if not columns.flags.c_contiguous:
            size = columns.nbytes
            turned = memory.of("turned", size)[:size].view(columns.dtype).reshape(columns.shape)
            copy_checked(turned, columns, memory.scratch, check_finite=False)
            columns = turned
        outputs = columns.reshape(-1, len(matrix))
        return rows_in_panels(outputs, self.panels, self.dtype) or not check_finite


def _castable(rows: np.ndarray, dtype: np.dtype, memory: Memory) -> np.ndarray:
    # The kernels widen bfloat16 to float32 themselves.
    if rows.dtype != dtype and not (rows.dtype.name == "bfloat16" and dtype == np.float32):
        size = rows.size * dtype.itemsize
        cast = memory.of("cast", size)[:size].view(dtype).reshape(rows.shape)
        copy_checked(cast, rows, memory.scratch, check_finite=False)
        return cast
    return np.ascontiguousarray(rows)


def _inputs_first(matrix: np.ndarray) -> np.ndarray | None:
    # Views a matrix [I, outputs...] as [I, M, turns], or returns None if that needs a copy.
    if matrix.flags.c_contiguous:
        return matrix.reshape(len(matrix), -1, 1)
    turns = matrix.swapaxes(1, -1)
    return turns if turns.ndim == 3 and turns.flags.c_contiguous else None


def prepare_panels(
    stored: Iterable[np.dtype], together: Iterable[np.dtype], dtype: np.dtype
) -> None:
    """Compile the kernels that lay out panels of `dtype`, by running them on zeros.

    Args:
        stored: dtypes of the tensors in the checkpoint.
        together: dtypes of the tensors that hold the matrices of all experts.
    """
    shape, word = panel_shape(PANEL, PANEL, dtype)
    for source in stored:
        panels = InPanels((0, PANEL), aligned_empty(shape, word), dtype)
        panels.fill(np.zeros((PANEL, PANEL), source), Memory(), check_finite=False)
    for source in together:
        for turns in (1, 2):
            panels = aligned_empty((turns, *shape[1:]), word)
            rows = _castable(np.zeros((PANEL, PANEL, turns), source), dtype, Memory())
            inputs_in_panels(rows, panels, dtype)
