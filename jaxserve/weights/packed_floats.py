"""Read matrices of 8-bit and 4-bit floats.

* FP8: `X.weight` holds codes [out, in]. There is one scale for the tensor, for each output, or for
  each block of outputs and inputs (DeepSeek-V3 report, section 3.3). A weight is code times scale,
  even if the scale is called `weight_scale_inv`.
* NVFP4 (compressed-tensors' nvfp4-pack-quantized, NVIDIA's modelopt): E2M1 codes [out, in / 2], two
  per byte with the even input in the low half, and E4M3 scales [out, in / 16], `weight_scale`. One
  float32 divides the scales (`weight_global_scale`) or multiplies them (modelopt's
  `weight_scale_2`). Twice an E2M1 number is an integer, so int8 codes with half the scales
  represent each weight exactly.
* MXFP4 (compressed-tensors' mxfp4-pack-quantized): the same codes with E8M0 scales [out, in / 32],
  `weight_scale`, and no further scale.
"""

from __future__ import annotations

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights.host_matrix import HostMatrix
from jaxserve.weights.mxfp4 import NOT_A_NUMBER, PAIRS
from jaxserve.weights.packed_tensor import MatrixFormat, PackedTensor

E4M3 = "float8_e4m3fn"
FP8_SCALES = (".weight_scale_inv", ".weight_scale")
# Scales of activations, which are not quantized here. Transformers writes the second.
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".input_scale_ub", ".input_global_scale")
_TWICE = (2 * PAIRS).astype(np.int8)  # [256, 2]


def _read_fp8(packed: PackedTensor) -> HostMatrix:
    outputs, inputs = packed.shape
    suffixes = [suffix for suffix in FP8_SCALES if suffix in packed.entries]
    if len(suffixes) != 1:
        stem = packed.name.removesuffix(".weight")
        raise CheckpointError(
            f"{packed.entries['.weight'].shard.path}: tensor {packed.name!r} is {E4M3} and has "
            f"{len(suffixes)} scales; expected one of "
            f"{', '.join(stem + suffix for suffix in FP8_SCALES)}"
        )
    values, suffix = _bits(packed, ".weight", packed.shape), suffixes[0]
    block = packed.stored.block
    if block is not None:
        grid = -(-outputs // block[0]), -(-inputs // block[1])
        scales = packed.scales(suffix, grid)
        scales = scales.repeat(block[0], axis=0)[:outputs].T
        return HostMatrix("fp8", values.T, np.ascontiguousarray(scales), group=block[1])
    return HostMatrix("fp8", values.T, packed.scales_by_output(suffix), group=inputs)


def _describe_fp8(packed: PackedTensor) -> HostMatrix:
    block, inputs = packed.stored.block, packed.shape[1]
    suffix = next((suffix for suffix in FP8_SCALES if suffix in packed.entries), FP8_SCALES[0])
    group = inputs if block is None else block[1]
    return packed.described("fp8", packed.scales_dtype(suffix), group=group)


def _describe_fp4(packed: PackedTensor) -> HostMatrix:
    return packed.described("int8", np.float32)


def _bits(packed: PackedTensor, suffix: str, shape: tuple[int, ...]) -> np.ndarray:
    values = packed.tensor(suffix, shape, E4M3).view(np.uint8)
    if ((values & 0x7F) == 0x7F).any():
        raise packed.wrong(suffix, "holds NaN")
    return values


def _read_nvfp4(packed: PackedTensor) -> HostMatrix:
    outputs = packed.shape[0]
    scales = _bits(packed, ".weight_scale", (outputs, packed.groups)).view(E4M3)
    scales = scales.astype(np.float32)
    with np.errstate(over="ignore"):  # reported with the tensor's name
        if packed.format is NVFP4:
            scales /= packed.factor(".weight_global_scale")
        else:
            scales *= packed.factor(".weight_scale_2")
    if not np.isfinite(scales).all():
        raise packed.wrong(".weight_scale", "overflows")
    return _fp4_codes(packed, scales)


def _read_mxfp4(packed: PackedTensor) -> HostMatrix:
    scales = packed.tensor(".weight_scale", (packed.shape[0], packed.groups), "uint8")
    if (scales == NOT_A_NUMBER).any():
        raise packed.wrong(".weight_scale", "holds NaN")
    return _fp4_codes(packed, np.ldexp(np.float32(1), scales.astype(np.int32) - 127))


def _fp4_codes(packed: PackedTensor, scales: np.ndarray) -> HostMatrix:
    # Twice an E2M1 number is an integer, so int8 codes with half the scales are exact.
    outputs, inputs = packed.shape
    if inputs % packed.group:
        raise packed.wrong(".weight_scale", f"{inputs} inputs are not groups of {packed.group}")
    codes = packed.tensor(packed.format.codes, (outputs, inputs // 2), "uint8")
    values = _TWICE[codes].reshape(outputs, inputs)
    halves = np.ascontiguousarray(scales.T) * np.float32(0.5)
    return HostMatrix("int8", values.T, halves, group=packed.group)


FP8 = MatrixFormat(".weight", E4M3, FP8_SCALES, ACTIVATION_SCALES, _read_fp8, _describe_fp8)
NVFP4 = MatrixFormat(
    ".weight_packed",
    "uint8",
    (".weight_scale", ".weight_global_scale"),
    ACTIVATION_SCALES,
    _read_nvfp4,
    _describe_fp4,
)
MXFP4 = MatrixFormat(
    ".weight_packed", "uint8", (".weight_scale",), ACTIVATION_SCALES, _read_mxfp4, _describe_fp4
)
NVFP4_MODELOPT = MatrixFormat(
    ".weight",
    "uint8",
    (".weight_scale", ".weight_scale_2"),
    ACTIVATION_SCALES,
    _read_nvfp4,
    _describe_fp4,
)
