"""Read matrices of integer codes, stored as bytes or packed into int32 with the first code lowest.

* AWQ (AutoAWQ): "gemm" has qweight [in, out / 8], qzeros [groups, out / 8] and scales
  [groups, out]. Nibble i of a word is output `AWQ_ORDER[i]` of 8. "gemv" has qweight [out, in / 8],
  qzeros [out, W] and scales [out, 8 W], with codes in order. W is the number of words for the
  groups of an output.
* GPTQ (AutoGPTQ): qweight [in * bits / 32, out], with inputs in order, and qzeros
  [groups, out * bits / 32], reduced by one in the first version of the format. `g_idx` [in] is the
  group of each input, for groups that are not consecutive.
* compressed-tensors' pack-quantized: weight_packed [out, in * bits / 32], codes plus half of their
  range, weight_scale [out, groups], weight_zero_point [out * bits / 32, groups], and weight_g_idx.
* compressed-tensors' int-quantized: weight, int8 [out, in], and weight_scale.
"""

from __future__ import annotations

import numpy as np

from jaxserve.models.placed_weight import FULL
from jaxserve.weights.host_matrix import HostMatrix
from jaxserve.weights.packed_tensor import MatrixFormat, PackedTensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MIDDLE = {4: 8, 8: 128}  # the unsigned code for zero in symmetric quantization, by bits


