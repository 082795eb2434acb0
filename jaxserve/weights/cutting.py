"""Cut parameters into parts for several devices, after they were read or quantized whole.

The codes are those of the whole matrix, because a matrix quantized part by part would have other
scales. Outputs can be cut anywhere. Inputs are cut only between groups that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from jaxserve.errors import UnsupportedModel
from jaxserve.models.panels import BlockPanels
from jaxserve.models.quantized import (
    EXPERTS,
    PROJECTIONS,
    QuantizedExperts,
    QuantizedWeight,
    SplitWeight,
)
from jaxserve.models.shards import AXIS, Part
from jaxserve.models.token_rounding import TokenRounded
from pallas_kernels.cpu.blocks import FORMATS
from pallas_kernels.cpu.panels import PANEL
from pallas_kernels.quantized_codes import codes_a_row


def cut(value: Any, axes: Any, part: Part, path: str) -> Any:
    """Return one device's part of a parameter.

    Args:
        value: the whole parameter, in any form except panels of floats or of codes.
        axes: logical axes of the parameter.
        part: the index ranges of the part.

    Returns:
        The part in the form of `value`. `BlockPanels` are on JAX's default device, other arrays on
        the host.

    Raises:
        UnsupportedModel: the part ends within a group of inputs, or its matrix would be cut between
            inputs that are sorted by group.
    """
    if isinstance(value, TokenRounded):
        # An activation row is rounded by the maximum over its inputs on all devices.
        axis = AXIS if cuts_inputs(axes, part) else None
        return replace(value, weight=cut(value.weight, axes, part, path), axis=axis)
    if isinstance(value, QuantizedExperts):
        return _cut_experts(value, part, path)
    if isinstance(value, BlockPanels):
        return _cut_blocks(value, axes, part, path)
    if isinstance(value, SplitWeight):
        return _cut_parts(value, PROJECTIONS[axes], part, path)
    if isinstance(value, QuantizedWeight):
        contract = PROJECTIONS[axes]
        outputs = part.own_shape[contract:]
        return _cut_matrix(value, part.inputs(contract), part.outputs(contract), outputs, path)
    return part.cut(np.asarray(value))


def cuts_inputs(axes: Any, part: Part) -> bool:
    first = 1 if axes in EXPERTS else 0
    inputs = slice(first, first + PROJECTIONS.get(axes, 1))
    return part.own_shape[inputs] != part.shape[inputs]


def _cut_matrix(
    weight: QuantizedWeight,
    inputs: np.ndarray,
    outputs: np.ndarray,
    shape: tuple[int, ...],
    path: str,
) -> QuantizedWeight:
    """Return the part of a quantized matrix with the given inputs and outputs.

    Args:
        inputs: consecutive indices.
        outputs: indices in any order.
        shape: shape of the outputs of the result.
    """
    if weight.order is not None and len(inputs) < weight.inputs:
        raise UnsupportedModel(
            f"{path}: its inputs are sorted by group (desc_act), and tensor_parallel_size would "
            "cut them; allowed: 1, or a checkpoint without desc_act"
        )
    host = _taken(_arrays(weight), weight.form, weight.inputs, inputs, outputs, path)
    order: Any = None if weight.order is None else np.asarray(weight.order)
    return QuantizedWeight(*host, order, weight.form, len(inputs), shape, weight.implementation)


def _taken(
    arrays: list[np.ndarray | None],
    form: str,
    all_inputs: int,
    inputs: np.ndarray,
    outputs: np.ndarray,
    path: str,
) -> tuple[Any, Any, Any]:
    """Return the codes, scales and zero points of some consecutive inputs and some outputs.

    arrays: codes [..., rows, O], scales and zero points [..., groups, O]; all_inputs: number of
    inputs of the whole matrix.
    """
    values, scales, zeros = arrays
    assert values is not None and scales is not None
    width, groups = codes_a_row(form), scales.shape[-2]
    group = values.shape[-2] * width // groups
    first, last = int(inputs[0]), int(inputs[-1]) + 1
    rows, of_groups = slice(None), slice(None)
    if len(inputs) < all_inputs:
        check_border(path, len(inputs), group if groups > 1 else width)
        rows = slice(first // width, last // width)
        if groups > 1:
            of_groups = slice(first // group, last // group)

    def take(array: np.ndarray, chosen: slice) -> np.ndarray:
        array = array[..., chosen, :]
        is_whole = len(outputs) == array.shape[-1] and (np.diff(outputs) == 1).all()
        return np.ascontiguousarray(array if is_whole else array[..., outputs])

    cut_zeros = None if zeros is None else take(zeros, of_groups)
    return take(values, rows), take(scales, of_groups), cut_zeros


def check_border(path: str, inputs: int, group: int) -> None:
    """Check that `inputs`, the number of inputs of each device, is a multiple of `group`.

    Raises:
        UnsupportedModel: it is not. The error names the parameter and both sizes.
    """
    if inputs % group:
        raise UnsupportedModel(
            f"{path}: tensor_parallel_size would leave each device {inputs} of its inputs, which "
            f"share a scale in groups of {group}; allowed: a multiple of {group}"
        )


def _cut_experts(experts: QuantizedExperts, part: Part, path: str) -> QuantizedExperts:
    chosen, matrix = _chosen(part), Part(part.shape[1:], part.spans[1:])
    arrays = [None if array is None else array[chosen] for array in _arrays(experts)]
    taken = matrix.inputs(1), matrix.outputs(1)
    host = _taken(arrays, experts.form, experts.inputs, *taken, path)
    return QuantizedExperts(*host, experts.form, len(matrix.inputs(1)), matrix.own_shape[1:])


def _chosen(part: Part) -> slice | np.ndarray:
    # A slice, if possible, selects the experts without a copy.
    spans = part.spans[0]
    return slice(*spans[0]) if len(spans) == 1 else part.inputs(1)


def _arrays(weight: QuantizedWeight | QuantizedExperts) -> list[np.ndarray | None]:
    arrays = (weight.values, weight.scales, weight.zeros)
    return [None if array is None else np.asarray(array) for array in arrays]


def split_pieces(
    weight: SplitWeight, contract: int, part: Part
) -> Iterator[tuple[Any, np.ndarray, tuple[tuple[int, int], ...]]]:
    """Yield the matrices of a fused projection that a device has outputs of.

    Args:
        weight: the whole projection.
        contract: number of its dimensions in front that are inputs.
        part: indices of its dimensions.

    Returns:
        For each matrix: the matrix, int64 numbers of its outputs in the order of the piece, and
        start and size along each output dimension of the piece.
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
    """Cut each of a fused projection's matrices; those of which nothing is left go."""
    weights, places, inputs = [], [], part.inputs(contract)
    for matrix, order, place in split_pieces(weight, contract, part):
        cut_one: Any = _cut_rows if isinstance(matrix, BlockPanels) else _cut_matrix
        weights.append(cut_one(matrix, inputs, order, (len(order),), path))
        places.append(place)
    return SplitWeight(tuple(weights), tuple(places), part.own_shape[contract:])


