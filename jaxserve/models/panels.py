"""Weights in the layout of our CPU product: panels of a few output columns, one after another.

Weights of experts have a leading dimension with one matrix for each expert.
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
from pallas_kernels.cpu import block_numbers, blocks
from pallas_kernels.cpu.panels import columns, in_panels, panel_shape, rows_in_order
from pallas_kernels.quantized_codes import codes_a_row

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, Shaped, UInt8

ALIGNMENT = 64  # JAX takes over arrays with this alignment without a copy


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PanelWeight:
    """A matrix of I inputs and O outputs, or one for each expert, for `pallas_kernels.cpu.product`.

    Attributes:
        panels: the weights, in the shape of `pallas_kernels.cpu.panels.panel_shape`, after a
            dimension E for experts.
        dtype: dtype of the weights.
        outputs: the shape of the outputs in the model, with product O.
        inputs: I.
        num_rows: number of real rows of a product, or of each expert. Later rows are padding. None
            if all rows are real.
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
        """Lay out the weights of experts, [E, in, out...]."""
        count, inputs, *outputs = weight.shape
        shape, stored = panel_shape(inputs, prod(outputs), weight.dtype)
        panels = aligned_empty((count, *shape), stored)
        for matrix, place in zip(weight.reshape(count, inputs, -1), panels, strict=True):
            in_panels(matrix, place)
        return cls(jax.device_put(panels), weight.dtype.name, tuple(outputs), inputs)

    def __getitem__(self, index: EllipsisType) -> PanelWeight:
        """Return self: any value of a parameter is read as `parameter[...]`."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Multiply x by the weight, in at least float32. Rows do not affect each other."""
        y = panel_product(x, self.panels, self.dtype, self.num_rows)
        return y[:, : prod(self.outputs)].reshape(x.shape[0], *self.outputs)

    def grouped(
        self, x: Float[Array, "A I"], sizes: Int32[Array, " E"]
    ) -> Float[Array, " A *outputs"]:
        """Multiply rows of x, sorted by expert, by their expert's matrix, in at least float32.

        sizes: the number of rows of each expert. Rows do not affect each other. Rows after the last
        expert's rows are zeros.
        """
        return replace(self, num_rows=sizes).dot(x)

    def columns(self, outputs: Int32[Array, " T"]) -> Float[Array, "T I"]:
        """Return the weights of the given outputs, in their dtype. Output ids are clamped."""
        ids = jnp.clip(outputs, 0, prod(self.outputs) - 1)
        return columns(self.panels, ids, self.inputs, self.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedPanels:
    """A `QuantizedWeight` or `QuantizedExperts` in panels; see `cpu.quantized_product`.

    Attributes:
        codes: [panels, rows of codes, PANEL]. For experts, all arrays have a leading dimension E.
        scales: [panels, groups, PANEL]; 16-bit scales as their bits in uint16.
        zeros: zero points, in the shape of `scales`, if the format has them.
        order: the input of each row of codes, if rows have been sorted by group.
        form: "int8", "fp8" or "int4".
        scales_dtype: dtype of the scales.
        inputs: number of inputs, without padding.
        outputs: the shape of the outputs in the model.
        num_rows: as in a PanelWeight.
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
        """Lay out a quantized weight in panels."""
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
        """Return self, as a PanelWeight does."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Multiply x by the weight, in at least float32. Rows do not affect each other."""
        y = quantized_panel_product(
            in_order(x, self.order, self.codes.shape[-2], self.form),
            self.codes,
            self.scales,
            self.zeros,
            form=self.form,
            scales_dtype=self.scales_dtype,
            num_rows=self.num_rows,
        )
        return y[:, : prod(self.outputs)].reshape(x.shape[0], *self.outputs)

    def grouped(
        self, x: Float[Array, "A I"], sizes: Int32[Array, " E"]
    ) -> Float[Array, " A *outputs"]:
        """Multiply rows of x, sorted by expert, by their expert's matrix, as a PanelWeight does."""
        return replace(self, num_rows=sizes).dot(x)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPanels:
    """A matrix in GGUF blocks, or one for each expert, in the layout of `cpu.block_product`.

    Attributes:
        panels: uint8, see `pallas_kernels.cpu.blocks.panel_shape`, after a dimension E for experts.
        form: name of the GGUF block format.
        dtype: dtype of the weights that `columns` returns.
        outputs: the shape of the outputs in the model.
        num_rows: as in a PanelWeight.
    """

    panels: UInt8[Array, "... panels blocks bytes"]
    form: str = field(metadata={"static": True})
    dtype: str = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})
    num_rows: Int32[Array, ""] | Int32[Array, " E"] | None = None

    @classmethod
    def of(cls, rows: np.ndarray, form: str, dtype: str, outputs: tuple[int, ...]) -> BlockPanels:
        """Lay out rows of GGUF blocks of the format `form`, uint8 [O, blocks, bytes], in panels."""
        block_format = blocks.FORMATS[form]
        shape = blocks.panel_shape(form, rows.shape[1] * block_format.size, len(rows))
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
        """Lay out the matrices of `count` experts, each as rows of GGUF blocks."""
        panels: np.ndarray | None = None
        for index, matrix in enumerate(rows):
            if panels is None:
                inputs = matrix.shape[1] * blocks.FORMATS[form].size
                shape = blocks.panel_shape(form, inputs, len(matrix))
                panels = aligned_empty((count, *shape), np.dtype(np.uint8))
            blocks.in_panels(matrix, form, panels[index])
        return cls(jax.device_put(panels), form, dtype, outputs)

    def __getitem__(self, index: EllipsisType) -> BlockPanels:
        """Return self, as a PanelWeight does."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Multiply x by the weight, in float32. Rows do not affect each other."""
        x = padded(x, self.panels.shape[-2] * blocks.FORMATS[self.form].size)
        y = block_product(x, self.panels, self.form, self.num_rows)
        return y[:, : prod(self.outputs)].reshape(x.shape[0], *self.outputs)

    def grouped(
        self, x: Float[Array, "A I"], sizes: Int32[Array, " E"]
    ) -> Float[Array, " A *outputs"]:
        """Multiply rows of x, sorted by expert, by their expert's matrix, as a PanelWeight does."""
        return replace(self, num_rows=sizes).dot(x)

    def columns(self, outputs: Int32[Array, " T"]) -> Float[Array, "T I"]:
        """Return the weights of the given outputs, in `dtype`. Output ids are clamped."""
        ids = jnp.clip(outputs, 0, prod(self.outputs) - 1)
        return block_numbers.columns(self.panels, ids, self.form).astype(self.dtype)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an array with the alignment that lets JAX take it over without a copy."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def with_panels(value: Any) -> Any:
    """Convert a quantized matrix, or experts, to panels; return other values unchanged."""
    if isinstance(value, QuantizedWeight | QuantizedExperts):
        return _as_blocks(value) or QuantizedPanels.of(value)
    if isinstance(value, SplitWeight):
        return replace(value, weights=tuple(map(with_panels, value.weights)))
    return value


def _as_blocks(weight: QuantizedWeight | QuantizedExperts) -> BlockPanels | None:
    """Convert codes to a GGUF block format with equal numbers, or None without such a format."""
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
    """Return a parameter tree whose panels multiply only the first `num_rows` rows of x."""

    def has_panels(leaf: Any) -> bool:
        return isinstance(leaf, PanelWeight | QuantizedPanels | BlockPanels)

    def limited(leaf: Any) -> Any:
        return replace(leaf, num_rows=num_rows) if has_panels(leaf) else leaf

    return jax.tree.map(limited, tree, is_leaf=has_panels)