def _read_awq(packed: PackedTensor) -> HostMatrix:
    outputs, inputs = packed.shape
    zeros = _awq_zeros(packed)
    words = packed.tensor(".qweight", (inputs, -(-outputs // 8)), "int32")
    values = _unpacked(words, 4, AWQ_ORDER)[:, :outputs]
    return _codes(packed, values, packed.scales(".scales", zeros.shape), zeros, None)


def _awq_zeros(packed: PackedTensor) -> np.ndarray:
    outputs = packed.shape[0]
    words = packed.tensor(".qzeros", (packed.groups, -(-outputs // 8)), "int32")
    return _unpacked(words, 4, AWQ_ORDER)[:, :outputs]


def _read_awq_gemv(packed: PackedTensor) -> HostMatrix:
    outputs, inputs = packed.shape
    zeros, width = _gemv_zeros(packed)
    scales = packed.scales(".scales", (outputs, 8 * width))[:, : packed.groups].T
    words = packed.tensor(".qweight", (outputs, -(-inputs // 8)), "int32")
    values = _unpacked(words, 4)[:, :inputs].T
    return _codes(packed, values, np.ascontiguousarray(scales), zeros, None)


def _gemv_zeros(packed: PackedTensor) -> tuple[np.ndarray, int]:
    """Return the zero points [groups, out] of an AWQ "gemv" matrix, and the words per output."""
    several = {64: 2, 32: 4}.get(packed.group, 1)
    width = -(-packed.groups // (8 * several)) * several
    words = packed.tensor(".qzeros", (packed.shape[0], width), "int32")
    return _unpacked(words, 4)[:, : packed.groups].T, width


def _read_gptq(packed: PackedTensor) -> HostMatrix:
    outputs, inputs = packed.shape
    bits, a_word = packed.stored.bits, 32 // packed.stored.bits
    zeros = _gptq_zeros(packed)
    words = packed.tensor(".qweight", (-(-inputs // a_word), outputs), "int32")
    values = _unpacked(words.T, bits).T[:inputs]
    scales = packed.scales(".scales", zeros.shape)
    return _codes(packed, values, scales, zeros, _order(packed, ".g_idx"))


def _gptq_zeros(packed: PackedTensor) -> np.ndarray:
    outputs, bits = packed.shape[0], packed.stored.bits
    words = packed.tensor(".qzeros", (packed.groups, -(-outputs * bits // 32)), "int32")
    zeros = _unpacked(words, bits)[:, :outputs] + np.uint8(packed.stored.zero_offset)
    zeros &= np.uint8((1 << bits) - 1)
    return zeros


def _read_packed(packed: PackedTensor) -> HostMatrix:
    outputs, inputs = packed.shape
    bits, a_word = packed.stored.bits, 32 // packed.stored.bits
    _check_shape(packed)
    words = packed.tensor(".weight_packed", (outputs, -(-inputs // a_word)), "int32")
    values = _unpacked(words, bits)[:, :inputs].T
    scales = packed.scales_by_output(".weight_scale")
    return _codes(packed, values, scales, _points(packed), _order(packed, ".weight_g_idx"))


def _points(packed: PackedTensor) -> np.ndarray | None:
    """Return the zero points [groups, out] of a compressed-tensors matrix, or None without them."""
    if ".weight_zero_point" not in packed.entries:
        return None
    outputs, bits = packed.shape[0], packed.stored.bits
    shape = -(-outputs * bits // 32), packed.groups
    words = packed.tensor(".weight_zero_point", shape, "int32")
    return _unpacked(words.T, bits)[:, :outputs]


def _read_int8(packed: PackedTensor) -> HostMatrix:
    values = packed.tensor(".weight", packed.shape, "int8")
    scales = packed.scales_by_output(".weight_scale")
    zeros = packed.entries.get(".weight_zero_point")
    if zeros is not None:
        points = packed.tensor(".weight_zero_point", zeros.shape, "int8", "int32", *_FLOATS)
        if points.any():
            raise packed.wrong(".weight_zero_point", "is not zero; allowed: symmetric codes")
    return HostMatrix("int8", values.T, scales, group=packed.group)


def _codes(
    packed: PackedTensor,
    values: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    order: np.ndarray | None,
) -> HostMatrix:
    """Return a matrix of unsigned codes with scales, dequantized if it has 8 bits and zero points.

    Zero points in the middle of the range are dropped.

    Args:
        packed: the matrix in the checkpoint.
        values: uint8 [in, out].
        scales: [groups, out].
        zeros: uint8 [groups, out], or None for the middle of the range.
        order: permutation that sorts the inputs by group, or None.
    """
    bits, group = packed.stored.bits, packed.group
    if order is not None:
        values = values[order]
    if zeros is not None and (zeros == MIDDLE[bits]).all():
        zeros = None
    if bits == 4:
        return HostMatrix("int4", values, scales, zeros, order, group)
    signed = (values ^ np.uint8(MIDDLE[bits])).view(np.int8)
    codes = HostMatrix("int8", signed, scales, None, order, group)
    if zeros is None:
        return codes
    numbers = values.astype(np.float32)
    numbers -= zeros.repeat(group, axis=0)[: len(values)]
    numbers *= scales.astype(np.float32).repeat(group, axis=0)[: len(values)]
    if order is not None:
        numbers[order] = numbers.copy()
    return HostMatrix(FULL, numbers)


def _description(
    packed: PackedTensor, scales: str, zeros: np.ndarray | None, order: np.ndarray | None
) -> HostMatrix:
    """Return the matrix that `_codes` returns, with shapes in place of arrays.

    Args:
        packed: the matrix in the checkpoint.
        scales: name suffix of the tensor with the scales.
        zeros, order: see `_codes`.
    """
    bits, form = packed.stored.bits, "int4" if packed.stored.bits == 4 else "int8"
    has_zeros = zeros is not None and not (zeros == MIDDLE[bits]).all()
    if bits == 8 and has_zeros:
        return packed.described(FULL)
    kind = np.uint8 if has_zeros else None
    return packed.described(form, packed.scales_dtype(scales), kind, order)


def _describe_awq(packed: PackedTensor) -> HostMatrix:
    return _description(packed, ".scales", _awq_zeros(packed), None)


def _describe_awq_gemv(packed: PackedTensor) -> HostMatrix:
    return _description(packed, ".scales", _gemv_zeros(packed)[0], None)


def _describe_gptq(packed: PackedTensor) -> HostMatrix:
    return _description(packed, ".scales", _gptq_zeros(packed), _order(packed, ".g_idx"))


def _describe_packed(packed: PackedTensor) -> HostMatrix:
    return _description(packed, ".weight_scale", _points(packed), _order(packed, ".weight_g_idx"))


def _describe_int8(packed: PackedTensor) -> HostMatrix:
    return packed.described("int8", packed.scales_dtype(".weight_scale"))


def _check_shape(packed: PackedTensor) -> None:
    if ".weight_shape" in packed.entries:
        shape = packed.tensor(".weight_shape", (2,), "int64", "int32")
        if tuple(shape) != packed.shape:
            raise packed.wrong(".weight_shape", f"is {shape}; config.json implies {packed.shape}")


def _order(packed: PackedTensor, suffix: str) -> np.ndarray | None:
    """Return the permutation that sorts a matrix's inputs by group, or None if they are sorted.

    The group of each input is read from the tensor with name suffix `suffix`, if present.

    Raises:
        CheckpointError: a group has too many or too few inputs.
    """
    if suffix not in packed.entries:
        return None
    inputs, group = packed.shape[1], packed.group
    index = packed.tensor(suffix, (inputs,), "int32")
    runs = np.arange(inputs) // group
    if np.array_equal(index, runs) or (index == -1).all():  # -1: never set
        return None
    rows = np.argsort(index, kind="stable").astype(np.int32)
    if not np.array_equal(index[rows], runs):
        raise packed.wrong(suffix, f"groups must have {group} inputs each, the last the rest")
    return rows


def _unpacked(words: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Unpack the codes of words int32 [R, C] to uint8 [R, C * 32 / bits], lowest bits first.

    `order` gives the column, among the columns of a word, of each code. None keeps the order.
    """
    codes = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 4:
        codes = np.stack([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
    codes = codes.reshape(len(words), words.shape[1], 32 // bits)
    if order is not None:
        codes = codes[..., np.argsort(order)]
    return codes.reshape(len(words), -1)


_FLOATS = ("float16", "bfloat16", "float32")
AWQ = MatrixFormat(".qweight", "int32", (".qzeros", ".scales"), (), _read_awq, _describe_awq)
AWQ_GEMV = MatrixFormat(
    ".qweight", "int32", (".qzeros", ".scales"), (), _read_awq_gemv, _describe_awq_gemv
)
GPTQ = MatrixFormat(
    ".qweight", "int32", (".qzeros", ".scales", ".g_idx"), (), _read_gptq, _describe_gptq
)
PACKED = MatrixFormat(
    ".weight_packed",
    "int32",
    (".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
    (),
    _read_packed,
    _describe_packed,
)
INT8 = MatrixFormat(
    ".weight", "int8", (".weight_scale", ".weight_zero_point"), (), _read_int8, _describe_int8
)
