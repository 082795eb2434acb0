"""Join quantized matrices of a checkpoint into the fused parameters of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, groupby
from math import prod
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxserve.models.placed_weight import EXPERTS, FULL, PROJECTIONS, PlacedWeight, SplitWeight
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.host_matrix import HostMatrix
from jaxserve.weights.layouts import aligned_empty, block_panels, filled_blocks, is_shape
from jaxserve.weights.quantize import in_groups, quantize

Part = tuple[WeightName, HostMatrix]
THREADS = 4


def contracted(parameter: nnx.Param[Any]) -> int | None:
    """Return the number of input dimensions of a projection, or None for other parameters."""
    return PROJECTIONS.get(parameter.get_metadata()["axes"])


def holds_experts(parameter: nnx.Param[Any]) -> bool:
    """Return whether a parameter holds the matrices of all experts, which may be quantized."""
    return parameter.get_metadata()["axes"] in EXPERTS


def fused_parameter(
    parts: Sequence[Part], parameter: nnx.Param[Any], dims: Mapping[str, int]
) -> PlacedWeight | SplitWeight | None:
    """Fuse quantized matrices of a checkpoint into a parameter, which is a projection or experts.

    Returns:
        NumPy arrays, or shapes if `parts` are descriptions; None if the parameter has to be
        dequantized.
    """
    contract, shape = contracted(parameter), tuple(parameter.shape)
    if any(matrix.form == FULL for _, matrix in parts):
        return None
    if contract is not None:
        return fused(parts, shape[contract:], contract, dims)
    return fused_experts(parts, shape, dims) if holds_experts(parameter) else None


def fused(
    parts: Sequence[Part],
    outputs: tuple[int, ...],
    contract: int,
    dims: Mapping[str, int],
    dtype: str = "",
) -> PlacedWeight | SplitWeight:
    """Fuse the matrices of several tensors into one parameter.

    Args:
        parts: the matrix of each tensor.
        outputs: shape of the parameter's outputs.
        contract: number of the parameter's dimensions that are inputs.
        dims: sizes of the dimensions that the table of weights names.
        dtype: see `HostMatrix.as_weight`.

    Returns:
        One matrix if all parts have the same form and order of inputs, otherwise a `SplitWeight`
        with a matrix for each part.
    """
    first = parts[0][1]
    if all(first.joins(matrix) for _, matrix in parts):
        return joined(parts, outputs, contract, dims).as_weight(outputs, dtype)
    places = [place_of(part, outputs) for part, _ in parts]
    weights = [
        _arranged(part, matrix, contract, dims).as_weight((prod(n for _, n in place),), dtype)
        for (part, matrix), place in zip(parts, places, strict=True)
    ]
    return SplitWeight(tuple(weights), tuple(places), outputs)


def joined(
    parts: Sequence[Part], outputs: tuple[int, ...], contract: int, dims: Mapping[str, int]
) -> HostMatrix:
    """Join matrices of equal form and input order to one, with outputs in the model's order."""
    pieces = [_arranged(part, matrix, contract, dims) for part, matrix in parts]
    if any(piece.zeros is not None for piece in pieces):
        pieces = [piece.with_zeros() for piece in pieces]
    first, indices = pieces[0], [part.index for part, _ in parts]
    if first.is_blocks:
        return replace(first, values=_joined_rows(pieces, indices, outputs, contract))

    def join(arrays: Sequence[Any]) -> Any:
        rows, dtype = arrays[0].shape[0], arrays[0].dtype
        if is_shape(arrays[0]):
            return jax.ShapeDtypeStruct((rows, prod(outputs)), dtype)
        whole = np.empty((rows, *outputs), dtype)
        for index, array in zip(indices, arrays, strict=True):
            whole[index] = array.reshape(whole[index].shape)
        return whole.reshape(rows, -1)

    zeros = [piece.zeros for piece in pieces]
    return replace(
        first,
        values=join([piece.values for piece in pieces]),
        scales=join([piece.scales for piece in pieces]),
        zeros=None if first.zeros is None else join(zeros),
    )


def _joined_rows(
    pieces: Sequence[HostMatrix], indices: Sequence[Any], outputs: tuple[int, ...], contract: int
) -> Any:
    """Return the blocks of several matrices in one array, uint8 [outputs, blocks, bytes per block].

    A single matrix with all outputs in order is not copied.

    Args:
        pieces: the matrices, in GGUF blocks.
        indices: the part of the parameter that each matrix fills.
        outputs: shape of the parameter's outputs.
        contract: number of the parameter's input dimensions.
    """
    arrays: list[Any] = [piece.values for piece in pieces]
    shape, numbers = (prod(outputs), *arrays[0].shape[1:]), np.arange(prod(outputs))
    if is_shape(arrays[0]):
        return jax.ShapeDtypeStruct(shape, np.uint8)
    places = [numbers.reshape(*[1] * contract, *outputs)[index].reshape(-1) for index in indices]
    if np.array_equal(places[0], numbers):
        return arrays[0]
    whole = np.empty(shape, np.uint8)
    for rows, array in zip(places, arrays, strict=True):
        whole[rows] = array
    return whole


