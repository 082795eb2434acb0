"""Quantized matrices on the host, before they are packed and copied to a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve.models.quantized import QuantizedWeight

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class CodesLayout:
    """The layout of a quantized matrix, from which the shapes of its arrays follow.

    Attributes:
        form: "int8", "fp8" or "int4".
        group: inputs that share a scale.
        scales: dtype of the scales.
        zeros: dtype of the zero points or minima; None if there are none.
        order: i32[I], the input of each row; None where they are in order.
    """

    form: str
    group: int
    scales: np.dtype
    zeros: np.dtype | None = None
    order: np.ndarray | None = None

    def joins(self, other: CodesLayout) -> bool:
        """Return whether two matrices of the same inputs can be one matrix."""
        minima = [kind is not None and kind != np.uint8 for kind in (self.zeros, other.zeros)]
        layout = (self.form, self.group, self.scales, minima[0])
        if layout != (other.form, other.group, other.scales, minima[1]):
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return np.array_equal(self.order, other.order)

    def rows(self, inputs: int) -> tuple[int, int]:
        """Return the rows of codes and the groups of a matrix, as `Codes.packed` makes them."""
        groups = -(-inputs // self.group)
        width = 2 if self.form == "int4" else 1
        return -(-groups * self.group // width), groups


@dataclass(frozen=True)
class Codes:
    """A quantized matrix on the host, with inputs as rows and one code per byte, also for int4.

    Attributes:
        form: "int8", "fp8" or "int4".
        values: int8 or uint8 [I, O].
        scales: [groups, O].
        zeros: [groups, O], zero points as uint8, or minima (the values of code 0) as floats. None
            means zero points of 8 for int4.
        order: i32[I], the input of each row. None if the inputs are in order.
        group: number of inputs that share a scale. The last group may be shorter.
    """

    form: str
    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    order: np.ndarray | None
    group: int

    def with_columns(self, columns: np.ndarray) -> Codes:
        """Return the matrix with only the outputs `columns`, in that order."""
        zeros = None if self.zeros is None else self.zeros[:, columns]
        return replace(
            self, values=self.values[:, columns], scales=self.scales[:, columns], zeros=zeros
        )

    @property
    def has_minima(self) -> bool:
        """Whether `zeros` are minima, not zero points."""
        return self.zeros is not None and self.zeros.dtype != np.uint8

    @property
    def layout(self) -> CodesLayout:
        """The layout, which joined matrices share."""
        zeros = None if self.zeros is None else self.zeros.dtype
        return CodesLayout(self.form, self.group, self.scales.dtype, zeros, self.order)

    def zeros_or_default(self) -> np.ndarray:
        """Return `zeros`, or zero points of 8 if it is None."""
        return np.full(self.scales.shape, 8, np.uint8) if self.zeros is None else self.zeros

    def dequantized(self) -> np.ndarray:
        """Return the weights as float32[I, O], with inputs in order."""
        group = np.arange(len(self.values)) // self.group
        stored = np.dtype(np.uint8) if self.form == "int4" else np.dtype(np.int8)
        stored = FP8 if self.form == "fp8" else stored
        numbers = self.values.view(stored).astype(np.float32)
        if self.form == "int4" and not self.has_minima:
            numbers -= self.zeros_or_default()[group]
        numbers *= self.scales[group].astype(np.float32)
        if self.has_minima and self.zeros is not None:
            numbers += self.zeros[group].astype(np.float32)
        if self.order is None:
            return numbers
        out = np.empty_like(numbers)
        out[self.order] = numbers
        return out

    def packed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return codes padded to whole groups, scales, and `zeros`. int4 has two codes a byte."""
        values, inputs = self.values, len(self.values)
        groups, missing = len(self.scales), len(self.scales) * self.group - inputs
        neutral = 8 if self.form == "int4" else 0
        if missing:
            # With other zero points the padding is not zero. That does not matter, because the
            # activations are padded with zeros.
            values = np.pad(values, ((0, missing), (0, 0)), constant_values=neutral)
        if self.form == "int4":
            if self.group % 2:  # a single group of an odd number of inputs
                assert groups == 1
                values = np.pad(values, ((0, 1), (0, 0)), constant_values=neutral)
            values = values[0::2] | values[1::2] << 4
        return values, self.scales, self.zeros

    def as_weight(self, outputs: tuple[int, ...]) -> QuantizedWeight:
        """Pack the codes into a weight of NumPy arrays, with outputs of shape `outputs`."""
        values, scales, zeros = (cast(Any, part) for part in self.packed())
        order: Any = self.order
        return QuantizedWeight(values, scales, zeros, order, self.form, len(self.values), outputs)

    def placed(self, outputs: tuple[int, ...]) -> QuantizedWeight:
        """Pack the codes into a weight with outputs of shape `outputs` on JAX's default device."""
        return jax.tree.map(jnp.asarray, self.as_weight(outputs))
