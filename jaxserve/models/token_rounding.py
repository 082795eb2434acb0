"""Products whose activations are rounded to int8, each row with a scale of its own.

Checkpoints of compressed-tensors with `input_activations` of int8, dynamic and a token each, are
made for this: with a the largest magnitude of a row, x becomes the whole number nearest x * 127 / a
and stands for that times a / 127, as in vLLM. A row's numbers depend on no other row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models.output_rows import QuantizedRows
from jaxserve.models.quantized import QuantizedWeight
from pallas_kernels.devices import DeviceLimits, target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int8, Int32

LARGEST = 127
TINY = 1e-36  # a row below it is zeros: 127 / a would overflow
ROWS_OF_INTEGERS = 512
"""Rows from which products of int8 by int8 take the place of widened codes where Triton runs.

XLA first transposes codes that lie input-major (`GpuLayoutAssignment`: int8 is contracted over the
last dimension), which moves twice the bytes that a product of few rows reads. No card has measured
this number."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenRounded:
    """A quantized matrix, or experts', by which rounded activations are multiplied.

    On CPU the product is that of the weight by whole numbers times their scale. On a GPU it is of
    whole numbers, int8 by int8 with sums in int32, or of the same numbers in the activations' dtype
    with sums in float32, which are the same below 2^24; scales come last.

    Attributes:
        weight: a QuantizedWeight, SplitWeight or QuantizedExperts, or those in another layout.
        axis: of the devices that have a row's other inputs; None where each has all of them.
    """

    weight: Any
    axis: str | None = field(default=None, metadata={"static": True})

    def __getitem__(self, index: EllipsisType) -> TokenRounded:
        """Return itself, as a QuantizedWeight does."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Round x and multiply, in at least float32."""
        numbers, scales = rounded_rows(x, self.axis)
        device = target_device()
        if not device.is_gpu:
            return self.weight.dot(numbers * scales)
        if multiplies_integers(self.weight, x.shape[0], device):
            y = integer_product(numbers, self.weight)
        else:
            y = self.weight.dot(numbers.astype(x.dtype))
        return y * scales.reshape(-1, *[1] * (y.ndim - 1))


def rounded_rows(
    x: Float[Array, "T I"], axis: str | None = None
) -> tuple[Float[Array, "T I"], Float[Array, "T 1"]]:
    """Return the whole numbers that x is rounded to, and the scale of each row.

    Both are in at least float32. A row that holds NaN or infinity gives NaN. Where inputs lie on
    several devices, along `axis`, the scale is that of the whole row.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(wide), axis=1, keepdims=True)
    if axis is not None:
        largest = lax.pmax(largest, axis)
    steps = jnp.where(largest > TINY, LARGEST / largest, 0)
    # XLA makes a product of a quotient by a constant here, and not there.
    return jnp.round(wide * steps), largest * (1 / LARGEST)


def multiplies_integers(weight: Any, rows: int, device: DeviceLimits) -> bool:
    """Return whether a product is of int8 by int8 on a GPU.

    Cards multiply int8 from compute capability 7.5 on. Before Ampere codes would be widened to
    floats in memory, a block at a time, and lie output-major; later ones are widened in registers,
    which is as fast for few rows.
    """
    if not isinstance(weight, QuantizedWeight | QuantizedRows) or device.capability < (7, 5):
        return False
    by_output = isinstance(weight, QuantizedRows)
    groups = weight.scales.shape[1 if by_output else 0]
    is_plain = weight.form == "int8" and groups == 1 and weight.order is None
    return is_plain and (by_output or rows >= ROWS_OF_INTEGERS)


def integer_product(
    numbers: Float[Array, "T I"], weight: QuantizedWeight | QuantizedRows
) -> Float[Array, " T *outputs"]:
    """Multiply whole numbers by the codes of int8, in int32, and then by the weight's scales."""
    axis = 1 if isinstance(weight, QuantizedRows) else 0
    codes: Int8[Array, "T I"] = numbers.astype(jnp.int8)
    dims = (((1,), (axis,)), ((), ()))
    sums: Int32[Array, "T O"] = lax.dot_general(
        codes, weight.values, dims, preferred_element_type=jnp.int32
    )
    y = sums.astype(numbers.dtype) * weight.scales.reshape(1, -1).astype(numbers.dtype)
    return y.reshape(len(numbers), *weight.outputs)


def with_weight(value: Any, change: Any) -> Any:
    """Return a parameter whose matrix `change` has laid out anew, rounded or not."""
    if isinstance(value, TokenRounded):
        return replace(value, weight=change(value.weight))
    return change(value)
