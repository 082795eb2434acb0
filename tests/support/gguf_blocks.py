"""Blocks of GGUF files with random bits."""

from __future__ import annotations

import gguf
import numpy as np

from jaxserve.weights.gguf.file import ENCODINGS
from pallas_kernels.cpu import blocks

BYTES = {made.name: made.num_bytes for made in ENCODINGS.values()}
# Bytes of a block that hold its scale, and its minimum if it has one.
SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), np.s_[:2]),
    "Q2_K": np.s_[80:84],
    "Q3_K": np.s_[108:110],
    "Q6_K": np.s_[208:210],
}


def random_blocks(form: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Return blocks as a file has them, of any codes, scales of both signs and of all sizes."""
    rng = np.random.default_rng(seed)
    count = inputs // blocks.FORMATS[form].size
    raw = rng.integers(0, 256, (outputs, count, BYTES[form]), dtype=np.uint8)
    if form == "MXFP4":  # an exponent
        raw[..., 0] = rng.integers(108, 136, (outputs, count))
        return raw
    place = SCALES.get(form, np.s_[:4])
    size = place.stop - (place.start or 0)
    scales = rng.standard_normal((outputs, count, size // 2)) * 10.0 ** rng.integers(
        -6, 2, (outputs, count, 1)
    )
    raw[..., place] = scales.astype(np.float16).view(np.uint8)
    return raw


def unpacked(raw: np.ndarray, form: str) -> np.ndarray:
    return gguf.dequantize(raw.reshape(len(raw), -1), gguf.GGMLQuantizationType[form])