def _place(numbers: np.ndarray, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    # `numbers` are flat indices that fill a window of `shape`.
    corners = (np.unravel_index(numbers.min(), shape), np.unravel_index(numbers.max(), shape))
    place = tuple((int(a), int(b - a + 1)) for a, b in zip(*corners, strict=True))
    assert prod(size for _, size in place) == len(numbers)
    return place


def _cut_blocks(value: BlockPanels, axes: Any, part: Part, path: str) -> BlockPanels:
    """Cut a matrix in GGUF blocks: a layer's, the embedding's, or the matrices of all experts."""
    if axes not in EXPERTS:
        contract = PROJECTIONS.get(axes, 0 if axes == ("vocab", "embed") else 1)
        if not contract:  # a table, whose rows are outputs
            taken = part.outputs(1), part.inputs(1)
            return _cut_rows(value, *taken, part.own_shape[:1], path)
        taken = part.inputs(contract), part.outputs(contract)
        return _cut_rows(value, *taken, part.own_shape[contract:], path)
    matrix = Part(part.shape[1:], part.spans[1:])
    taken = matrix.inputs(1), matrix.outputs(1)
    panels = np.asarray(value.panels)[_chosen(part)]
    rows = (_rows_taken(expert, value.form, *taken, path) for expert in panels)
    own_outputs = matrix.own_shape[1:]
    return BlockPanels.of_experts(rows, len(panels), value.form, value.dtype, own_outputs)


def _cut_rows(
    value: BlockPanels,
    inputs: np.ndarray,
    outputs: np.ndarray,
    shape: tuple[int, ...],
    path: str,
) -> BlockPanels:
    rows = _rows_taken(np.asarray(value.panels), value.form, inputs, outputs, path)
    return BlockPanels.of(rows, value.form, value.dtype, shape)


def _rows_taken(
    panels: np.ndarray,
    form: str,
    inputs: np.ndarray,
    outputs: np.ndarray,
    path: str,
) -> np.ndarray:
    """Return the blocks of some inputs and outputs from panels, uint8 [outputs, blocks, bytes].

    Outputs beyond the panels are zeros.
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
