"""Weights as the CPU's own product reads them: in panels of a few outputs, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import panel_product
from pallas_kernels.llvm_panels import PANEL, in_panels

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PanelWeight:
    """A matrix of I inputs and O outputs as `pallas_kernels.llvm_product` takes it.

    Attributes:
        panels: [O / PANEL, I, PANEL], the last panel filled up with zeros; those of 16 bits as
            uint16, because XLA on CPU converts floats of 16 bits to float32 as a whole.
        dtype: the weights' own.
        outputs: the shape that the outputs have in the model; their product is O.
    """

    panels: Array
    dtype: str = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, weight: np.ndarray, contract: int) -> PanelWeight:
        """A weight [in..., out...], `contract` of them inputs."""
        inputs, outputs = weight.shape[:contract], weight.shape[contract:]
        panels = in_panels(weight.reshape(prod(inputs), prod(outputs)))
        return cls(jax.device_put(panels), weight.dtype.name, outputs)

    def __getitem__(self, index: EllipsisType) -> Self:
        """Itself: a parameter's value is read as `parameter[...]`, whatever it is."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """x times the weight, in at least float32. A row's result depends on no other row."""
        exact = jnp.promote_types(x.dtype, jnp.float32)
        y = panel_product(x.astype(exact), self.panels, self.dtype)
        return y[:, : prod(self.outputs)].reshape(x.shape[0], *self.outputs)

    def columns(self, outputs: Int32[Array, " T"]) -> Float[Array, "T I"]:
        """The weights of some outputs, in their own dtype; ids beyond the last one clamp."""
        output = jnp.clip(outputs, 0, prod(self.outputs) - 1)
        found = self.panels.at[output // PANEL, :, output % PANEL].get(mode="promise_in_bounds")
        dtype = jnp.dtype(self.dtype)
        return found if found.dtype == dtype else jax.lax.bitcast_convert_type(found, dtype)
