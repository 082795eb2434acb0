"""Blocks of a GGUF file as our products take them: the same bits in another order.

The layouts are those of ggml (github.com/ggml-org/ggml, src/ggml-common.h and ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from pallas_kernels.cpu.blocks import FORMATS, packed

Fields = dict[str, np.ndarray]


@dataclass(frozen=True)
class BlockRows:
    """A matrix in blocks, an output a row.

    Attributes:
        form: name of the blocks' format.
        blocks: uint8 [outputs, blocks, bytes of one].
    """

    form: str
    blocks: np.ndarray

    @property
    def inputs(self) -> int:
        """Inputs of the matrix."""
        return self.blocks.shape[1] * FORMATS[self.form].size


def rows_of_blocks(raw: np.ndarray, form: str) -> np.ndarray:
    """Return blocks [outputs, blocks, bytes as in the file] with their fields in our order.

    Args:
        raw: uint8.
        form: of the blocks, see `pallas_kernels.cpu.blocks`.
    """
    made = FORMATS[form]
    fields = _READERS[form](raw)
    fields["low"] = packed(fields["low"], made.low)
    if made.high:
        fields["high"] = packed(fields["high"], made.high)
    return np.concatenate([fields[name] for name in made.fields], axis=-1)


def as_float16(values: np.ndarray) -> np.ndarray:
    """Round to float16; numbers beyond it become the largest of it."""
    most = np.float32(np.finfo(np.float16).max)
    return np.clip(values, -most, most).astype(np.float16)


def are_finite(rows: np.ndarray, form: str) -> bool:
    """Return whether the scales and minima of rows of blocks are numbers."""
    fields = FORMATS[form].fields
    places = [fields[name] for name in ("scale", "minimum") if name in fields]
    exponents = [rows[..., place.start + 1] & 0x7C for place in places]
    return all(bool((exponent != 0x7C).all()) for exponent in exponents)


def _nibbles(raw: np.ndarray, group: int) -> np.ndarray:
    """Split bytes, in groups of `group`, into their lower halves and then their upper ones."""
    bytes_ = raw.reshape(*raw.shape[:-1], -1, 1, group)
    halves = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-2)
    return halves.reshape(*raw.shape[:-1], -1)


def _bits(raw: np.ndarray) -> np.ndarray:
    """Return the bits of words, the lowest first."""
    return np.unpackbits(raw, axis=-1, bitorder="little")


def _q4_0(raw: np.ndarray) -> Fields:
    return {"scale": raw[..., :2], "low": _nibbles(raw[..., 2:], 16)}


def _q4_1(raw: np.ndarray) -> Fields:
    low = _nibbles(raw[..., 4:], 16)
    return {"scale": raw[..., :2], "minimum": raw[..., 2:4], "low": low}


def _q5_0(raw: np.ndarray) -> Fields:
    return _q4_0(np.delete(raw, np.s_[2:6], axis=-1)) | {"high": _bits(raw[..., 2:6])}


def _q5_1(raw: np.ndarray) -> Fields:
    return _q4_1(np.delete(raw, np.s_[4:8], axis=-1)) | {"high": _bits(raw[..., 4:8])}


def _q8_0(raw: np.ndarray) -> Fields:
    return {"scale": raw[..., :2], "low": raw[..., 2:]}


def _k_scales(raw: np.ndarray) -> Fields:
    """Read the scale and minimum of a block, and those of its runs, 6 bits each in 12 bytes."""
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
    return _k_scales(raw) | {"low": _nibbles(raw[..., 16:], 32)}


def _q5_k(raw: np.ndarray) -> Fields:
    bits = raw[..., 16:48, None] >> np.arange(8, dtype=np.uint8) & 1
    high = bits.swapaxes(-1, -2).reshape(*raw.shape[:-1], -1)
    return _k_scales(raw) | {"low": _nibbles(raw[..., 48:], 32), "high": high}


def _q6_k(raw: np.ndarray) -> Fields:
    pairs = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return {
        "scale": raw[..., 208:210],
        "scales": raw[..., 192:208],
        "low": _nibbles(raw[..., :128], 64),
        "high": (pairs >> shifts & 3).reshape(*raw.shape[:-1], -1),
    }


_READERS: Mapping[str, Callable[[np.ndarray], Fields]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
