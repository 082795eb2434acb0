"""Divide a quantized projection of latent attention into the matrices of its heads.

A checkpoint stores one matrix from the latent to the keys and values of all heads. Keys are
projected from the side of their outputs, values from the side of the inputs. The codes keep their
values in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxserve.models.placed_weight import FULL, HEAD_KEYS, PlacedWeight, SplitWeight
from jaxserve.models.transposed_weight import TransposedWeight
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.block_codes import codes_of
from jaxserve.weights.fused_parameters import Part, fused_parameter, joined, stacked
from jaxserve.weights.host_matrix import HostMatrix
from jaxserve.weights.layouts import is_shape

INT4_ZERO = 8


def quantized_parameter(
    parts: Sequence[Part], parameter: nnx.Param[Any], dims: Mapping[str, int]
) -> PlacedWeight | SplitWeight | TransposedWeight | None:
    """Return `fused_parameter` of a parameter, or `heads_of` if its tensors are rows of heads."""
    if are_heads([part for part, _ in parts]) and parts[0][1].form != FULL:
        return heads_of(parts, parameter, dims)
    return fused_parameter(parts, parameter, dims)


def are_heads(parts: Sequence[WeightName]) -> bool:
    """Return whether the tensors of a parameter are the rows of each head in one tensor."""
    return parts[0].rows is not None


def heads_of(
    parts: Sequence[Part], parameter: nnx.Param[Any], dims: Mapping[str, int], dtype: str = ""
) -> PlacedWeight | TransposedWeight:
    """Return the matrices of all heads as a parameter, from the matrix that holds their rows.

    Args:
        parts: the rows of each head (see `WeightName.rows`), all with the same matrix.
        parameter: the parameter of keys or of values.
        dims: sizes of the dimensions that the table of weights names.
        dtype: see `HostMatrix.as_weight`.

    Returns:
        NumPy arrays, or shapes if the matrix is a description.
    """
    matrix, shape = parts[0][1], tuple(parameter.shape)
    if parameter.get_metadata()["axes"] == HEAD_KEYS:
        firsts = [part.rows[0] for part, _ in parts if part.rows is not None]
        return transposed(matrix, firsts, shape[1])
    plain = replace(matrix, order=None)
    places = [replace(part, index=(...,)) for part, _ in parts]  # within the matrix of the head

    def matrix_of(head: int) -> HostMatrix:
        return joined([(places[head], plain)], shape[2:], 1, dims)

    return replace(stacked(matrix_of, len(parts), shape[2:], dtype), order=matrix.order)


def transposed(matrix: HostMatrix, firsts: Sequence[int], size: int) -> TransposedWeight:
    """Return the transposed matrices of heads.

    Args:
        matrix: codes or blocks, with the outputs of all heads.
        firsts: the first output of each head.
        size: number of outputs of a head.
    """
    matrix = codes_of(matrix) if matrix.is_blocks else matrix
    assert matrix.scales is not None
    inputs, group, groups = matrix.inputs, matrix.group, matrix.scales.shape[0]
    count = len(firsts) * groups
    ones = np.ones((1, group), np.float32)

    def matrix_of(number: int) -> HostMatrix:
        head, nth = divmod(number, groups)
        if is_shape(matrix.values):
            return HostMatrix.described(matrix.form, (size, group), size, np.float32)
        rows = matrix.values[nth * group : (nth + 1) * group, firsts[head] : firsts[head] + size]
        zero = INT4_ZERO if matrix.form == "int4" else 0
        codes = np.full((size, group), zero, matrix.values.dtype)
        codes[:, : len(rows)] = rows.T
        return HostMatrix(matrix.form, codes, ones, group=size)

    def of_heads(array: Any) -> Any:
        if is_shape(matrix.values):
            return jax.ShapeDtypeStruct((len(firsts), groups, size), np.dtype(np.float32))
        chosen = np.stack([array[:, first : first + size] for first in firsts])
        return chosen.astype(np.float32)

    scales, offsets = of_heads(matrix.scales), None
    if matrix.zeros is not None:
        zeros = of_heads(matrix.zeros)
        if is_shape(matrix.values):
            offsets = zeros
        elif matrix.has_minima:
            offsets = zeros + INT4_ZERO * scales
        else:
            offsets = (INT4_ZERO - zeros) * scales
    places: Any = None
    if matrix.order is not None:
        places = np.argsort(matrix.order).astype(np.int32)
        if is_shape(matrix.values):
            places = jax.ShapeDtypeStruct(places.shape, places.dtype)
    weight = stacked(matrix_of, count, (group,))
    return TransposedWeight(weight, scales, offsets, places, inputs)
