"""Quantized weights in the layout for GPUs before Ampere: a row of codes for each output."""

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
    """A `QuantizedWeight` with transposed codes, scales and zero points.

    Attributes:
        values: the codes, [O, rows], where int4 packs two inputs in one uint8.
        scales: [O, groups].
        zeros: zero points or minima, [O, groups], if the format has them.
        order: the input of each row of codes, if rows have been sorted by group.
        form: "int8", "fp8" or "int4".
        inputs: number of inputs, without padding.
        outputs: the shape of the outputs in the model, with product O.
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
        """Transpose a quantized weight on its device."""
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
        """Return self, as a QuantizedWeight does."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Multiply x by the weight. Returns at least float32."""
        x = in_order(x, self.order, self.values.shape[1], self.form)
        y = output_major_matmul(x, self.values, self.scales, self.zeros, form=self.form)
        return y.reshape(x.shape[0], *self.outputs)


def with_output_rows(value: Any) -> Any:
    """Convert a quantized matrix to `QuantizedRows`; return other values unchanged."""
    if isinstance(value, QuantizedWeight):
        return QuantizedRows.of(value)
    if isinstance(value, SplitWeight):
        return replace(value, weights=tuple(map(with_output_rows, value.weights)))
    return value
