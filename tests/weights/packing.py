"""Writes quantized checkpoints from the formats' descriptions; shares nothing with the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

FP8 = ml_dtypes.float8_e4m3fn
Tensors = dict[str, np.ndarray]


def pack_words(nibbles: list[int]) -> int:
    """Eight numbers of 4 bits in one signed word, the first in the lowest bits."""
    word = sum(number << (4 * place) for place, number in enumerate(nibbles))
    return word - (1 << 32) if word >= 1 << 31 else word


def awq_words(row: np.ndarray) -> list[int]:
    """AutoAWQ's gemm order: bits 0 to 3 hold output 0, then come 2, 4, 6, 1, 3, 5 and 7."""
    return [
        pack_words([int(row[at + place]) for place in (0, 2, 4, 6, 1, 3, 5, 7)])
        for at in range(0, len(row), 8)
    ]


def plain_words(row: np.ndarray) -> list[int]:
    return [pack_words([int(n) for n in row[at : at + 8]]) for at in range(0, len(row), 8)]


def write_awq(stem: str, weight: np.ndarray, group: int, rng: Any) -> tuple[Tensors, np.ndarray]:
    """Tensors of a random AWQ matrix shaped like `weight` [out, in], and what it stands for."""
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
    stem: str, weight: np.ndarray, group: int, rng: Any, act_order: bool, version: int = 1
) -> tuple[Tensors, np.ndarray]:
    """The same for GPTQ; with act_order inputs are assigned to groups at random."""
    outputs, inputs = weight.shape
    codes = rng.integers(0, 16, (inputs, outputs))
    zeros = rng.integers(1, 16, (inputs // group, outputs))
    scales = rng.uniform(0.01, 0.03, zeros.shape).astype(np.float16)
    index = np.arange(inputs) // group
    if act_order:
        index = rng.permutation(index)
    stored = zeros - 1 if version == 1 else zeros
    tensors = {
        f"{stem}.qweight": np.array([plain_words(column) for column in codes.T], np.int32).T.copy(),
        f"{stem}.qzeros": np.array([plain_words(row) for row in stored], np.int32),
        f"{stem}.scales": scales,
        f"{stem}.g_idx": index.astype(np.int32),
    }
    real = np.empty((outputs, inputs))
    for i in range(inputs):
        real[:, i] = (codes[i] - zeros[index[i]]) * scales[index[i]].astype(np.float64)
    return tensors, real


def write_fp8(
    stem: str, weight: np.ndarray, block: tuple[int, int] | None, rng: Any, suffix: str
) -> tuple[Tensors, np.ndarray]:
    """The same for FP8: one scale, or one for each block of outputs and inputs."""
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
