"""Weights as the CPU's own product reads them: in panels of a few outputs, one after the other.

Those of experts are a matrix for each, side by side along a dimension in front.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.quantized import (
    QuantizedExperts,
    QuantizedWeight,
    SplitWeight,
    in_order,
    padded,
)
from pallas_kernels import block_product, panel_product, quantized_panel_product
from pallas_kernels.cpu import blocks
from pallas_kernels.cpu.panels import columns, in_panels, panel_shape, rows_in_order
from pallas_kernels.quantized_codes import codes_a_row

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, Shaped, UInt8

ALIGNMENT = 64  # JAX takes arrays over without a copy where they begin at such an address


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PanelWeight:
    """A matrix of I inputs and O outputs, or experts', as `pallas_kernels.cpu.product` takes them.

    Attributes:
        panels: the weights; `pallas_kernels.cpu.panels.panel_shape` says how they lie, those of
            experts [E, ...].
        dtype: the weights' own.
        outputs: the shape that the outputs have in the model; their product is O.
        inputs: I.
        num_rows: how many rows of a product, or of each expert's, count; those behind are padding.
            None for all.
    """

    panels: Shaped[Array, " ..."]
    dtype: str = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    num_rows: Int32[Array, ""] | Int32[Array, " E"] | None = None

    @classmethod
    def of(cls, weight: np.ndarray, contract: int) -> PanelWeight:
        """Lay out a weight [in..., out...], whose first `contract` dimensions are inputs."""
        inputs, outputs = prod(weight.shape[:contract]), weight.shape[contract:]
        shape, stored = panel_shape(inputs, prod(outputs), weight.dtype)
        panels = in_panels(weight.reshape(inputs, prod(outputs)), aligned_empty(shape, stored))
        return cls(jax.device_put(panels), weight.dtype.name, outputs, inputs)

    @classmethod
    def of_experts(cls, weight: np.ndarray) -> PanelWeight:
        """Lay out every expert's weight, [E, in, out...]."""
        count, inputs, *outputs = weight.shape
        shape, stored = panel_shape(inputs, prod(outputs), weight.dtype)
        panels = aligned_empty((count, *shape), stored)
        for matrix, place in zip(weight.reshape(count, inputs, -1), panels, strict=True):
            in_panels(matrix, place)
        return cls(jax.device_put(panels), weight.dtype.name, tuple(outputs), inputs)

    def __getitem__(self, index: EllipsisType) -> PanelWeight:
        """Return itself: a parameter's value is read as `parameter[...]`, whatever it is."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Multiply x, in at least float32. A row's result depends on no other row."""
        y = panel_product(x, self.panels, self.dtype, self.num_rows)
        return y[:, : prod(self.outputs)].reshape(x.shape[0], *self.outputs)

    def grouped(
        self, x: Float[Array, "A I"], sizes: Int32[Array, " E"]
    ) -> Float[Array, " A *outputs"]:
        """Multiply rows sorted by expert, each by its expert's matrix, in at least float32.

        `sizes` counts each expert's rows. A row's result depends on no other row; those behind the
        last expert's are zeros.
        """
        return replace(self, num_rows=sizes).dot(x)

    def columns(self, outputs: Int32[Array, " T"]) -> Float[Array, "T I"]:
        """Return the weights of some outputs, in their own dtype; ids beyond the last one clamp."""
        found = jnp.clip(outputs, 0, prod(self.outputs) - 1)
        return columns(self.panels, found, self.inputs, self.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedPanels:
    """A `QuantizedWeight` or `QuantizedExperts` in panels; see `cpu.quantized_product`.

    Attributes:
        codes: [panels, rows of codes, PANEL]; these arrays of experts are [E, ...].
        scales: [panels, groups, PANEL]; those of 16 bits as their bits.
        zeros: likewise, where the format has them.
        order: which input each row is for, where rows have been sorted by group.
        form: "int8", "fp8" or "int4".
        scales_dtype: what the scales are.
        inputs: how many inputs there are, padding not counted.
        outputs: the shape that the outputs have in the model.
        num_rows: as of a PanelWeight.
    """

    codes: Shaped[Array, "... panels rows PANEL"]
    scales: Shaped[Array, "... panels groups PANEL"]
    zeros: UInt8[Array, "... panels groups PANEL"] | None
    order: Int32[Array, " I"] | None
    form: str = field(metadata={"static": True})
    scales_dtype: str = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})
    num_rows: Int32[Array, ""] | Int32[Array, " E"] | None = None

    @classmethod
    def of(cls, weight: QuantizedWeight | QuantizedExperts) -> QuantizedPanels:
        """Lay out a quantized weight."""
        scales = np.asarray(weight.scales)
        bits = scales.view(np.uint16) if scales.dtype.itemsize == 2 else scales

        def laid_out(array: Any) -> Array:
            return jax.device_put(rows_in_order(np.asarray(array)))

        return cls(
            laid_out(weight.values),
            laid_out(bits),
            None if weight.zeros is None else laid_out(weight.zeros),
            weight.order if isinstance(weight, QuantizedWeight) else None,
            weight.form,
            scales.dtype.name,
            weight.inputs,
            weight.outputs,
        )

    def __getitem__(self, index: EllipsisType) -> QuantizedPanels:
        """Return itself, as a PanelWeight does."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Multiply x, in at least float32. A row's result depends on no other row."""
        y = quantized_panel_product(
            *(in_order(x, self.order, self.codes.shape[-2], self.form), self.codes),
            *(self.scales, self.zeros),
            form=self.form,
            scales_dtype=self.scales_dtype,
            num_rows=self.num_rows,
        )
        return y[:, : prod(self.outputs)].reshape(x.shape[0], *self.outputs)

    def grouped(
        self, x: Float[Array, "A I"], sizes: Int32[Array, " E"]
    ) -> Float[Array, " A *outputs"]:
        """Multiply rows sorted by expert, as a PanelWeight does."""
        return replace(self, num_rows=sizes).dot(x)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPanels:
    """A matrix in blocks as a GGUF file has them, or experts', as `cpu.block_product` takes them.

    Attributes:
        panels: uint8, see `pallas_kernels.cpu.blocks.panel_shape`; those of experts [E, ...].
        form: name of the blocks' format.
        dtype: of the weights that `columns` returns.
        outputs: the shape that the outputs have in the model.
        num_rows: as of a PanelWeight.
    """

    panels: UInt8[Array, "... panels blocks bytes"]
    form: str = field(metadata={"static": True})
    dtype: str = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})
    num_rows: Int32[Array, ""] | Int32[Array, " E"] | None = None

    @classmethod
    def of(cls, rows: np.ndarray, form: str, dtype: str, outputs: tuple[int, ...]) -> BlockPanels:
        """Lay out rows of blocks, uint8 [O, blocks, bytes of one], of the format `form`."""
        made = blocks.FORMATS[form]
        shape = blocks.panel_shape(form, rows.shape[1] * made.size, len(rows))
        panels = aligned_empty(shape, np.dtype(np.uint8))
        blocks.in_panels(rows, form, panels)
        return cls(jax.device_put(panels), form, dtype, outputs)

    @classmethod
    def of_experts(
        cls,
        rows: Iterable[np.ndarray],
        count: int,
        form: str,
        dtype: str,
        outputs: tuple[int, ...],
    ) -> BlockPanels:
        """Lay out the rows of the matrices of so many experts, one after the other."""
        panels: np.ndarray | None = None
        for index, own in enumerate(rows):
            if panels is None:
                inputs = own.shape[1] * blocks.FORMATS[form].size
                shape = blocks.panel_shape(form, inputs, len(own))
                panels = aligned_empty((count, *shape), np.dtype(np.uint8))
            blocks.in_panels(own, form, panels[index])
        return cls(jax.device_put(panels), form, dtype, outputs)

    def __getitem__(self, index: EllipsisType) -> BlockPanels:
        """Return itself, as a PanelWeight does."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Multiply x, in float32. A row's result depends on no other row."""
        x = padded(x, self.panels.shape[-2] * blocks.FORMATS[self.form].size)
        y = block_product(x, self.panels, self.form, self.num_rows)
        return y[:, : prod(self.outputs)].reshape(x.shape[0], *self.outputs)

    def grouped(
        self, x: Float[Array, "A I"], sizes: Int32[Array, " E"]
    ) -> Float[Array, " A *outputs"]:
        """Multiply rows sorted by expert, as a PanelWeight does."""
        return replace(self, num_rows=sizes).dot(x)

    def columns(self, outputs: Int32[Array, " T"]) -> Float[Array, "T I"]:
        """Return the weights of some outputs; ids beyond the last one clamp."""
        found = jnp.clip(outputs, 0, prod(self.outputs) - 1)
        return blocks.columns(self.panels, found, self.form).astype(self.dtype)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an array whose memory JAX takes over as it is."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def with_panels(value: Any) -> Any:
    """Lay a parameter's codes out in panels where it is a quantized matrix, or experts'."""
    if isinstance(value, QuantizedWeight | QuantizedExperts):
        return _as_blocks(value) or QuantizedPanels.of(value)
    if isinstance(value, SplitWeight):
        return replace(value, weights=tuple(map(with_panels, value.weights)))
    return value


