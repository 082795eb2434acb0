"""Write quantized checkpoints from the formats' descriptions, without code of the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

FP8 = ml_dtypes.float8_e4m3fn
Tensors = dict[str, np.ndarray]


def pack_words(numbers: list[int], bits: int = 4) -> int:
    """Pack numbers of `bits` bits into one signed word, the first in the lowest bits."""
    word = sum(number << (bits * place) for place, number in enumerate(numbers))
    return word - (1 << 32) if word >= 1 << 31 else word


def awq_words(row: np.ndarray) -> list[int]:
    """Pack in AutoAWQ's gemm order: bits 0 to 3 hold output 0, then come 2, 4, 6, 1, 3, 5 and 7."""
    return [
        pack_words([int(row[at + place]) for place in (0, 2, 4, 6, 1, 3, 5, 7)])
        for at in range(0, len(row), 8)
    ]


def plain_words(row: np.ndarray, bits: int = 4) -> list[int]:
    step = 32 // bits
    return [pack_words([int(n) for n in row[i : i + step]], bits) for i in range(0, len(row), step)]


def write_awq(stem: str, weight: np.ndarray, group: int, rng: Any) -> tuple[Tensors, np.ndarray]:
    """Return tensors of a random AWQ matrix shaped like `weight` [out, in], and its true values."""
    outputs, inputs = weight.shape
    codes = rng.integers(0, 16, (inputs, outputs))
    zeros = rng.integers(0, 16, (inputs // group, outputs))
    scales = rng.uniform(0.01, 0.03, zeros.shape).astype(np.float16)
    tensors = {
        f"{stem}.qweight": np.array([awq_words(row) for row in codes], np.int32),
        f"{stem}.qzeros": np.array([awq_words(row) for row in zeros], np.int32),
        f"{stem}.scales": scales,
    }
    real = np.empty((outputs, inputs))
    for i in range(inputs):
        g = i // group
        real[:, i] = (codes[i] - zeros[g]) * scales[g].astype(np.float64)
    return tensors, real


def write_gptq(
    stem: str,
    weight: np.ndarray,
    group: int,
    rng: Any,
    act_order: bool,
    version: int = 1,
    bits: int = 4,
    symmetric: bool = False,
) -> tuple[Tensors, np.ndarray]:
    """Write GPTQ tensors likewise. With act_order inputs are assigned to groups at random."""
    outputs, inputs = weight.shape
    codes = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = rng.integers(1, 1 << bits, (inputs // group, outputs))
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = rng.uniform(0.01, 0.03, zeros.shape).astype(np.float16)
    index = np.arange(inputs) // group
    if act_order:
        index = rng.permutation(index)
    stored = zeros - 1 if version == 1 else zeros
    tensors = {
        f"{stem}.qweight": np.array([plain_words(c, bits) for c in codes.T], np.int32).T.copy(),
        f"{stem}.qzeros": np.array([plain_words(row, bits) for row in stored], np.int32),
        f"{stem}.scales": scales,
        f"{stem}.g_idx": index.astype(np.int32),
    }
    real = np.empty((outputs, inputs))
    for i in range(inputs):
        real[:, i] = (codes[i] - zeros[index[i]]) * scales[index[i]].astype(np.float64)
    return tensors, real


def write_awq_gemv(
    stem: str, weight: np.ndarray, group: int, rng: Any
) -> tuple[Tensors, np.ndarray]:
    """Write tensors of AWQ's gemv, whose groups are padded to a multiple of 8, or of 16 or 32."""
    outputs, inputs = weight.shape
    codes = rng.integers(0, 16, (outputs, inputs))
    zeros = rng.integers(0, 16, (outputs, inputs // group))
    scales = rng.uniform(0.01, 0.03, zeros.shape).astype(np.float16)
    missing = -(inputs // group) % (8 * {64: 2, 32: 4}.get(group, 1))
    padded = [np.pad(array, ((0, 0), (0, missing))) for array in (zeros, scales)]
    tensors = {
        f"{stem}.qweight": np.array([plain_words(row) for row in codes], np.int32),
        f"{stem}.qzeros": np.array([plain_words(row) for row in padded[0]], np.int32),
        f"{stem}.scales": padded[1],
    }
    wide = scales.astype(np.float64)
    return tensors, (codes - zeros.repeat(group, 1)) * wide.repeat(group, 1)


def write_packed(
    stem: str, weight: np.ndarray, group: int, rng: Any, bits: int, act_order: bool
) -> tuple[Tensors, np.ndarray]:
    """Write compressed-tensors' pack-quantized tensors. With act_order codes are asymmetric too."""
    outputs, inputs = weight.shape
    half, groups = 1 << (bits - 1), inputs // group
    codes = rng.integers(-half, half, (outputs, inputs))
    zeros = rng.integers(-half, half, (outputs, groups)) if act_order else None
    scales = rng.uniform(0.01, 0.03, (outputs, groups)).astype(np.float16)
    index = np.arange(inputs) // group
    words = [plain_words(row + half, bits) for row in codes]
    tensors = {
        f"{stem}.weight_packed": np.array(words, np.int32),
        f"{stem}.weight_scale": scales,
        f"{stem}.weight_shape": np.array([outputs, inputs], np.int64),
    }
    numbers = codes.astype(np.float64)
    if zeros is not None:
        index = rng.permutation(index)
        words = [plain_words(column + half, bits) for column in zeros.T]
        tensors[f"{stem}.weight_zero_point"] = np.array(words, np.int32).T.copy()
        tensors[f"{stem}.weight_g_idx"] = index.astype(np.int32)
        numbers -= zeros[:, index]
    return tensors, numbers * scales.astype(np.float64)[:, index]


def write_int8(
    stem: str, weight: np.ndarray, rng: Any, scale: str, dtype: Any = np.float32
) -> tuple[Tensors, np.ndarray]:
    """Write 8-bit codes with a scale an output, of compressed-tensors or LLM.int8."""
    outputs, inputs = weight.shape
    codes = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scales = rng.uniform(0.001, 0.003, (outputs, 1)).astype(dtype)
    real = codes.astype(np.float64) * scales.astype(np.float64)
    stored = (scales[:, 0] * 127).astype(dtype) if scale == "SCB" else scales
    return {f"{stem}.weight": codes, f"{stem}.{scale}": stored}, real


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def write_nvfp4(
    stem: str, weight: np.ndarray, rng: Any, modelopt: bool
) -> tuple[Tensors, np.ndarray]:
    """Write NVFP4 tensors, whose one scale divides the others, or in modelopt multiplies them."""
    outputs, inputs = weight.shape
    codes = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    scales = rng.uniform(8, 400, (outputs, inputs // 16)).astype(FP8)
    factor = np.float32(rng.uniform(0.0001, 0.0003))
    names = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
    tensors = {
        f"{stem}.{names[0]}": codes[:, 0::2] | codes[:, 1::2] << 4,
        f"{stem}.weight_scale": scales,
        f"{stem}.{names[1]}": factor if modelopt else (1 / factor).reshape(1),
        f"{stem}.{'input_scale' if modelopt else 'input_global_scale'}": np.ones(1, np.float32),
    }
    numbers = np.where(codes < 8, 1, -1) * E2M1[codes & 7]
    return tensors, numbers * scales.astype(np.float64).repeat(16, 1) * factor


def write_mxfp4(stem: str, weight: np.ndarray, rng: Any) -> tuple[Tensors, np.ndarray]:
    """Write MXFP4 tensors, whose scales are powers of two."""
    outputs, inputs = weight.shape
    codes = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    powers = rng.integers(118, 122, (outputs, inputs // 32)).astype(np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    numbers = np.where(codes < 8, 1, -1) * E2M1[codes & 7]
    real = numbers * 2.0 ** (powers.astype(int) - 127).repeat(32, 1)
    return {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": powers}, real


def write_nf4(stem: str, weight: np.ndarray, rng: Any) -> tuple[Tensors, np.ndarray]:
    """Write bitsandbytes' 4-bit tensors, with scales that are quantized too, in blocks of 5."""
    outputs, inputs = weight.shape
    count, block = outputs * inputs, 64
    numbers = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    codes = rng.integers(0, 16, count).astype(np.uint8)
    nested = np.sort(rng.uniform(0, 0.1, 256)).astype(np.float32)
    places = rng.integers(0, 256, count // block).astype(np.uint8)
    scales = rng.uniform(0.5, 1, -(-len(places) // 5)).astype(np.float32)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32"}
    state |= {"shape": [outputs, inputs], "nested_blocksize": 5, "nested_offset": 0.125}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors = {
        f"{stem}.weight": (codes[0::2] << 4 | codes[1::2])[:, None],
        f"{stem}.weight.absmax": places,
        f"{stem}.weight.quant_map": numbers,
        f"{stem}.weight.nested_absmax": scales,
        f"{stem}.weight.nested_quant_map": nested,
        f"{stem}.weight.quant_state.bitsandbytes__nf4": text,
    }
    absmax = nested[places].astype(np.float64) * scales.repeat(5)[: len(places)] + 0.125
    return tensors, (numbers[codes] * absmax.repeat(block)).reshape(outputs, inputs)


def write_fp8(
    stem: str, weight: np.ndarray, block: tuple[int, int] | None, rng: Any, suffix: str
) -> tuple[Tensors, np.ndarray]:
    """Write FP8 tensors with one scale, or one for each block of outputs and inputs."""
    codes = (weight * 40).astype(FP8)
    outputs, inputs = weight.shape
    rows, columns = block or weight.shape
    scales = rng.uniform(0.01, 0.03, (-(-outputs // rows), -(-inputs // columns)))
    scales = scales.astype(np.float32)
    real = codes.astype(np.float64)
    for o in range(outputs):
        for i in range(inputs):
            real[o, i] *= scales[o // rows, i // columns]
    stored = scales if block is not None else scales.reshape(())
    return {f"{stem}.weight": codes, f"{stem}.{suffix}": stored}, real


def save(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(t).reshape(t.shape) for name, t in tensors.items()},
        directory / "model.safetensors",
    )
    return directory
