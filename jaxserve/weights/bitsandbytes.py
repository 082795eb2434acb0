"""Read matrices quantized by bitsandbytes, in the format that Transformers saves.

4 bits (nf4 and fp4, from Dettmers et al. 2023, QLoRA): `X.weight`, uint8 [out * in / 2, 1], holds
the matrix row by row. The high half of each byte is the first of two codes. A code is an index into
`X.weight.quant_map`, float32[16], and a weight is the indexed number times the `absmax` of its
quantization block. With nested quantization, `X.weight.absmax` is uint8 and holds indices into
nested_quant_map[256]. The indexed number is multiplied by the nested_absmax of its block, and
nested_offset is added. The bytes of `X.weight.quant_state.bitsandbytes__nf4` are JSON with the
block sizes.

8 bits (Dettmers et al. 2022, LLM.int8): `X.weight` is int8 [out, in], and `X.SCB`, float32[out],
holds the weight that code 127 represents in each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.models.config.strict_json import parse_object
from jaxserve.models.placed_weight import FULL
from jaxserve.weights.host_matrix import HostMatrix
from jaxserve.weights.packed_tensor import MatrixFormat, PackedTensor

STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
MAX_STATE_BYTES = 1 << 12
MAX_BLOCK = 1 << 16
INT8_STEP = np.float32(1 / 127)


def _read_4_bits(packed: PackedTensor) -> HostMatrix:
    outputs, inputs = packed.shape
    count = outputs * inputs
    state_name, state = _state(packed)
    if state.get("shape") != [outputs, inputs]:
        raise packed.wrong(state_name, f"shape is not {[outputs, inputs]}, as config.json implies")
    block = _block(packed, state_name, state, "blocksize")
    codes = packed.tensor(".weight", (-(-count // 2), 1), "uint8").reshape(-1)
    numbers = packed.scales(".weight.quant_map", (16,)).astype(np.float32)
    pairs = np.stack([numbers.repeat(16), np.tile(numbers, 16)], axis=1)
    values = pairs[codes].reshape(-1)[:count]
    absmax = _absmax(packed, state_name, state, -(-count // block))
    whole = count // block * block
    with np.errstate(all="ignore"):  # the caller reports overflows with the tensor's name
        values[:whole].reshape(-1, block)[...] *= absmax[: count // block, None]
        values[whole:] *= absmax[-1]
    return HostMatrix(FULL, values.reshape(outputs, inputs).T)


def _absmax(
    packed: PackedTensor, state_name: str, state: Mapping[str, Any], blocks: int
) -> np.ndarray:
    """Return the largest magnitude in each block of a 4-bit bitsandbytes matrix, as float32."""
    if ".weight.nested_absmax" not in packed.entries:
        return packed.scales(".weight.absmax", (blocks,)).astype(np.float32)
    each = _block(packed, state_name, state, "nested_blocksize")
    offset = state.get("nested_offset")
    most = float(np.finfo(np.float32).max)
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not -most < offset < most:
        raise packed.wrong(state_name, "nested_offset is no number")
    codes = packed.tensor(".weight.absmax", (blocks,), "uint8")
    scales = packed.scales(".weight.nested_absmax", (-(-blocks // each),)).astype(np.float32)
    numbers = packed.scales(".weight.nested_quant_map", (256,)).astype(np.float32)
    with np.errstate(all="ignore"):
        return numbers[codes] * scales.repeat(each)[:blocks] + np.float32(offset)


def _state(packed: PackedTensor) -> tuple[str, dict[str, Any]]:
    suffixes = [suffix for suffix in STATES if suffix in packed.entries]
    if len(suffixes) != 1:
        raise packed.wrong(
            STATES[0], f"{len(suffixes)} such tensors; expected one, of nf4 or of fp4"
        )
    size = packed.entries[suffixes[0]].num_bytes
    if size > MAX_STATE_BYTES:
        raise packed.wrong(suffixes[0], f"has {size} bytes; allowed: {MAX_STATE_BYTES}")
    text = packed.tensor(suffixes[0], (size,), "uint8").tobytes()
    return suffixes[0], parse_object(text, str(packed.wrong(suffixes[0], "JSON")))


def _block(packed: PackedTensor, state_name: str, state: Mapping[str, Any], key: str) -> int:
    size = state.get(key)
    if type(size) is not int or not 1 <= size <= MAX_BLOCK:
        raise packed.wrong(state_name, f"{key} must be an integer from 1 to {MAX_BLOCK}")
    return size


def _read_8_bits(packed: PackedTensor) -> HostMatrix:
    outputs, inputs = packed.shape
    values = packed.tensor(".weight", packed.shape, "int8")
    scales = packed.scales(".SCB", (outputs,)).astype(np.float32) * INT8_STEP
    if ".weight_format" in packed.entries:
        order = packed.tensor(".weight_format", (), "uint8")
        if order.item() != 0:
            raise packed.wrong(".weight_format", "is not 0; allowed: codes in rows")
    return HostMatrix("int8", values.T, scales[None], group=inputs)


BNB4 = MatrixFormat(
    ".weight",
    "uint8",
    (
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        *STATES,
    ),
    (),
    _read_4_bits,
    lambda packed: packed.described(FULL),
)
BNB8 = MatrixFormat(
    ".weight",
    "int8",
    (".SCB", ".weight_format"),
    (),
    _read_8_bits,
    lambda packed: packed.described("int8", np.float32, group=packed.shape[1]),
)
