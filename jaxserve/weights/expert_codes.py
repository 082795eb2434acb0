"""Quantize or fuse the matrices of experts into one parameter, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

import numpy as np

from jaxserve.models.quantized import QuantizedExperts
from jaxserve.weights.codes import Codes
from jaxserve.weights.fused_parameters import Part, joined
from jaxserve.weights.quantize import quantize

THREADS = 4


def quantized_experts(values: np.ndarray, form: str) -> QuantizedExperts:
    """Quantize every expert's matrix [E, I, outputs...] to "int8", "fp8" or "int4".

    Each expert has its own scales. Each thread quantizes one matrix at a time. The rounding errors
    are those of `quantize`.
    """
    count, inputs, *outputs = values.shape

    def codes_of(index: int) -> Codes:
        flat = values[index].reshape(inputs, -1)
        return quantize(flat.astype(np.float32, copy=False), form)

    return stacked_codes(codes_of, count, tuple(outputs))


def fused_experts(
    parts: Sequence[Part], shape: tuple[int, ...], dims: Mapping[str, int]
) -> QuantizedExperts | None:
    """Fuse a checkpoint's quantized experts into one parameter of `shape`.

    Returns:
        The parameter, or None if experts cannot be fused: some have sorted inputs, they have
        different layouts, or some are missing.
    """

    def expert_of(part: Part) -> int:
        index = part[0].index[0]
        assert isinstance(index, int)
        return index

    experts = [
        [(replace(part, index=part.index[1:] or (...,)), codes) for part, codes in group]
        for _, group in groupby(sorted(parts, key=expert_of), key=expert_of)
    ]
    every = [codes for _, codes in parts]
    first = every[0].layout
    is_one = first.order is None and all(first.joins(codes.layout) for codes in every)
    if not is_one or len(experts) != shape[0]:
        return None
    zero_points = any(codes.zeros is not None for codes in every)

    def codes_of(index: int) -> Codes:
        codes = joined(experts[index], 1, dims, shape[2:])
        return replace(codes, zeros=codes.zeros_or_default()) if zero_points else codes

    return stacked_codes(codes_of, len(experts), shape[2:])


def stacked_codes(
    codes_of: Callable[[int], Codes], count: int, outputs: tuple[int, ...]
) -> QuantizedExperts:
    """Stack the packed codes of `count` experts into one parameter.

    codes_of: returns the codes of an expert, all in the same layout; it is called on several
    threads. outputs: shape of the outputs.
    """
    first = codes_of(0)
    packed = first.packed()
    whole = [
        None if array is None else np.empty((count, *array.shape), array.dtype) for array in packed
    ]

    def fill(index: int) -> None:
        arrays = codes_of(index).packed() if index else packed
        for target, array in zip(whole, arrays, strict=True):
            if target is not None and array is not None:
                target[index] = array

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fill, range(count)))
    values, scales, zeros = (cast(Any, part) for part in whole)
    return QuantizedExperts(values, scales, zeros, first.form, len(first.values), outputs)
