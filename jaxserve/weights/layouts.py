"""Lay matrices out for the products of a device.

Every function takes NumPy arrays, or `jax.ShapeDtypeStruct` to compute the shapes of the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import jax
import numpy as np

from jaxserve.models.placed_weight import (
    EXPERTS,
    FULL,
    PROJECTIONS,
    PlacedWeight,
    SplitWeight,
    with_weights,
)
from jaxserve.models.token_rounding import TokenRounded
from jaxserve.models.transposed_weight import TransposedWeight
from pallas_kernels.cpu import blocks
from pallas_kernels.cpu.panels import PANEL, in_panels, panel_shape, rows_in_order
from pallas_kernels.quantized_codes import codes_a_row

ALIGNMENT = 64  # JAX takes over arrays with this alignment without a copy
# The input axes and the output axes of a parameter. An axis before them numbers the experts.
Axes = tuple[tuple[int, ...], tuple[int, ...]]
PLACED = PlacedWeight | SplitWeight | TokenRounded | TransposedWeight
"""Types of the values of parameters that are not plain arrays."""


def is_shape(array: Any) -> bool:
    """Return whether `array` is a `ShapeDtypeStruct`, which describes an array without values."""
    return isinstance(array, jax.ShapeDtypeStruct)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an uninitialized array, aligned so that JAX can take it over without a copy."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def panel_axes(names: Any, dtype: np.dtype) -> Axes | None:
    """Return the input axes and output axes of a parameter, or None if it is not put in panels.

    An embedding table is put in panels only if its dtype has 16 bits. XLA on CPU would convert the
    whole table to float32 for a lookup in a loop, but a lookup in panels reads the bits directly.

    Args:
        names: logical axes of the parameter.
        dtype: dtype of the parameter.
    """
    if names == ("vocab", "embed"):
        return ((1,), (0,)) if dtype.itemsize == 2 else None
    if names in EXPERTS:
        return (1,), tuple(range(2, len(names)))
    contract = 1 if names in (("embed", "vocab"), ("embed", "experts")) else PROJECTIONS.get(names)
    if contract is None:
        return None
    return tuple(range(contract)), tuple(range(contract, len(names)))


def number_panels(shape: tuple[int, ...], dtype: np.dtype, axes: Axes) -> PlacedWeight:
    """Return a PlacedWeight of unquantized numbers in panels, with a shape in place of its array.

    Args:
        shape: shape of the parameter.
        dtype: dtype of its numbers.
        axes: result of `panel_axes`.
    """
    inputs, outputs = (tuple(shape[axis] for axis in group) for group in axes)
    leading = shape[: len(shape) - len(inputs) - len(outputs)]
    matrix, stored = panel_shape(prod(inputs), prod(outputs), dtype)
    panels: Any = jax.ShapeDtypeStruct((*leading, *matrix), stored)
    arrays = panels, None, None, None
    return PlacedWeight(*arrays, FULL, prod(inputs), outputs, "panels", dtype.name)


def block_panels(
    form: str, inputs: int, outputs: tuple[int, ...], dtype: str, leading: tuple[int, ...] = ()
) -> PlacedWeight:
    """Return a PlacedWeight of GGUF blocks in panels, with a shape in place of its array.

    Args:
        form: name of the block format.
        inputs: number of inputs.
        outputs: shape of the outputs.
        dtype: dtype in which `PlacedWeight.columns` returns weights.
        leading: (number of experts,) for experts, otherwise empty.
    """
    shape = *leading, *blocks.panel_shape(form, inputs, prod(outputs))
    panels: Any = jax.ShapeDtypeStruct(shape, np.uint8)
    return PlacedWeight(panels, None, None, None, form, inputs, outputs, "block_panels", dtype)


def filled_blocks(weight: PlacedWeight, matrices: Iterable[np.ndarray]) -> PlacedWeight:
    """Return `weight`, a result of `block_panels`, with its panels filled from the given blocks.

    `matrices` are uint8 [outputs, blocks, bytes per block], one for each expert, or a single one.
    """
    panels = aligned_empty(weight.values.shape, np.dtype(np.uint8))
    targets = panels.reshape(-1, *panels.shape[-3:])
    for rows, target in zip(matrices, targets, strict=True):
        blocks.in_panels(rows, weight.form, target)
    return replace(weight, values=panels)


def laid_out(value: Any, axes: Any) -> Any:
    """Return a parameter, or a device's part of one, in panels for CPU products.

    The result is `value` itself if it is in panels already, or if its axes have no panels.

    Args:
        value: an array, or a quantized parameter.
        axes: logical axes of the parameter.
    """
    if isinstance(value, PLACED):
        return with_weights(value, _codes_in_panels)
    axes_of_panel = panel_axes(axes, np.dtype(value.dtype))
    if axes_of_panel is None:
        return value
    weight = number_panels(tuple(value.shape), np.dtype(value.dtype), axes_of_panel)
    if is_shape(value):
        return weight
    panels = aligned_empty(weight.values.shape, np.dtype(weight.values.dtype))
    inputs, outputs = axes_of_panel
    order = *range(value.ndim - len(inputs) - len(outputs)), *inputs, *outputs
    matrices = value.transpose(order).reshape(-1, weight.inputs, prod(weight.outputs))
    for matrix, target in zip(matrices, panels.reshape(-1, *panels.shape[-3:]), strict=True):
        in_panels(matrix, target)
    return replace(weight, values=panels)


def _codes_in_panels(weight: PlacedWeight) -> PlacedWeight:
    """Return an input-major weight of codes in panels, of GGUF blocks if these give equal numbers.

    Otherwise the panels hold codes. Weights in another layout are returned unchanged.
    """
    if weight.layout != "input_major":
        return weight
    assert weight.scales is not None
    *leading, rows, _ = weight.values.shape
    inputs = rows * codes_a_row(weight.form)
    form = blocks.format_of(weight.form, inputs, weight.scales, weight.zeros)
    arrays = [weight.values, weight.scales, weight.zeros]
    if form is not None and weight.order is None:
        placed = block_panels(form, inputs, weight.outputs, "float32", tuple(leading))
        if is_shape(weight.values):
            return placed
        stored = [np.asarray(array) for array in arrays if array is not None]
        stored = [array.reshape(-1, *array.shape[-2:]) for array in stored]
        return filled_blocks(placed, map(blocks.rows_of_codes, *stored))
    dtype = np.dtype(weight.scales.dtype)
    values, scales, zeros = map(_panels, arrays)
    if dtype.itemsize == 2:
        bits = np.dtype(np.uint16)
        scales = jax.ShapeDtypeStruct(scales.shape, bits) if is_shape(scales) else scales.view(bits)
    return replace(
        weight, values=values, scales=scales, zeros=zeros, layout="code_panels", dtype=dtype.name
    )


def _panels(array: Any) -> Any:
    if array is None:
        return None
    if not is_shape(array):
        return rows_in_order(np.asarray(array))
    *many, rows, outputs = array.shape
    return jax.ShapeDtypeStruct((*many, -(-outputs // PANEL), rows, PANEL), array.dtype)


def output_major(value: Any) -> Any:
    """Return a quantized parameter with its codes transposed to one row for each output.

    Parameters that are not quantized, and experts, are returned unchanged.
    """
    return with_weights(value, _transposed)


def _transposed(weight: PlacedWeight) -> PlacedWeight:
    if weight.layout != "input_major" or len(weight.values.shape) != 2:
        return weight
    arrays = weight.values, weight.scales, weight.zeros
    values, scales, zeros = (None if array is None else _turned(array) for array in arrays)
    return replace(weight, values=values, scales=scales, zeros=zeros, layout="output_major")


def _turned(array: Any) -> Any:
    if not is_shape(array):
        return array.T
    return jax.ShapeDtypeStruct(array.shape[::-1], array.dtype)
