"""Quantized weights as GPUs before Ampere multiply them: a row of codes for each output."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import jax

from jaxserve.models.quantized import QuantizedWeight, SplitWeight, in_order
from pallas_kernels import output_major_matmul

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, Shaped, UInt8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedRows:
    """A `QuantizedWeight` whose codes, scales and zero points are transposed.

    Attributes:
        values: the codes, [O, rows]; two inputs a row for int4.
        scales: [O, groups].
        zeros: likewise, where the format has them.
        order: which input each row is for, where rows have been sorted by group.
        form: "int8", "fp8" or "int4".
        inputs: how many inputs there are, padding not counted.
        outputs: the shape that the outputs have in the model; their product is O.
    """

    values: Shaped[Array, "O codes"]
    scales: Float[Array, "O groups"]
    zeros: UInt8[Array, "O groups"] | Float[Array, "O groups"] | None
    order: Int32[Array, " I"] | None
    form: str = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, weight: QuantizedWeight) -> QuantizedRows:
        """Transpose a weight, on its device."""
        return cls(
            weight.values.T,
            weight.scales.T,
            None if weight.zeros is None else weight.zeros.T,
            weight.order,
            weight.form,
            weight.inputs,
            weight.outputs,
        )

    def __getitem__(self, index: EllipsisType) -> QuantizedRows:
        """Return itself, as a QuantizedWeight does."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Multiply x, in at least float32."""
        x = in_order(x, self.order, self.values.shape[1], self.form)
        y = output_major_matmul(x, self.values, self.scales, self.zeros, form=self.form)
        return y.reshape(x.shape[0], *self.outputs)


def with_output_rows(value: Any) -> Any:
    """Transpose a parameter where it is a quantized matrix; experts' stay as they are."""
    if isinstance(value, QuantizedWeight):
        return QuantizedRows.of(value)
    if isinstance(value, SplitWeight):
        return replace(value, weights=tuple(map(with_output_rows, value.weights)))
    return value
