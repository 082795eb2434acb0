"""Find the tensors of quantized matrices in a checkpoint.

A quantized matrix `X.weight` consists of several tensors. `packed_words.py`, `packed_floats.py` and
`bitsandbytes.py` describe their formats and read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from jaxserve.models.config.stored_quantization import StoredQuantization
from jaxserve.models.weight_table import WeightName
from jaxserve.weights import packed_floats, packed_words
from jaxserve.weights.bitsandbytes import BNB4, BNB8
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.packed_tensor import PLAIN, MatrixFormat, PackedTensor
from jaxserve.weights.safetensors import TensorEntry, read_tensor

FORMATS: Mapping[str, MatrixFormat] = MappingProxyType(
    {
        "fp8": packed_floats.FP8,
        "awq": packed_words.AWQ,
        "awq_gemv": packed_words.AWQ_GEMV,
        "gptq": packed_words.GPTQ,
        "int8": packed_words.INT8,
        "packed": packed_words.PACKED,
        "mxfp4": packed_floats.MXFP4,
        "nvfp4": packed_floats.NVFP4,
        "nvfp4_modelopt": packed_floats.NVFP4_MODELOPT,
        "bnb4": BNB4,
        "bnb8": BNB8,
    }
)
# Name suffixes of cache scales, and whether they scale keys or values.
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
class SplitCheckpoint:
    """A checkpoint divided into plain tensors, quantized matrices and cache scales.

    Attributes:
        checkpoint: the checkpoint without the tensors of the other two kinds.
        table: the weights that are not quantized.
        packed_table: the quantized weights.
        packed: the quantized matrices, by weight name.
        kv_scales: the scales of an fp8 cache, by tensor name.
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
    """Divide a checkpoint into plain tensors, quantized matrices and cache scales.

    Args:
        checkpoint: the tensors by name.
        stored: the quantization that config.json describes. None makes all tensors plain.
        table: the weights of the model.
        dims: sizes of the dimensions that the table names.
    """
    remaining, table = dict(checkpoint.tensors), list(table)
    if stored is None:
        return SplitCheckpoint(checkpoint, table, [], {}, {})
    format_ = FORMATS[stored.layout]
    packed: dict[str, PackedTensor] = {}
    for weight in table:
        shape = weight.shape(dims)
        if weight.name in packed or not weight.name.endswith(".weight") or len(shape) != 2:
            continue
        entries = _entries(remaining, weight.name, format_)
        if entries:
            size = shape[0], shape[1]
            packed[weight.name] = PackedTensor(weight.name, entries, stored, format_, size)
            _drop_null_bias(remaining, weight.name, table)
    if stored.form == "full":
        _take_neighbours(remaining, packed, table, stored, dims)
    kv_scales = {name: remaining.pop(name) for name in list(remaining) if _kv_kind(name)}
    rest = [weight for weight in table if weight.name not in packed]
    taken = [weight for weight in table if weight.name in packed]
    return SplitCheckpoint(replace(checkpoint, tensors=remaining), rest, taken, packed, kv_scales)


def _entries(
    remaining: dict[str, TensorEntry], name: str, format_: MatrixFormat
) -> dict[str, TensorEntry]:
    # Removes the tensors of a quantized matrix from `remaining`. Returns {} for a plain matrix.
    stem = name.removesuffix(".weight")
    if not format_.holds(stem, remaining):
        return {}
    for suffix in format_.unused:
        remaining.pop(stem + suffix, None)
    return {
        s: remaining.pop(stem + s) for s in (format_.codes, *format_.parts) if stem + s in remaining
    }


def _take_neighbours(
    remaining: dict[str, TensorEntry],
    packed: dict[str, PackedTensor],
    table: list[WeightName],
    stored: StoredQuantization,
    dims: Mapping[str, int],
) -> None:
    """Move plain tensors that share a parameter with a quantized one from `remaining` to `packed`.

    This is for quantized matrices that are read as floats, so that the whole parameter is read at
    once.
    """
    paths = {weight.path for weight in table if weight.name in packed}
    for weight in table:
        if weight.path in paths and weight.name in remaining:
            outputs, inputs = weight.shape(dims)
            entries = {PLAIN.codes: remaining.pop(weight.name)}
            size = outputs, inputs
            packed[weight.name] = PackedTensor(weight.name, entries, stored, PLAIN, size)


def _drop_null_bias(remaining: dict[str, TensorEntry], name: str, table: list[WeightName]) -> None:
    # AutoGPTQ writes a bias of zeros for layers without a bias.
    bias = name.removesuffix(".weight") + ".bias"
    unknown = bias in remaining and all(weight.name != bias for weight in table)
    if unknown and not read_tensor(remaining[bias]).any():
        del remaining[bias]


def kv_scale_of(name: str) -> tuple[int, str] | None:
    """Return the layer of the cache scale called `name`, and "k" for keys or "v" for values.

    None is returned for the name of another tensor.
    """
    kind = _kv_kind(name)
    layer = name.removeprefix("model.layers.").partition(".")[0]
    return (int(layer), kind) if kind and layer.isdecimal() else None


def _kv_kind(name: str) -> str | None:
    return next((kind for suffix, kind in KV_SCALES.items() if name.endswith(suffix)), None)
