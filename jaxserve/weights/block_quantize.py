"""Quantize matrices to the block formats of GGUF files, with a search for the best scales.

A scale that maps the largest value of a block to the largest code is rarely the best: with a
slightly smaller scale, the other values have smaller rounding errors. For each block, several
candidate ranges are tried. The codes of a candidate determine the least squares scale and minimum,
and the candidate with the smallest error is used. Scale and minimum are then rounded to the dtype
of the format, and the codes are computed again from the rounded numbers. Weights that were
dequantized from such blocks become the same blocks again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxserve.settings.config import cpu_threads
from jaxserve.weights.gguf.blocks import as_float16
from jaxserve.weights.host_matrix import HostMatrix
from pallas_kernels.cpu.blocks import FORMATS, BlockFormat, packed

# Candidates for the ratio between the value range of a block and the range of its codes.
_STRETCHES = (1.0, 0.94, 1.03, 1.06, 1.12)
SHORT_ROW = 1024  # inputs
_VALUES = 1 << 18  # values quantized at a time, so that temporaries fit in the processor's cache
_TINY = np.float32(1e-30)


def quantize_rows(weight: np.ndarray, form: str) -> tuple[HostMatrix, float]:
    """Quantize float32[O, I] to "Q4_1", "Q5_0", "Q6_K" or "Q8_0"; I is a whole number of blocks.

    Returns:
        The blocks, and the sum of the squared differences between weights and dequantized values.
    """
    format_ = FORMATS[form]
    outputs, inputs = weight.shape
    blocks = np.empty((outputs, inputs // format_.size, format_.num_bytes), np.uint8)

    step = max(1, _VALUES // inputs)

    def fill(start: int) -> float:
        # Copied piece by piece, because a copy of the whole weight would take its memory twice.
        rows = np.ascontiguousarray(weight[start : start + step], np.float32)
        blocks[start : start + step], error = _quantized(rows, format_)
        return error

    with ThreadPoolExecutor(cpu_threads()) as pool:  # NumPy releases the interpreter lock
        return HostMatrix(form, blocks), sum(pool.map(fill, range(0, outputs, step)))


def block_forms(path: str, inputs: int, layers: int) -> tuple[str, ...]:
    """Return the candidate GGUF formats to which "int4" quantizes a parameter on CPU.

    The choice follows llama.cpp's Q4_K_M. The embedding gets 8 bits. Rows that are not a multiple
    of 256, which occur only in small models, may get 5 bits. The down projections of about half of
    the layers may get 6 bits: the first and last eighth, and every third layer between them.

    Args:
        path: path of the parameter.
        inputs: length of its rows.
        layers: number of layers of the model.
    """
    name, _, kind = path.rpartition(".")
    if name == "embedding":
        return ("Q8_0",)
    layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
    eighth = layers // 8
    is_special = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    if kind == "down" and is_special and inputs % FORMATS["Q6_K"].size == 0:
        return ("Q6_K", "Q4_1")
    return ("Q4_1",) if inputs % 256 == 0 else ("Q4_1", "Q5_0")


def grouped_form(inputs: int) -> str:
    """Return the block format by which "int4" quantizes a matrix to codes, as on a GPU.

    Rows of up to 1,024 inputs get 8 bits, because small models lose too much accuracy with 4.
    """
    return "Q8_0" if inputs <= SHORT_ROW else "Q4_1"


def best_rows(weight: np.ndarray, forms: tuple[str, ...]) -> HostMatrix:
    """Quantize float32[O, I] to each block format in `forms`, and return the most exact matrix."""
    return min((quantize_rows(weight, form) for form in forms), key=lambda result: result[1])[0]


def _quantized(rows: np.ndarray, format_: BlockFormat) -> tuple[np.ndarray, float]:
    """Quantize float32[O, I] to blocks of a format, uint8 [O, blocks, bytes per block].

    Return the blocks and the sum of the squared errors. Values beyond the range of float16 are
    clipped.
    """
    most = np.float32(np.finfo(np.float16).max)
    rows = np.clip(rows, -most, most)
    runs = rows.reshape(len(rows), -1, format_.runs, format_.run)
    field: dict[str, np.ndarray] = {}
    if format_.has_minimum:
        scale, minimum = _with_minimum(runs, (1 << format_.low + format_.high) - 1)
        field["minimum"] = _as_bytes(minimum[..., 0])
        runs = runs - _rounded(minimum)[..., None]
    else:
        scale = _symmetric(runs, format_)
    if format_.scaled:
        largest = np.take_along_axis(scale, np.abs(scale).argmax(-1, keepdims=True), -1)
        whole = largest / np.float32(-128)
        field["scale"] = _as_bytes(whole[..., 0])
        whole = _rounded(whole)
        factors = np.clip(np.rint(scale / _nonzero(whole)), -128, 127)
        field["scales"] = factors.astype(np.int8).view(np.uint8)
        scale = whole * factors
    else:
        field["scale"] = _as_bytes(scale[..., 0])
        scale = _rounded(scale)
    least, most = _bounds(format_)
    numbers = np.clip(np.rint(runs / _nonzero(scale)[..., None]), least, most)
    codes = numbers.astype(np.int8).reshape(*runs.shape[:2], format_.size)
    codes = (
        codes.view(np.uint8)
        if format_.low == 8
        else (codes + np.int8(format_.offset)).view(np.uint8)
    )
    field["low"] = packed(codes & 15 if format_.low == 4 else codes, format_.low)
    if format_.high:
        field["high"] = packed(codes >> 4, format_.high)
    numbers *= scale[..., None]
    numbers -= runs
    error = float(np.square(numbers, out=numbers).sum(dtype=np.float64))
    return np.concatenate([field[name] for name in format_.fields], axis=-1), error


# The least and the greatest code, minus the offset of the format.
def _bounds(format_: BlockFormat) -> tuple[int, int]:
    if format_.low == 8:
        return -127, 127
    return -format_.offset, (1 << format_.low + format_.high) - 1 - format_.offset


def _with_minimum(runs: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Search quantization scales and minima for runs [..., values]. Return both, [...] each.

    A value is about minimum + scale * code, with codes from 0 to `most`. The pair with the smallest
    squared error among a few candidates is chosen.
    """
    low, high, mean = runs.min(-1), runs.max(-1), runs.mean(-1)
    centered = runs - mean[..., None]
    spread = np.square(centered).sum(-1)
    # The first candidate is the range itself, rounded as it is stored. For weights that were
    # dequantized from such blocks, its error is zero.
    scale, minimum = _rounded((high - low) / np.float32(most)), _rounded(low)
    codes = _codes(runs, minimum, scale, most)
    codes *= scale[..., None]
    codes += minimum[..., None]
    codes -= runs
    best = np.square(codes, out=codes).sum(-1)
    for stretch in _STRETCHES[1:]:
        middle, half = (low + high) / 2, (high - low) / 2 / np.float32(stretch)
        codes = _codes(runs, middle - half, 2 * half / np.float32(most), most)
        mean_code = codes.mean(-1)
        codes -= mean_code[..., None]
        products = (codes * centered).sum(-1)
        step = products / _nonzero(np.square(codes, out=codes).sum(-1))
        error = np.maximum(spread - products * step, np.float32(1e-6) * spread)
        better = error < best
        best = np.where(better, error, best)
        scale = np.where(better, step, scale)
        minimum = np.where(better, mean - step * mean_code, minimum)
    return _rounded(scale), _rounded(minimum)


