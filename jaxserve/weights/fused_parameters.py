"""Join quantized tensors of a checkpoint into the fused parameters of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from jaxserve.models.panels import BlockPanels
from jaxserve.models.quantized import Quantized, SplitWeight
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.codes import Codes
from jaxserve.weights.gguf.blocks import BlockRows
from jaxserve.weights.packed_tensor import FullValues

Part = tuple[WeightName, Codes]
BlockPart = tuple[WeightName, BlockRows]


def fused(
    parts: Sequence[Part], shape: tuple[int, ...], contract: int, dims: Mapping[str, int]
) -> Quantized:
    """Fuse parts into one parameter of `shape`, whose first `contract` dimensions are inputs.

    Returns:
        NumPy arrays: one matrix if all parts have the same layout and order of inputs, otherwise a
        `SplitWeight` with a matrix for each part.
    """
    outputs = shape[contract:]
    first = parts[0][1].layout
    if all(first.joins(codes.layout) for _, codes in parts):
        return joined(parts, contract, dims, outputs).as_weight(outputs)
    weights, places = [], []
    for part, codes in parts:
        piece = _arranged(part, codes, contract, dims)
        places.append(place_of(part, outputs))
        weights.append(piece.as_weight((piece.values.shape[1],)))
    return SplitWeight(tuple(weights), tuple(places), outputs)


def fused_blocks(
    parts: Sequence[BlockPart],
    outputs: tuple[int, ...],
    contract: int,
    dims: Mapping[str, int],
    dtype: str,
) -> BlockPanels | SplitWeight:
    """Fuse parts in GGUF blocks into one parameter.

    Args:
        parts: the blocks of each tensor.
        outputs: shape of the outputs.
        contract: number of the parameter's dimensions that are inputs.

    Returns:
        One matrix if all parts have the same format, otherwise a `SplitWeight` with a matrix for
        each part.
    """
    forms = [rows.form for _, rows in parts]
    if len(set(forms)) == 1:
        whole = joined_blocks(parts, outputs, contract, dims)
        return BlockPanels.of(whole, forms[0], dtype, outputs)
    pieces = [rows.blocks[_columns(part, rows.inputs, contract, dims)] for part, rows in parts]
    weights = [
        BlockPanels.of(piece, form, dtype, (len(piece),))
        for piece, form in zip(pieces, forms, strict=True)
    ]
    return SplitWeight(tuple(weights), tuple(place_of(part, outputs) for part, _ in parts), outputs)


def joined_blocks(
    parts: Sequence[BlockPart], outputs: tuple[int, ...], contract: int, dims: Mapping[str, int]
) -> np.ndarray:
    """Join parts in the same block format: uint8 [outputs, blocks, bytes], in the model's order.

    If one part has all outputs in order, its array is returned without a copy.
    """
    whole: np.ndarray | None = None
    numbers = np.arange(prod(outputs)).reshape(*[1] * contract, *outputs)
    for part, rows in parts:
        columns = _columns(part, rows.inputs, contract, dims)
        places = numbers[part.index].reshape(-1)
        if len(columns) == numbers.size and np.array_equal(columns, places):
            return rows.blocks  # a copy of the embedding table would be large
        if whole is None:
            whole = np.empty((numbers.size, *rows.blocks.shape[1:]), np.uint8)
        whole[places] = rows.blocks[columns]
    assert whole is not None
    return whole


def dequantized(
    parts: Sequence[tuple[WeightName, Codes | FullValues]],
    shape: tuple[int, ...],
    dtype: np.dtype,
    dims: Mapping[str, int],
) -> np.ndarray:
    """Dequantize the parts of a parameter into one array of `shape` and `dtype`."""
    parameter = np.empty(shape, dtype)
    for part, codes in parts:
        parameter[part.index] = part.arrange(codes.dequantized().T, dims)
    return parameter


def _arranged(part: WeightName, codes: Codes, contract: int, dims: Mapping[str, int]) -> Codes:
    return codes.with_columns(_columns(part, len(codes.values), contract, dims))


def _columns(part: WeightName, inputs: int, contract: int, dims: Mapping[str, int]) -> np.ndarray:
    # The output of the tensor for each output of the part in the model's order.
    outputs = part.shape(dims)[0]
    if not contract:  # a table, whose rows are looked up
        return np.arange(outputs)
    numbers = np.broadcast_to(np.arange(outputs)[:, None], (outputs, inputs))
    return part.arrange(numbers, dims)[(0,) * contract].reshape(-1)


def joined(
    parts: Sequence[Part], contract: int, dims: Mapping[str, int], outputs: tuple[int, ...]
) -> Codes:
    """Join parts of equal layout and input order into one matrix with outputs in model order."""
    pieces = [_arranged(part, codes, contract, dims) for part, codes in parts]

    def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.empty((len(arrays[0]), *outputs), arrays[0].dtype)
        for (part, _), array in zip(parts, arrays, strict=True):
            target = whole[part.index]
            whole[part.index] = array.reshape(target.shape)
        return whole.reshape(len(whole), -1)

    first = pieces[0]
    zeros = None
    if any(piece.zeros is not None for piece in pieces):
        zeros = join([piece.zeros_or_default() for piece in pieces])
    return Codes(
        first.form,
        join([piece.values for piece in pieces]),
        join([piece.scales for piece in pieces]),
        zeros,
        first.order,
        first.group,
    )


def place_of(part: WeightName, outputs: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (start, size), for each output dimension, of the outputs that a tensor fills."""
    numbers = np.arange(np.prod(outputs)).reshape(outputs)[part.index]
    first = np.unravel_index(numbers.min(), outputs)
    last = np.unravel_index(numbers.max(), outputs)
    return tuple((int(a), int(b - a + 1)) for a, b in zip(first, last, strict=True))
