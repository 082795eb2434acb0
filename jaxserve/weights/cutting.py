"""Cut parameters into parts for several devices, after they were read or quantized whole.

The codes are those of the whole matrix, because a matrix quantized part by part would have other
scales. Outputs can be cut anywhere. Inputs are cut only between groups that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import numpy as np

from jaxserve.errors import UnsupportedModel
from jaxserve.models.placed_weight import EXPERTS, PROJECTIONS, PlacedWeight, SplitWeight
from jaxserve.models.shards import AXIS, Part
from jaxserve.models.token_rounding import TokenRounded
from jaxserve.models.transposed_weight import TransposedWeight
from jaxserve.weights.layouts import block_panels, filled_blocks, is_shape
from pallas_kernels.cpu.blocks import FORMATS
from pallas_kernels.cpu.panels import PANEL
from pallas_kernels.quantized_codes import codes_a_row


def cut(value: Any, axes: Any, part: Part, path: str) -> Any:
    """Return one device's part of a parameter.

    Args:
        value: the whole parameter, in any form except panels of floats or of codes, with arrays or
            with shapes.
        axes: logical axes of the parameter.
        part: the index ranges of the part.
        path: path of the parameter, for errors.

    Returns:
        The part in the form of `value`, with arrays on the host or with shapes.

    Raises:
        UnsupportedModel: the part ends within a group of inputs, or its matrix would be cut between
            inputs that are sorted by group.
    """
    if isinstance(value, TokenRounded):
        # An activation row is rounded by the maximum over its inputs on all devices.
        axis = AXIS if _cuts_inputs(axes, part) else None
        return replace(value, weight=cut(value.weight, axes, part, path), axis=axis)
    if isinstance(value, TransposedWeight):
        return _cut_heads(value, part, path)
    if isinstance(value, SplitWeight):
        return _cut_parts(value, PROJECTIONS[axes], part, path)
    if isinstance(value, PlacedWeight):
        return _cut_matrix(value, _chosen(axes, part), path)
    if is_shape(value):
        return jax.ShapeDtypeStruct(part.own_shape, value.dtype)
    return part.cut(np.asarray(value))


def _cuts_inputs(axes: Any, part: Part) -> bool:
    first = 1 if axes in EXPERTS else 0
    inputs = slice(first, first + PROJECTIONS.get(axes, 1))
    return part.own_shape[inputs] != part.shape[inputs]


@dataclass(frozen=True)
class _Chosen:
    """The inputs, outputs and experts of a weight that one device has.

    Attributes:
        inputs: consecutive indices of inputs.
        outputs: indices of outputs in any order.
        shape: shape of the outputs of the part.
        experts: the experts, or None for a single matrix.
        leading: (number of experts,), or empty for a single matrix.
    """

    inputs: np.ndarray
    outputs: np.ndarray
    shape: tuple[int, ...]
    experts: slice | np.ndarray | None = None
    leading: tuple[int, ...] = ()


def _chosen(axes: Any, part: Part) -> _Chosen:
    if axes in EXPERTS:
        matrix, spans = Part(part.shape[1:], part.spans[1:]), part.spans[0]
        # A slice, if possible, selects the experts without a copy.
        experts = slice(*spans[0]) if len(spans) == 1 else part.inputs(1)
        chosen = matrix.inputs(1), matrix.outputs(1), matrix.own_shape[1:]
        return _Chosen(*chosen, experts, part.own_shape[:1])
    if axes == ("vocab", "embed"):  # a table, whose rows are outputs
        return _Chosen(part.outputs(1), part.inputs(1), part.own_shape[:1])
    contract = PROJECTIONS.get(axes, 1)
    return _Chosen(part.inputs(contract), part.outputs(contract), part.own_shape[contract:])


def _cut_heads(value: TransposedWeight, part: Part, path: str) -> TransposedWeight:
    """Return one device's heads of a weight that is multiplied from the side of its outputs."""
    (first, end), groups = part.spans[0][0], value.scales.shape[1]
    count, size, group = (end - first) * groups, part.shape[1], value.weight.outputs[0]
    chosen = _Chosen(
        np.arange(size), np.arange(group), (group,), slice(first * groups, end * groups), (count,)
    )

    def taken(array: Any) -> Any:
        if is_shape(array):
            return jax.ShapeDtypeStruct((end - first, *array.shape[1:]), array.dtype)
        return None if array is None else np.asarray(array)[first:end]

    return replace(
        value,
        weight=_cut_matrix(value.weight, chosen, path),
        scales=taken(value.scales),
        offsets=taken(value.offsets),
    )


