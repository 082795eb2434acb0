"""Products whose activations are rounded to int8, each row with its own scale.

Checkpoints of compressed-tensors with dynamic int8 `input_activations` for each token are made for
these products. With a as the largest magnitude of a row, x is rounded to the integer nearest to x *
127 / a, and the product multiplies that integer by a / 127, as in vLLM. Rows do not affect each
other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models.placed_weight import PlacedWeight
from pallas_kernels.devices import DeviceLimits, target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int8, Int32

LARGEST = 127
TINY = 1e-36  # a row below it becomes zeros: 127 / a would overflow
ROWS_OF_INTEGERS = 512
"""Rows from which products of int8 by int8 take the place of widened codes where Triton runs.

XLA first transposes codes that lie input-major (`GpuLayoutAssignment`: int8 is contracted over the
last dimension), which moves twice the bytes that a product of few rows reads. No card has measured
this number."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenRounded:
    """A quantized matrix, or one for each expert, whose input activations are rounded to int8.

    On CPU the weight is multiplied by the rounded integers times their scale. On a GPU it is
    multiplied by the integers (int8 by int8 with sums in int32), or by the same integers in the
    activations' dtype with float32 sums, which are equal below 2^24. The scales are applied last.

    Attributes:
        weight: a `PlacedWeight` or `SplitWeight` in any layout.
        axis: mesh axis over which the inputs of a row are divided, or None if each device has all.
    """

    weight: Any
    axis: str | None = field(default=None, metadata={"static": True})

    def __getitem__(self, index: EllipsisType) -> TokenRounded:
        """Return self, so that `parameter[...]` reads this weight as it reads an array."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Round each row of x to int8 with its own scale, and multiply it by the quantized weight.

        Returns [T, outputs...], in at least float32.
        """
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
    """Round each row of x to integers from -127 to 127 with its own scale.

    Returns the integers [T, I] and the scales [T, 1], both as floats of at least 32 bits. x is
    approximately integers * scales. A row with NaN or infinity gives NaN. If the inputs are divided
    over devices along `axis`, the scale is that of the whole row.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(wide), axis=1, keepdims=True)
    if axis is not None:
        largest = lax.pmax(largest, axis)
    steps = jnp.where(largest > TINY, LARGEST / largest, 0)
    # Multiply by the reciprocal: XLA replaces a division by a constant in some programs only.
    return jnp.round(wide * steps), largest * (1 / LARGEST)


def multiplies_integers(weight: Any, rows: int, device: DeviceLimits) -> bool:
    """Return whether a GPU multiplies int8 activations by int8 codes, with sums in int32.

    True requires a PlacedWeight of int8 codes, in the order of inputs and with one scale for each
    output, and compute capability 7.5. If its codes are input-major (from Ampere on), it also
    requires at least `ROWS_OF_INTEGERS` rows, because widening codes in registers is as fast for
    few rows.
    """
    if not isinstance(weight, PlacedWeight) or weight.scales is None or weight.in_panels:
        return False
    if device.capability < (7, 5):
        return False
    by_output = weight.layout == "output_major"
    groups = weight.scales.shape[1 if by_output else 0]
    is_plain = weight.form == "int8" and groups == 1 and weight.order is None
    return is_plain and (by_output or rows >= ROWS_OF_INTEGERS)


def integer_product(
    numbers: Float[Array, "T I"], weight: PlacedWeight
) -> Float[Array, " T *outputs"]:
    """Multiply integers by int8 codes with sums in int32, then apply the weight's scales.

    Returns [T, outputs...] in the dtype of `numbers`. The caller applies the scales of its rows.

    Args:
        numbers: integers of int8's range, in a float dtype.
        weight: int8 codes with one scale for each output.
    """
    assert weight.scales is not None
    axis = 1 if weight.layout == "output_major" else 0
    codes: Int8[Array, "T I"] = numbers.astype(jnp.int8)
    dims = (((1,), (axis,)), ((), ()))
    sums: Int32[Array, "T O"] = lax.dot_general(
        codes, weight.values, dims, preferred_element_type=jnp.int32
    )
    y = sums.astype(numbers.dtype) * weight.scales.reshape(1, -1).astype(numbers.dtype)
    return y.reshape(len(numbers), *weight.outputs)
