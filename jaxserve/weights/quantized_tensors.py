"""Checkpoints whose weights are stored quantized: which tensors hold them, and how to read those.

FP8 keeps the name `X.weight`, with codes [out, in] and scales beside it: one for the tensor, one
an output, or one for a block of outputs and inputs (DeepSeek-V3 report, section 3.3). A weight is
code times scale, also where that is called `weight_scale_inv`. AWQ and GPTQ hold `X.qweight`,
`X.qzeros` and `X.scales`; an int32 is eight codes of 4 bits:

* AWQ (AutoAWQ's "gemm"): qweight [in, out / 8]; nibble i of a word is output `AWQ_ORDER[i]` of 8.
* GPTQ (AutoGPTQ): qweight [in / 8, out], inputs in order; qzeros [groups, out / 8], less one in the
  first version of the format; `g_idx` [in] names each input's group where groups are not runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.config.quantization import StoredQuantization
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.codes import FP8, Codes
from jaxserve.weights.safetensors import TensorEntry, read_tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GPTQ_ORDER = tuple(range(8))
INT4_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
FP8_SCALES = (".weight_scale_inv", ".weight_scale")
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
# Scales of activations, which stay in their dtype; Transformers writes the latter.
ACTIVATION_SCALES = (".input_scale", ".activation_scale")
# Scales of the cache; the suffix and its kind.
KV_SCALES: Mapping[str, str] = MappingProxyType(
    {
        "self_attn.k_scale": "k",
        "self_attn.v_scale": "v",
        "self_attn.k_proj.k_scale": "k",
        "self_attn.v_proj.v_scale": "v",
        "self_attn.k_proj.output_scale": "k",
        "self_attn.v_proj.output_scale": "v",
    }
)


@dataclass(frozen=True)
class PackedTensor:
    """One quantized matrix of a checkpoint: its tensors by suffix, and its shape once unpacked."""

    name: str
    entries: Mapping[str, TensorEntry]
    stored: StoredQuantization
    shape: tuple[int, int]  # [out, in]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    def read(self) -> Codes:
        """Read the codes, rows as inputs and columns as outputs, in the checkpoint's order.

        Raises:
            CheckpointError: a tensor that is missing, of another shape or dtype, or not finite.
        """
        return self._fp8() if self.stored.form == "fp8" else self._int4()

    def _fp8(self) -> Codes:
        outputs, inputs = self.shape
        values = self._tensor(".weight", self.shape, "float8_e4m3fn").view(np.uint8)
        if ((values & 0x7F) == 0x7F).any():
            raise CheckpointError(f"{self._where('.weight')}: holds NaN")
        suffix = next(suffix for suffix in FP8_SCALES if suffix in self.entries)
        block = self.stored.block
        if block is not None:
            grid = -(-outputs // block[0]), -(-inputs // block[1])
            scales = self._scales(suffix, grid)
            scales = scales.repeat(block[0], axis=0)[:outputs].T
            return Codes("fp8", values.T, np.ascontiguousarray(scales), None, None, block[1])
        shape = self.entries[suffix].shape
        if shape not in ((), (1,), (outputs,), (outputs, 1)):
            expected = f"one scale, or [{outputs}]"
            raise CheckpointError(
                f"{self._where(suffix)}: shape {list(shape)}; expected {expected}"
            )
        scales = np.broadcast_to(self._scales(suffix, shape).reshape(1, -1), (1, outputs))
        return Codes("fp8", values.T, scales, None, None, inputs)

    def _int4(self) -> Codes:
        outputs, inputs = self.shape
        group = min(self.stored.group or inputs, inputs)
        groups = -(-inputs // group)
        scales = self._scales(".scales", (groups, outputs))
        awq = self.stored.method == "awq"
        order = AWQ_ORDER if awq else GPTQ_ORDER
        words = self._tensor(".qzeros", (groups, -(-outputs // 8)), "int32")
        zeros = _columns(words, order)[:, :outputs]
        zeros = (zeros + np.uint8(self.stored.zero_offset)) & 15
        if awq:
            words = self._tensor(".qweight", (inputs, -(-outputs // 8)), "int32")
            values = _columns(words, order)[:, :outputs]
        else:
            words = self._tensor(".qweight", (-(-inputs // 8), outputs), "int32")
            values = _columns(words.T, order).T[:inputs]
        rows = self._order(inputs, group)
        if rows is not None:
            values = values[rows]
        every = None if (zeros == 8).all() else zeros
        return Codes("int4", values, scales, every, rows, group)

    def _order(self, inputs: int, group: int) -> np.ndarray | None:
        """Return the order that sorts inputs by group; None where they are sorted."""
        if ".g_idx" not in self.entries:
            return None
        index = self._tensor(".g_idx", (inputs,), "int32")
        runs = np.arange(inputs) // group
        if np.array_equal(index, runs):
            return None
        rows = np.argsort(index, kind="stable").astype(np.int32)
        if not np.array_equal(index[rows], runs):
            raise CheckpointError(
                f"{self._where('.g_idx')}: groups must have {group} inputs each, the last the rest"
            )
        return rows

    def _scales(self, suffix: str, shape: tuple[int, ...]) -> np.ndarray:
        scales = self._tensor(suffix, shape)
        if not np.isfinite(scales.astype(np.float32)).all():
            raise CheckpointError(f"{self._where(suffix)}: holds NaN or infinity")
        # 16 bits stay 16 bits; the rest is float32, as the products are.
        return scales if scales.dtype.itemsize == 2 else scales.astype(np.float32)

    def _tensor(self, suffix: str, shape: tuple[int, ...], dtype: str | None = None) -> np.ndarray:
        entry = self.entries.get(suffix)
        if entry is None:
            raise CheckpointError(f"{self._where(suffix)}: is missing")
        allowed = FLOATS if dtype is None else {dtype}
        if entry.shape != shape or entry.dtype.name not in allowed:
            raise CheckpointError(
                f"{self._where(suffix)}: is {entry.dtype.name}{list(entry.shape)}; expected "
                f"{' or '.join(sorted(allowed))}{list(shape)}, as quantization_config says"
            )
        return read_tensor(entry)

    def _where(self, suffix: str) -> str:
        folder = next(iter(self.entries.values())).shard.path
        return f"{folder}: tensor {self.name.removesuffix('.weight') + suffix!r}"


@dataclass(frozen=True)
class SplitCheckpoint:
    """A checkpoint whose quantized tensors have been taken out, and those by weight name.

    `table` lists the weights that are stored as they are, `packed_table` the others.
    """

    checkpoint: Checkpoint
    table: list[WeightName]
    packed_table: list[WeightName]
    packed: Mapping[str, PackedTensor]
    kv_scales: Mapping[str, TensorEntry]


def sort_packed(
    checkpoint: Checkpoint,
    stored: StoredQuantization | None,
    table: Iterable[WeightName],
    dims: Mapping[str, int],
) -> SplitCheckpoint:
    """Tell the quantized tensors of a checkpoint from the others.

    Raises:
        CheckpointError: an fp8 weight without a scale, or a quantized one that only has part of
            its tensors.
    """
    left, table = dict(checkpoint.tensors), list(table)
    if stored is None:
        return SplitCheckpoint(checkpoint, table, [], {}, {})
    packed: dict[str, PackedTensor] = {}
    for weight in table:
        shape = weight.shape(dims)
        if weight.name in packed or not weight.name.endswith(".weight") or len(shape) != 2:
            continue
        entries = _entries(left, weight.name, stored)
        if entries:
            packed[weight.name] = PackedTensor(weight.name, entries, stored, (shape[0], shape[1]))
            _drop_null_bias(left, weight.name, table)
    kv_scales = {name: left.pop(name) for name in list(left) if _kv_kind(name)}
    rest = [weight for weight in table if weight.name not in packed]
    taken = [weight for weight in table if weight.name in packed]
    return SplitCheckpoint(replace(checkpoint, tensors=left), rest, taken, packed, kv_scales)


def _entries(
    left: dict[str, TensorEntry], name: str, stored: StoredQuantization
) -> dict[str, TensorEntry]:
    """Take a weight's tensors out of `left`; return none if it is stored in full."""
    stem = name.removesuffix(".weight")
    if stored.form == "int4":
        if stem + ".qweight" not in left:
            return {}
        return {s: left.pop(stem + s) for s in INT4_PARTS if stem + s in left}
    if name not in left or left[name].dtype != FP8:
        return {}
    for suffix in ACTIVATION_SCALES:
        left.pop(stem + suffix, None)
    found = {s: left.pop(stem + s) for s in (".weight", *FP8_SCALES) if stem + s in left}
    if len(found) != 2:
        path = found[".weight"].shard.path
        raise CheckpointError(
            f"{path}: tensor {name!r} is float8_e4m3fn and has {len(found) - 1} scales; "
            f"expected one of {', '.join(stem + suffix for suffix in FP8_SCALES)}"
        )
    return found


def _drop_null_bias(left: dict[str, TensorEntry], name: str, table: list[WeightName]) -> None:
    """Drop a bias of zeros, which AutoGPTQ writes for layers that have none."""
    bias = name.removesuffix(".weight") + ".bias"
    unknown = bias in left and all(weight.name != bias for weight in table)
    if unknown and not read_tensor(left[bias]).any():
        del left[bias]


def kv_scale_of(name: str) -> tuple[int, str] | None:
    """Return the layer that a scale of the cache is for, and "k" or "v"; None for other names."""
    kind = _kv_kind(name)
    layer = name.removeprefix("model.layers.").partition(".")[0]
    return (int(layer), kind) if kind and layer.isdecimal() else None


def _kv_kind(name: str) -> str | None:
    return next((kind for suffix, kind in KV_SCALES.items() if name.endswith(suffix)), None)


def _columns(words: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Unpack int32 [R, C] into uint8 [R, 8 * C]; nibble i of a word is column order[i] of its 8."""
    codes = np.empty((*words.shape, 8), np.uint8)
    unsigned = words.view(np.uint32)
    for nibble, column in enumerate(order):
        codes[..., column] = unsigned >> np.uint32(4 * nibble) & np.uint32(15)
    return codes.reshape(len(words), -1)
