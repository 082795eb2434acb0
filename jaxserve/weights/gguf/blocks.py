"""Reorder the bits of GGUF blocks into the block layout that our kernels read.

The layouts in the files are described in ggml (github.com/ggml-org/ggml, src/ggml-common.h and
ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from pallas_kernels.cpu.blocks import FORMATS
from pallas_kernels.implementation import deferred


class _Codes(NamedTuple):
    """Codes of GGUF blocks in the file's order: bytes, bits of a code, and bytes of a group."""

    bytes_: np.ndarray
    bits: int
    group: int


Fields = dict[str, np.ndarray | _Codes]
# With this exponent e, the largest value of an MXFP4 block, 12 * 2**(e - 127) / 2, is finite.
_MOST_EXPONENT = 251
_reorder = deferred("pallas_kernels.cpu.block_order", "reorder")


def rows_of_blocks(raw: np.ndarray, form: str) -> np.ndarray:
    """Reorder the fields of GGUF blocks from the order of the file to that of our kernels.

    Args:
        raw: uint8 [outputs, blocks, bytes per block in the file].
        form: name of the block format in `pallas_kernels.cpu.blocks`.

    Returns:
        uint8 [outputs, blocks, bytes per block].
    """
    format_ = FORMATS[form]
    fields = _READERS[form](raw)
    rows = np.empty((*raw.shape[:-1], format_.num_bytes), np.uint8)
    for name, place in format_.fields.items():
        target = rows[..., place.start : place.start + place.count * place.item]
        field = fields[name]
        if isinstance(field, _Codes):
            _reorder(field.bytes_, field.bits, field.group, target)
        else:
            target[...] = field
    return rows


def as_float16(values: np.ndarray) -> np.ndarray:
    """Round values to float16. Values beyond its range become its largest finite number."""
    most = np.float32(np.finfo(np.float16).max)
    return np.clip(values, -most, most).astype(np.float16)


def are_finite(rows: np.ndarray, form: str) -> bool:
    """Return whether the scales and minima of GGUF blocks are all finite.

    `rows` are uint8 [..., bytes per block], in the field order of our kernels.
    """
    fields = FORMATS[form].fields
    if FORMATS[form].is_power:
        return bool((rows[..., fields["scale"].start] <= _MOST_EXPONENT).all())
    places = [fields[name] for name in ("scale", "minimum") if name in fields]
    exponents = [rows[..., place.start + 1] & 0x7C for place in places]
    return all(bool((exponent != 0x7C).all()) for exponent in exponents)


def _bits(raw: np.ndarray) -> np.ndarray:
    # The bits of a word, the lowest first, in the order of `blocks.packed`.
    word = np.ascontiguousarray(raw).view(np.uint32)
    halves = [word & 0x55555555, word >> 1 & 0x55555555]  # every second bit moves to the lower half
    for step, mask in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
        halves = [(half | half >> step) & mask for half in halves]
    return (halves[0] | halves[1] << 16).view(np.uint8)


def _q4_0(raw: np.ndarray) -> Fields:
    return {"scale": raw[..., :2], "low": _Codes(raw[..., 2:], 4, 16)}


def _q4_1(raw: np.ndarray) -> Fields:
    low = _Codes(raw[..., 4:], 4, 16)
    return {"scale": raw[..., :2], "minimum": raw[..., 2:4], "low": low}


def _q5_0(raw: np.ndarray) -> Fields:
    return _q4_0(np.delete(raw, np.s_[2:6], axis=-1)) | {"high": _bits(raw[..., 2:6])}


def _q5_1(raw: np.ndarray) -> Fields:
    return _q4_1(np.delete(raw, np.s_[4:8], axis=-1)) | {"high": _bits(raw[..., 4:8])}


def _q8_0(raw: np.ndarray) -> Fields:
    return {"scale": raw[..., :2], "low": _Codes(raw[..., 2:], 8, 32)}


def _mxfp4(raw: np.ndarray) -> Fields:
    return {"scale": raw[..., :1], "low": _Codes(~raw[..., 1:], 4, 16)}


def _q2_k(raw: np.ndarray) -> Fields:
    return {
        "scale": raw[..., 80:82],
        "minimum": raw[..., 82:84],
        "scales": raw[..., :16] & 15,
        "minima": raw[..., :16] >> 4,
        "low": _Codes(raw[..., 16:80], 2, 32),
    }


def _q3_k(raw: np.ndarray) -> Fields:
    low, high = raw[..., 96:104], raw[..., 104:108, None]
    low = np.concatenate([low & 15, low >> 4], axis=-1)
    high = (high >> np.arange(0, 8, 2, dtype=np.uint8) & 3).swapaxes(-1, -2)
    return {
        "scale": raw[..., 108:110],
        "scales": (low | high.reshape(low.shape) << 4) - np.uint8(32),  # as int8
        "low": _Codes(raw[..., 32:96], 2, 32),
        "high": _Codes(raw[..., :32], 1, 32),
    }


def _iq4_xs(raw: np.ndarray) -> Fields:
    low, high = raw[..., 4:8, None], raw[..., 2:4, None]
    low = (low >> np.array([0, 4], np.uint8) & 15).reshape(*raw.shape[:-1], 8)
    high = (high >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(low.shape)
    return {
        "scale": raw[..., :2],
        "scales": (low | high << 4) - np.uint8(32),  # as int8
        "low": _Codes(raw[..., 8:], 4, 16),
    }


def _k_scales(raw: np.ndarray) -> Fields:
    # The scale and minimum of a block, and 6 bits for each of its runs, in 12 bytes.
    first, second, third = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = [first & 63, (third & 15) | (first >> 6) << 4]
    minima = [second & 63, (third >> 4) | (second >> 6) << 4]
    return {
        "scale": raw[..., :2],
        "minimum": raw[..., 2:4],
        "scales": np.concatenate(scales, axis=-1),
        "minima": np.concatenate(minima, axis=-1),
    }


def _q4_k(raw: np.ndarray) -> Fields:
    return _k_scales(raw) | {"low": _Codes(raw[..., 16:], 4, 32)}


def _q5_k(raw: np.ndarray) -> Fields:
    codes = {"low": _Codes(raw[..., 48:], 4, 32), "high": _Codes(raw[..., 16:48], 1, 32)}
    return _k_scales(raw) | codes


def _q6_k(raw: np.ndarray) -> Fields:
    return {
        "scale": raw[..., 208:210],
        "scales": raw[..., 192:208],
        "low": _Codes(raw[..., :128], 4, 64),
        "high": _Codes(raw[..., 128:192], 2, 32),
    }


_READERS: Mapping[str, Callable[[np.ndarray], Fields]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "IQ4_NL": _q4_0,
        "MXFP4": _mxfp4,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "IQ4_XS": _iq4_xs,
    }
)
