"""Weights as the CPU's own product reads them: in panels of a few outputs, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import panel_product
from pallas_kernels.llvm_panels import columns, in_panels

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PanelWeight:
    """A matrix of I inputs and O outputs as `pallas_kernels.llvm_product` takes it.

    Attributes:
        panels: the weights; `pallas_kernels.llvm_panels.panel_shape` says how they lie.
        dtype: the weights' own.
        outputs: the shape that the outputs have in the model; their product is O.
        inputs: I.
        num_rows: i32[], how many rows of a product count, those behind are padding; None for all.
    """

    panels: Array
    dtype: str = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    num_rows: Array | None = None

    @classmethod
    def of(cls, weight: np.ndarray, contract: int) -> PanelWeight:
        """A weight [in..., out...], `contract` of them inputs."""
        inputs, outputs = prod(weight.shape[:contract]), weight.shape[contract:]
        panels = in_panels(weight.reshape(inputs, prod(outputs)))
        return cls(jax.device_put(panels), weight.dtype.name, outputs, inputs)

    def __getitem__(self, index: EllipsisType) -> Self:
        """Itself: a parameter's value is read as `parameter[...]`, whatever it is."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """x times the weight, in at least float32. A row's result depends on no other row."""
        y = panel_product(x, self.panels, self.dtype, self.num_rows)
        return y[:, : prod(self.outputs)].reshape(x.shape[0], *self.outputs)

    def columns(self, outputs: Int32[Array, " T"]) -> Float[Array, "T I"]:
        """The weights of some outputs, in their own dtype; ids beyond the last one clamp."""
        found = jnp.clip(outputs, 0, prod(self.outputs) - 1)
        return columns(self.panels, found, self.inputs, self.dtype)


def padded_beyond(tree: Any, num_rows: Array) -> Any:
    """A tree of parameters whose panels multiply so many rows (i32[]) and leave padding alone."""

    def limited(leaf: Any) -> Any:
        return replace(leaf, num_rows=num_rows) if isinstance(leaf, PanelWeight) else leaf

    return jax.tree.map(limited, tree, is_leaf=lambda leaf: isinstance(leaf, PanelWeight))
