"""Matrices of narrow floats.

* FP8 keeps the name `X.weight`, with codes [out, in] and scales beside it: one for the tensor, one
  an output, or one for a block of outputs and inputs (DeepSeek-V3 report, section 3.3). A weight is
  code times scale, also where that is called `weight_scale_inv`.
* NVFP4 (compressed-tensors' nvfp4-pack-quantized, NVIDIA's modelopt): E2M1, two to a byte, the even
  input low, [out, in / 2]; weight_scale, E4M3 [out, in / 16]; and one float32, which divides the
  scales (`weight_global_scale`) or multiplies them (modelopt's `weight_scale_2`). Twice a number of
  E2M1 is whole, so that int8 with half the scales holds each weight exactly.
* MXFP4 (compressed-tensors' mxfp4-pack-quantized): the same codes with weight_scale, E8M0
  [out, in / 32], and no other scale.
"""

from __future__ import annotations

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights.codes import Codes, CodesLayout
from jaxserve.weights.mxfp4 import NOT_A_NUMBER, PAIRS
from jaxserve.weights.packed_tensor import FullValues, Layout, PackedTensor

E4M3 = "float8_e4m3fn"
FP8_SCALES = (".weight_scale_inv", ".weight_scale")
# Scales of activations, which stay in their dtype; Transformers writes the second.
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".input_scale_ub", ".input_global_scale")
_TWICE = (2 * PAIRS).astype(np.int8)  # [256, 2]


def _read_fp8(packed: PackedTensor) -> Codes | FullValues:
    outputs, inputs = packed.shape
    found = [suffix for suffix in FP8_SCALES if suffix in packed.entries]
    if len(found) != 1:
        stem = packed.name.removesuffix(".weight")
        raise CheckpointError(
            f"{packed.entries['.weight'].shard.path}: tensor {packed.name!r} is {E4M3} and has "
            f"{len(found)} scales; expected one of "
            f"{', '.join(stem + suffix for suffix in FP8_SCALES)}"
        )
    values, suffix = _bits(packed, ".weight", packed.shape), found[0]
    block = packed.stored.block
    if block is not None:
        grid = -(-outputs // block[0]), -(-inputs // block[1])
        scales = packed.scales(suffix, grid)
        scales = scales.repeat(block[0], axis=0)[:outputs].T
        return Codes("fp8", values.T, np.ascontiguousarray(scales), None, None, block[1])
    return Codes("fp8", values.T, packed.scales_by_output(suffix), None, None, inputs)


def _describe_fp8(packed: PackedTensor) -> CodesLayout:
    block, inputs = packed.stored.block, packed.shape[1]
    suffix = next((suffix for suffix in FP8_SCALES if suffix in packed.entries), FP8_SCALES[0])
    group = inputs if block is None else block[1]
    return CodesLayout("fp8", group, packed.scales_dtype(suffix))


def _describe_fp4(packed: PackedTensor) -> CodesLayout:
    return CodesLayout("int8", packed.group, np.dtype(np.float32))


def _bits(packed: PackedTensor, suffix: str, shape: tuple[int, ...]) -> np.ndarray:
    """Read float8_e4m3fn as its bits, none of which is NaN."""
    values = packed.tensor(suffix, shape, E4M3).view(np.uint8)
    if ((values & 0x7F) == 0x7F).any():
        raise packed.wrong(suffix, "holds NaN")
    return values


def _read_nvfp4(packed: PackedTensor) -> Codes | FullValues:
    outputs = packed.shape[0]
    scales = _bits(packed, ".weight_scale", (outputs, packed.groups)).view(E4M3)
    scales = scales.astype(np.float32)
    with np.errstate(over="ignore"):  # reported with the tensor's name
        if packed.layout is NVFP4:
            scales /= packed.factor(".weight_global_scale")
        else:
            scales *= packed.factor(".weight_scale_2")
    if not np.isfinite(scales).all():
        raise packed.wrong(".weight_scale", "overflows")
    return _fp4_codes(packed, scales)


def _read_mxfp4(packed: PackedTensor) -> Codes | FullValues:
    scales = packed.tensor(".weight_scale", (packed.shape[0], packed.groups), "uint8")
    if (scales == NOT_A_NUMBER).any():
        raise packed.wrong(".weight_scale", "holds NaN")
    return _fp4_codes(packed, np.ldexp(np.float32(1), scales.astype(np.int32) - 127))


def _fp4_codes(packed: PackedTensor, scales: np.ndarray) -> Codes:
    """Return twice the numbers of E2M1 as int8, with half the scales, float32 [out, groups]."""
    outputs, inputs = packed.shape
    if inputs % packed.group:
        raise packed.wrong(".weight_scale", f"{inputs} inputs are not groups of {packed.group}")
    codes = packed.tensor(packed.layout.codes, (outputs, inputs // 2), "uint8")
    values = _TWICE[codes].reshape(outputs, inputs)
    halves = np.ascontiguousarray(scales.T) * np.float32(0.5)
    return Codes("int8", values.T, halves, None, None, packed.group)


FP8 = Layout(".weight", E4M3, FP8_SCALES, ACTIVATION_SCALES, _read_fp8, _describe_fp8)
NVFP4 = Layout(
    ".weight_packed",
    "uint8",
    (".weight_scale", ".weight_global_scale"),
    ACTIVATION_SCALES,
    _read_nvfp4,
    _describe_fp4,
)
MXFP4 = Layout(
    ".weight_packed", "uint8", (".weight_scale",), ACTIVATION_SCALES, _read_mxfp4, _describe_fp4
)
NVFP4_MODELOPT = Layout(
    ".weight",
    "uint8",
    (".weight_scale", ".weight_scale_2"),
    ACTIVATION_SCALES,
    _read_nvfp4,
    _describe_fp4,
)
