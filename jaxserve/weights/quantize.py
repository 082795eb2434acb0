"""Quantize weights while they are loaded, one parameter at a time.

int8 and fp8 round to nearest, with one scale for each output, determined by the output's largest
magnitude. With scale s, the error of a weight w is at most

* int8: s / 2, where s = max|w| / 127
* fp8 (e4m3): the larger of |w| / 16 and s / 1024, where s = max|w| / 448

int4 is llama.cpp's Q4_1: a scale and a minimum in float16 for each 32 inputs, found by a search
(`block_quantize.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxserve.weights.block_codes import codes_of
from jaxserve.weights.block_quantize import quantize_rows
from jaxserve.weights.host_matrix import FP8, HostMatrix

FORMS = ("int8", "fp8", "int4")
GROUP = 32  # inputs that share a scale in int4
FP8_MAX, INT8_MAX = 448.0, 127
ROOM_BYTES = 1 << 20  # size of temporaries, so that they stay in the CPU's cache


def quantize(weight: np.ndarray, form: str) -> HostMatrix:
    """Quantize float32[I, O] to codes with scales, in the form "int8", "fp8" or "int4".

    int8 and fp8 have one scale for each output. int4 has a scale and a minimum for 32 inputs.
    """
    inputs, outputs = weight.shape
    if form == "int4":
        return in_groups(weight, "Q4_1")
    largest = FP8_MAX if form == "fp8" else INT8_MAX
    scales = _nonzero(_largest(weight) / np.float32(largest))
    values = np.empty((inputs, outputs), np.uint8 if form == "fp8" else np.int8)
    count = max(1, ROOM_BYTES // (outputs * weight.itemsize))
    room = np.empty((min(count, inputs), outputs), np.float32)
    for start in range(0, inputs, count):
        rows = weight[start : start + count]
        scaled = np.divide(rows, scales, out=room[: len(rows)])
        if form == "fp8":
            np.clip(scaled, -FP8_MAX, FP8_MAX, out=scaled)  # larger values would round to NaN
            values[start : start + count] = scaled.astype(FP8).view(np.uint8)
        else:
            values[start : start + count] = np.rint(scaled, out=scaled)
    return HostMatrix(form, values, scales[None], None, None, group=inputs)


def in_groups(weight: np.ndarray, name: str) -> HostMatrix:
    """Quantize float32[I, O] in groups of 32 inputs, to codes with the scales of a GGUF format.

    The format is "Q4_1" for int4 with minima, or "Q8_0" for int8. To quantize an incomplete last
    group, its inputs are repeated; the result has I rows again.
    """
    inputs, rest = len(weight), len(weight) % GROUP
    whole = weight
    if rest:
        last = np.resize(weight[inputs - rest :], (GROUP, weight.shape[1]))
        whole = np.concatenate([weight[: inputs - rest], last])
    codes = codes_of(quantize_rows(whole.T, name)[0])
    return replace(codes, values=codes.values[:inputs])


def _largest(rows: np.ndarray) -> np.ndarray:
    return np.maximum(rows.max(axis=0), -rows.min(axis=0))


def _nonzero(scales: np.ndarray) -> np.ndarray:
    tiny = np.asarray(np.finfo(np.float32).tiny, scales.dtype)
    return np.where(scales < tiny, np.ones_like(scales), scales)