def _as_blocks(weight: QuantizedWeight | QuantizedExperts) -> BlockPanels | None:
    """Lay codes out as blocks that hold the same numbers; None where there are no such."""
    rows = weight.values.shape[-2] * codes_a_row(weight.form)
    form = blocks.format_of(weight.form, rows, weight.scales, weight.zeros)
    if form is None or getattr(weight, "order", None) is not None:
        return None
    parts = (weight.values, weight.scales, weight.zeros)
    arrays = [np.asarray(part) for part in parts if part is not None]
    if isinstance(weight, QuantizedWeight):
        return BlockPanels.of(blocks.rows_of_codes(*arrays), form, "float32", weight.outputs)
    experts = map(blocks.rows_of_codes, *arrays)
    return BlockPanels.of_experts(experts, len(arrays[0]), form, "float32", weight.outputs)


def with_num_rows(tree: Any, num_rows: Int32[Array, ""]) -> Any:
    """Return a tree of parameters whose panels multiply `num_rows` rows and leave padding alone."""

    def has_panels(leaf: Any) -> bool:
        return isinstance(leaf, PanelWeight | QuantizedPanels | BlockPanels)

    def limited(leaf: Any) -> Any:
        return replace(leaf, num_rows=num_rows) if has_panels(leaf) else leaf

    return jax.tree.map(limited, tree, is_leaf=has_panels)