def dequantized(
    parts: Sequence[Part], shape: tuple[int, ...], dtype: np.dtype, dims: Mapping[str, int]
) -> np.ndarray:
    """Dequantize the matrices `parts` of a parameter into one array of `shape` and `dtype`."""
    parameter = np.empty(shape, dtype)
    for part, matrix in parts:
        parameter[part.index] = part.arrange(matrix.dequantized().T, dims)
    return parameter


def _arranged(
    part: WeightName, matrix: HostMatrix, contract: int, dims: Mapping[str, int]
) -> HostMatrix:
    # Select the output of the tensor for each output of the part in the model's order.
    outputs = part.shape(dims)[0]
    if not contract:  # a table, whose rows are looked up
        return matrix
    numbers = np.broadcast_to(np.arange(outputs)[:, None], (outputs, matrix.inputs))
    return matrix.with_outputs(part.arrange(numbers, dims)[(0,) * contract].reshape(-1))


def place_of(part: WeightName, outputs: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (start, size), for each output dimension, of the outputs that a tensor fills."""
    numbers = np.arange(np.prod(outputs)).reshape(outputs)[part.index]
    first = np.unravel_index(numbers.min(), outputs)
    last = np.unravel_index(numbers.max(), outputs)
    return tuple((int(a), int(b - a + 1)) for a, b in zip(first, last, strict=True))


def by_path(table: Iterable[WeightName]) -> dict[str, list[WeightName]]:
    """Return the tensors of each parameter, by the parameter's path, with the paths sorted."""
    ordered = sorted(table, key=lambda part: part.path)
    return {path: list(parts) for path, parts in groupby(ordered, key=lambda part: part.path)}


def by_expert(parts: Iterable[WeightName]) -> list[list[WeightName]]:
    """Return, for each expert in order, the tensors (`WeightName`) of its matrix.

    The `index` of each returned WeightName is that within the matrix of its expert.
    """

    def expert_of(part: WeightName) -> int:
        index = part.index[0]
        assert isinstance(index, int)
        return index

    return [
        [replace(part, index=part.index[1:] or (...,)) for part in group]
        for _, group in groupby(sorted(parts, key=expert_of), key=expert_of)
    ]


def fused_experts(
    parts: Sequence[Part], shape: tuple[int, ...], dims: Mapping[str, int]
) -> PlacedWeight | None:
    """Fuse a checkpoint's quantized experts into one parameter of `shape`.

    Returns:
        The parameter, or None if experts cannot be fused: some have sorted inputs, they have
        different forms, or some are missing.
    """
    experts = by_expert(part for part, _ in parts)
    matrices = {part.name: matrix for part, matrix in parts}
    first = parts[0][1]
    is_one = first.order is None and all(first.joins(matrix) for _, matrix in parts)
    if not is_one or len(experts) != shape[0]:
        return None
    zero_points = any(matrix.zeros is not None for _, matrix in parts)

    def matrix_of(index: int) -> HostMatrix:
        one_expert = [(part, matrices[part.name]) for part in experts[index]]
        matrix = joined(one_expert, shape[2:], 1, dims)
        return matrix.with_zeros() if zero_points else matrix

    return stacked(matrix_of, len(experts), shape[2:])


def quantized_experts(values: np.ndarray, form: str, groups: str = "Q4_1") -> PlacedWeight:
    """Quantize every expert's or head's matrix [E, I, outputs...] to "int8", "fp8" or "int4".

    Each matrix has its own scales. Each thread quantizes one matrix at a time. For the rounding
    errors see `quantize`. `groups` is the GGUF format whose scales "int4" has (see `in_groups`).
    """
    count, inputs, *outputs = values.shape

    def matrix_of(index: int) -> HostMatrix:
        flat = values[index].reshape(inputs, -1)
        flat = flat.astype(np.float32, copy=False)
        return in_groups(flat, groups) if form == "int4" else quantize(flat, form)

    return stacked(matrix_of, count, tuple(outputs))


def stacked(
    matrix_of: Callable[[int], HostMatrix], count: int, outputs: tuple[int, ...], dtype: str = ""
) -> PlacedWeight:
    """Stack the matrices of `count` experts into one parameter, or their shapes.

    Args:
        matrix_of: returns the matrix of an expert, all in the same form. Codes are requested on
            several threads. Of blocks two matrices are held besides the panels.
        count: number of experts.
        outputs: shape of the outputs.
        dtype: see `HostMatrix.as_weight`.
    """
    matrix = matrix_of(0)
    if matrix.is_blocks:
        panels = block_panels(matrix.form, matrix.inputs, outputs, dtype, (count,))
        others = (matrix_of(index).values for index in range(1, count))
        is_abstract = is_shape(matrix.values)
        return panels if is_abstract else filled_blocks(panels, chain([matrix.values], others))
    first = matrix.as_weight(outputs)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), first
    )
    if is_shape(matrix.values):
        return shapes
    whole = jax.tree.map(lambda leaf: aligned_empty(leaf.shape, np.dtype(leaf.dtype)), shapes)
    targets: list[np.ndarray] = jax.tree.leaves(whole)

    def fill(index: int) -> None:
        weight = matrix_of(index).as_weight(outputs) if index else first
        for target, array in zip(targets, jax.tree.leaves(weight), strict=True):
            target[index] = array

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fill, range(count)))
    return whole