def _codes(runs: np.ndarray, start: np.ndarray, step: np.ndarray, most: int) -> np.ndarray:
    codes = runs - start[..., None]
    codes /= _nonzero(step)[..., None]
    return np.clip(np.rint(codes, out=codes), 0, most, out=codes)


def _symmetric(runs: np.ndarray, format_: BlockFormat) -> np.ndarray:
    """Search quantization scales for runs [..., values] without a minimum. Return them, [...].

    The scale with the smallest squared error among a few candidates is chosen. The value of largest
    magnitude gets the code furthest from 0.
    """
    least, most = _bounds(format_)
    index = np.abs(runs).argmax(-1)[..., None]
    largest = np.take_along_axis(runs, index, -1)[..., 0]
    best = np.full(largest.shape, np.inf, np.float32)
    scale = np.zeros_like(largest)
    for stretch in _STRETCHES:
        step = largest / np.float32(least * stretch)
        if format_.low != 8 or stretch == 1.0:
            if not format_.scaled:
                step = _rounded(step)
            codes = np.rint(runs / _nonzero(step)[..., None])
            np.clip(codes, least, most, out=codes)
            error = np.square(codes * step[..., None] - runs).sum(-1)
            better = error < best
            best, scale = np.where(better, error, best), np.where(better, step, scale)
    return scale


def _rounded(values: np.ndarray) -> np.ndarray:
    return as_float16(values).astype(np.float32)


def _as_bytes(values: np.ndarray) -> np.ndarray:
    return as_float16(values)[..., None].view(np.uint8)


def _nonzero(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < _TINY, np.float32(1), values)
