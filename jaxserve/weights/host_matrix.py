"""Quantized matrices on the host, before they are laid out and copied to a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import ml_dtypes
import numpy as np

from jaxserve.models.placed_weight import FULL, PlacedWeight
from jaxserve.weights.layouts import block_panels, filled_blocks, is_shape
from pallas_kernels.cpu.blocks import FORMATS

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT16 = np.dtype(np.float16)


@dataclass(frozen=True, eq=False)
class HostMatrix:
    """One matrix on the host: codes with scales, GGUF blocks, or dequantized numbers.

    A matrix may have `jax.ShapeDtypeStruct` for `values`, `scales` and `zeros`. It then describes
    the matrix that a checkpoint holds, and every method returns shapes.

    Attributes:
        form: "int8", "fp8" or "int4" for codes, the name of a GGUF block format, or `FULL` for
            numbers that were dequantized while they were read, because no form is exact for them.
        values: codes are int8 or uint8 [I, O], with inputs as rows and one code per byte, also for
            int4. Blocks are uint8 [O, blocks, bytes per block], in the field order of the kernels.
            Dequantized numbers are float32 [I, O].
        scales: [groups, O] of codes, otherwise None.
        zeros: [groups, O], zero points as uint8, or minima (the values of code 0) as floats. None
            means zero points of 8 for int4.
        order: i32[I], the input of each row of codes, or of each column of blocks. None if the
            inputs are in order.
        group: number of inputs that share a scale. The last group may be shorter.
    """

    form: str
    values: np.ndarray
    scales: np.ndarray | None = None
    zeros: np.ndarray | None = None
    order: np.ndarray | None = None
    group: int = 0

    @classmethod
    def described(
        cls,
        form: str,
        shape: tuple[int, int],
        group: int = 0,
        scales: Any = FLOAT16,
        zeros: Any = None,
        order: np.ndarray | None = None,
    ) -> HostMatrix:
        """Return a HostMatrix with shapes in place of arrays.

        Args:
            form: form of the codes, name of a block format, or `FULL`.
            shape: numbers of inputs and of outputs.
            group: number of inputs that share a scale, of codes.
            scales: dtype of the scales of codes.
            zeros: dtype of the zero points or minima of codes, or None for codes without them.
            order: see the attribute.
        """
        inputs, outputs = shape
        if form in FORMATS:
            shape_of_blocks = outputs, inputs // FORMATS[form].size, FORMATS[form].num_bytes
            return cls(form, _shape(shape_of_blocks, np.uint8), order=order)
        if form == FULL:
            return cls(form, _shape(shape, np.float32))
        groups = -(-inputs // group)
        return cls(
            form,
            _shape(shape, np.int8 if form == "int8" else np.uint8),
            _shape((groups, outputs), scales),
            None if zeros is None else _shape((groups, outputs), zeros),
            order,
            group,
        )

    @property
    def is_blocks(self) -> bool:
        """Whether the matrix is stored as GGUF blocks, with outputs as rows of `values`."""
        return self.form in FORMATS

    @property
    def inputs(self) -> int:
        """Number of inputs of the matrix."""
        blocks = self.is_blocks
        return self.values.shape[1] * FORMATS[self.form].size if blocks else self.values.shape[0]

    @property
    def has_minima(self) -> bool:
        """Whether `zeros` of the codes are minima instead of zero points."""
        return self.zeros is not None and self.zeros.dtype != np.uint8

    @property
    def _shared(self) -> tuple[Any, ...]:
        scales = None if self.scales is None else self.scales.dtype
        return self.form, self.group, scales, self.has_minima

    def joins(self, other: HostMatrix) -> bool:
        """Return whether this matrix and another one of the same inputs can be one matrix.

        They must have the same form, group size, order of inputs, dtype of scales, and kind of
        `zeros`.
        """
        if self._shared != other._shared:
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return np.array_equal(self.order, other.order)

    def with_outputs(self, outputs: np.ndarray) -> HostMatrix:
        """Return the matrix with only the outputs of the given indices, in the order given."""
        axis = 0 if self.is_blocks else 1
        if np.array_equal(outputs, np.arange(self.values.shape[axis])):
            return self  # a copy of an embedding table would be large

        def taken(array: Any) -> Any:
            if array is None:
                return None
            if not is_shape(array):
                return array[outputs] if axis == 0 else array[:, outputs]
            shape = list(array.shape)
            shape[axis] = len(outputs)
            return _shape(tuple(shape), array.dtype)

        values, scales, zeros = map(taken, (self.values, self.scales, self.zeros))
        return replace(self, values=values, scales=scales, zeros=zeros)

    def with_zeros(self) -> HostMatrix:
        """Return the matrix with zero points of 8 if it has codes and no `zeros`, else itself."""
        if self.zeros is not None or self.scales is None:
            return self
        shape: Any = self.scales.shape
        zeros = _shape(shape, np.uint8) if is_shape(self.scales) else np.full(shape, 8, np.uint8)
        return replace(self, zeros=zeros)

    def dequantized(self) -> np.ndarray:
        """Return the weights of a matrix of codes or numbers, float32[I, O], inputs in order."""
        if self.scales is None:
            assert self.form == FULL
            return self.values
        group = np.arange(len(self.values)) // self.group
        stored = np.dtype(np.uint8) if self.form == "int4" else np.dtype(np.int8)
        stored = FP8 if self.form == "fp8" else stored
        numbers = self.values.view(stored).astype(np.float32)
        if self.form == "int4" and not self.has_minima:
            zeros = self.with_zeros().zeros
            assert zeros is not None
            numbers -= zeros[group]
        numbers *= self.scales[group].astype(np.float32)
        if self.has_minima and self.zeros is not None:
            numbers += self.zeros[group].astype(np.float32)
        if self.order is None:
            return numbers
        out = np.empty_like(numbers)
        out[self.order] = numbers
        return out

    def as_weight(self, outputs: tuple[int, ...], dtype: str = "") -> PlacedWeight:
        """Return the matrix as a PlacedWeight in NumPy: codes input-major, or blocks in panels.

        Args:
            outputs: shape of the outputs in the model.
            dtype: dtype in which weights of blocks are returned as columns.
        """
        scales, zeros, order = (cast(Any, part) for part in (self.scales, self.zeros, self.order))
        if is_shape(self.values) and order is not None:
            order = _shape(order.shape, order.dtype)
        if self.is_blocks:
            weight = replace(block_panels(self.form, self.inputs, outputs, dtype), order=order)
            return weight if is_shape(self.values) else filled_blocks(weight, [self.values])
        return PlacedWeight(self._packed(), scales, zeros, order, self.form, self.inputs, outputs)

    def _packed(self) -> Any:
        """Return the codes [I, O] padded to whole groups. int4 packs two inputs in a byte."""
        assert self.scales is not None
        values: Any = self.values
        groups, (inputs, outputs) = self.scales.shape[0], values.shape
        width = 2 if self.form == "int4" else 1
        assert width == 1 or self.group % 2 == 0 or groups == 1
        rows = -(-groups * self.group // width)
        if is_shape(values):
            return _shape((rows, outputs), values.dtype)
        if missing := rows * width - inputs:
            # With other zero points the padding is not zero. That does not matter, because the
            # activations are padded with zeros.
            neutral = 8 if self.form == "int4" else 0
            values = np.pad(values, ((0, missing), (0, 0)), constant_values=neutral)
        return values if width == 1 else values[0::2] | values[1::2] << 4


def _shape(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)
