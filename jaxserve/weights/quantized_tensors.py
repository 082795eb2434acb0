"""Checkpoints whose weights are stored quantized: which tensors hold them.

Each matrix `X.weight` is several tensors: `packed_words.py`, `packed_floats.py` and
`bitsandbytes.py` say which, and read them.
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
from jaxserve.weights.packed_tensor import PLAIN, Layout, PackedTensor
from jaxserve.weights.safetensors import TensorEntry, read_tensor

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
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
    """Tell the quantized tensors of a checkpoint from the others."""
    left, table = dict(checkpoint.tensors), list(table)
    if stored is None:
        return SplitCheckpoint(checkpoint, table, [], {}, {})
    layout = LAYOUTS[stored.layout]
    packed: dict[str, PackedTensor] = {}
    for weight in table:
        shape = weight.shape(dims)
        if weight.name in packed or not weight.name.endswith(".weight") or len(shape) != 2:
            continue
        entries = _entries(left, weight.name, layout)
        if entries:
            size = shape[0], shape[1]
            packed[weight.name] = PackedTensor(weight.name, entries, stored, layout, size)
            _drop_null_bias(left, weight.name, table)
    if stored.form == "full":
        _take_neighbours(left, packed, table, stored, dims)
    kv_scales = {name: left.pop(name) for name in list(left) if _kv_kind(name)}
    rest = [weight for weight in table if weight.name not in packed]
    taken = [weight for weight in table if weight.name in packed]
    return SplitCheckpoint(replace(checkpoint, tensors=left), rest, taken, packed, kv_scales)


def _entries(left: dict[str, TensorEntry], name: str, layout: Layout) -> dict[str, TensorEntry]:
    stem = name.removesuffix(".weight")
    if not layout.holds(stem, left):
        return {}
    for suffix in layout.unused:
        left.pop(stem + suffix, None)
    return {s: left.pop(stem + s) for s in (layout.codes, *layout.parts) if stem + s in left}


def _take_neighbours(
    left: dict[str, TensorEntry],
    packed: dict[str, PackedTensor],
    table: list[WeightName],
    stored: StoredQuantization,
    dims: Mapping[str, int],
) -> None:
    """Take floats that are one parameter with a matrix that is widened: they are read together."""
    paths = {weight.path for weight in table if weight.name in packed}
    for weight in table:
        if weight.path in paths and weight.name in left:
            outputs, inputs = weight.shape(dims)
            entries = {PLAIN.codes: left.pop(weight.name)}
            size = outputs, inputs
            packed[weight.name] = PackedTensor(weight.name, entries, stored, PLAIN, size)


def _drop_null_bias(left: dict[str, TensorEntry], name: str, table: list[WeightName]) -> None:
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