def _cut_matrix(weight: PlacedWeight, chosen: _Chosen, path: str) -> PlacedWeight:
    """Return one device's part of a matrix of codes or GGUF blocks, or of all experts' matrices.

    Raises:
        UnsupportedModel: see `cut`.
    """
    is_blocks = weight.layout == "block_panels"
    if weight.order is not None and len(chosen.inputs) < weight.inputs:
        raise UnsupportedModel(
            f"{path}: its inputs are sorted by group (desc_act) or by value head (GGUF), and "
            "tensor_parallel_size would cut them; allowed: 1, a checkpoint without desc_act, or "
            "a dtype, which widens a file's blocks"
        )
    if is_blocks:
        return replace(_cut_blocks(weight, chosen, path), order=weight.order)
    assert weight.scales is not None
    rows, of_groups = slice(None), slice(None)
    if len(chosen.inputs) < weight.inputs:
        first, last = int(chosen.inputs[0]), int(chosen.inputs[-1]) + 1
        width, group = codes_a_row(weight.form), weight.granularity
        if not is_shape(weight.values):
            check_border(path, last - first, group)
        rows = slice(first // width, last // width)
        if weight.scales.shape[-2] > 1:
            of_groups = slice(first // group, last // group)

    def taken(array: Any, chosen_rows: slice) -> Any:
        if array is None:
            return None
        if is_shape(array):
            count = len(range(*chosen_rows.indices(array.shape[-2])))
            shape = *chosen.leading, count, len(chosen.outputs)
            return jax.ShapeDtypeStruct(shape, array.dtype)
        array, outputs = np.asarray(array), chosen.outputs
        array = (array if chosen.experts is None else array[chosen.experts])[..., chosen_rows, :]
        is_whole = len(outputs) == array.shape[-1] and (np.diff(outputs) == 1).all()
        return np.ascontiguousarray(array if is_whole else array[..., outputs])

    return replace(
        weight,
        values=taken(weight.values, rows),
        scales=taken(weight.scales, of_groups),
        zeros=taken(weight.zeros, of_groups),
        inputs=len(chosen.inputs),
        outputs=chosen.shape,
    )


def check_border(path: str, inputs: int, group: int) -> None:
    """Check that `inputs`, the number of inputs of each device, is a multiple of the group size.

    Args:
        path: path of the parameter.
        inputs: number of inputs.
        group: number of inputs that share a scale.

    Raises:
        UnsupportedModel: it is not a multiple. The error names the parameter and both sizes.
    """
    if inputs % group:
        raise UnsupportedModel(
            f"{path}: tensor_parallel_size would leave each device {inputs} of its inputs, which "
            f"share a scale in groups of {group}; allowed: a multiple of {group}"
        )


def _split_pieces(
    weight: SplitWeight, contract: int, part: Part
) -> Iterator[tuple[PlacedWeight, np.ndarray, tuple[tuple[int, int], ...]]]:
    """Yield the matrices of a fused projection that a device has outputs of.

    Args:
        weight: the whole projection.
        contract: number of its dimensions in front that are inputs.
        part: the device's shard of the projection.

    Yields:
        (matrix, outputs, place): a matrix of `weight`, the indices of the device's outputs within
        this matrix, in the shard's order, and their (start, size) along each output dimension of
        the shard.
    """
    piece_numbers = np.full(part.shape[contract:], -1, np.int64).reshape(-1)
    outputs = part.outputs(contract)
    piece_numbers[outputs] = np.arange(len(outputs))
    piece_numbers = piece_numbers.reshape(part.shape[contract:])
    for matrix, place in zip(weight.weights, weight.places, strict=True):
        window = tuple(slice(start, start + size) for start, size in place)
        # For each output of the matrix its number in the piece, or -1.
        numbers = piece_numbers[window].reshape(-1)
        present = np.flatnonzero(numbers >= 0)
        if len(present):
            piece_place = _place(numbers[present], part.own_shape[contract:])
            yield matrix, present[np.argsort(numbers[present])], piece_place


def _cut_parts(weight: SplitWeight, contract: int, part: Part, path: str) -> SplitWeight:
    """Return one device's part of a fused projection, with each of its matrices cut separately.

    Matrices without outputs on the device are omitted.
    """
    weights, places, inputs = [], [], part.inputs(contract)
    for matrix, outputs, place in _split_pieces(weight, contract, part):
        weights.append(_cut_matrix(matrix, _Chosen(inputs, outputs, (len(outputs),)), path))
        places.append(place)
    return SplitWeight(tuple(weights), tuple(places), part.own_shape[contract:])


def _place(numbers: np.ndarray, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    # `numbers` are flat indices that fill a window of `shape`.
    corners = (np.unravel_index(numbers.min(), shape), np.unravel_index(numbers.max(), shape))
    place = tuple((int(a), int(b - a + 1)) for a, b in zip(*corners, strict=True))
    assert prod(size for _, size in place) == len(numbers)
    return place


def _cut_blocks(weight: PlacedWeight, chosen: _Chosen, path: str) -> PlacedWeight:
    form, leading = weight.form, chosen.leading
    piece = block_panels(form, len(chosen.inputs), chosen.shape, weight.dtype, leading)
    if is_shape(weight.values):
        return piece
    panels = np.asarray(weight.values)
    matrices = panels[None] if chosen.experts is None else panels[chosen.experts]
    rows = (_rows_taken(matrix, form, chosen.inputs, chosen.outputs, path) for matrix in matrices)
    return filled_blocks(piece, rows)


def _rows_taken(
    panels: np.ndarray,
    form: str,
    inputs: np.ndarray,
    outputs: np.ndarray,
    path: str,
) -> np.ndarray:
    """Return the GGUF blocks of some inputs and outputs, uint8 [outputs, blocks, bytes per block].

    Outputs beyond the panels are zeros.

    Args:
        panels: the panels of the matrix.
        form: name of the block format.
        inputs: consecutive indices of inputs, whole blocks.
        outputs: indices of outputs.
        path: path of the parameter, for errors.
    """
    size = FORMATS[form].size
    first, last = int(inputs[0]), int(inputs[-1]) + 1
    if last - first < panels.shape[1] * size:
        check_border(path, last - first, size)
    lowest = int(outputs.min()) // PANEL
    used = panels[lowest : int(outputs.max()) // PANEL + 1, first // size : last // size]
    rows = rows_of_panels(used, form)
    # Outputs that pad the last panel are zeros in the panel. Zeros beyond it are added here.
    missing = int(outputs.max()) - lowest * PANEL + 1 - len(rows)
    if missing > 0:
        rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), np.uint8)])
    chosen = outputs - lowest * PANEL
    return rows[chosen]


def rows_of_panels(panels: np.ndarray, form: str) -> np.ndarray:
    """Convert panels back to rows of GGUF blocks, uint8 [outputs, blocks, bytes per block].

    This is the inverse of `pallas_kernels.cpu.blocks.in_panels`, including the rows that pad the
    last panel.
    """
    count, blocks = panels.shape[:2]
    fields = []
    for place in FORMATS[form].in_panel.values():
        items = np.moveaxis(place.items_of(panels), -1, 1)
        field = np.ascontiguousarray(items).reshape(count * PANEL, blocks, -1)
        fields.append(field.view(np.uint8))
    return np.concatenate(fields, axis=2)
