"""`quantization_config` of the library compressed-tensors, which llm-compressor writes.

Supported formats: float-quantized, int-quantized, naive-quantized, pack-quantized,
nvfp4-pack-quantized and mxfp4-pack-quantized. Activations with an int8 format are rounded
dynamically, with a scale for each token, as in vLLM. Activations with a float format stay in their
dtype, which is more exact.
"""

from __future__ import annotations

from typing import Any, Literal

from jaxserve.models.config.fields import Fields
from jaxserve.models.config.stored_quantization import (
    FIELD,
    StoredQuantization,
    block_sizes,
    group_size,
)

METHOD = "compressed-tensors"
FORMATS = (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized",
)  # fmt: skip
_SCHEME = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_MADE_BY = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})


def read_compressed_tensors(fields: Fields) -> StoredQuantization:
    """Return the stored quantization that a compressed-tensors `quantization_config` describes.

    Unsupported values are appended to `fields.problems`.
    """
    form = fields.choice("format", FORMATS)
    # A transform is a separate product before or after the quantized one.
    fields.neutral({"transform_config": (None, {}), "moe_sparsity_config": (None, {})})
    sparsity = fields.take("sparsity_config")
    if sparsity not in (None, {}) and (
        not isinstance(sparsity, dict) or sparsity.get("format") != "dense"
    ):
        fields.refuse("sparsity_config", "null, or format 'dense': no tensor left out")
    scheme = _scheme(fields, form)
    if scheme is None:
        return StoredQuantization(METHOD, "fp8", "fp8")
    prefix = f"{FIELD}.config_groups.weights."
    weights = Fields(scheme["weights"], fields.problems, prefix)
    weights.neutral({"dynamic": False})
    if form == "nvfp4-pack-quantized":
        stored = _fp4(weights, "nvfp4", "tensor_group", 16)
    elif form == "mxfp4-pack-quantized":
        stored = _fp4(weights, "mxfp4", "group", 32)
    elif form == "pack-quantized":
        stored = _integers(weights, scheme.get("input_activations"), fields, packed=True)
    elif form == "float-quantized" or scheme["weights"].get("type") == "float":
        stored = _floats(weights)
    else:
        stored = _integers(weights, scheme.get("input_activations"), fields, packed=False)
    weights.finish(_MADE_BY)
    return stored


def _scheme(fields: Fields, form: str) -> dict[str, Any] | None:
    """Return the quantization scheme that all groups of layers in `config_groups` share.

    If the groups differ, append a problem to `fields` and return None. The names of the layers in
    each group are ignored: the tensors show which layers are quantized.
    """
    groups = fields.take("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    alike = [
        {key: value for key, value in scheme.items() if key != "targets"}
        for scheme in schemes
        if isinstance(scheme, dict) and isinstance(scheme.get("weights"), dict)
    ]
    whole = len(alike) == len(schemes) > 0 and all(scheme == alike[0] for scheme in alike)
    if not whole or alike[0].keys() - _SCHEME or alike[0].get("format") not in (None, form):
        fields.refuse(
            "config_groups", "an object of groups that store weights in one way, that of format"
        )
        return None
    return alike[0]


def _floats(weights: Fields) -> StoredQuantization:
    weights.neutral({"num_bits": 8, "type": "float", "symmetric": True})
    weights.neutral({"group_size": None, "actorder": (None, False)})
    strategy = weights.choice("strategy", ["tensor", "channel", "block"])
    block = block_sizes(weights, "block_structure")
    if strategy == "block" and block is None:
        weights.refuse("block_structure", "two positive sizes")
    return StoredQuantization(METHOD, "fp8", "fp8", block=block)


def _fp4(
    weights: Fields, layout: Literal["nvfp4", "mxfp4"], strategy: str, group: int
) -> StoredQuantization:
    weights.neutral({"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy})
    weights.neutral({"block_structure": None, "actorder": (None, False)})
    weights.integer("group_size", group, group)
    return StoredQuantization(METHOD, layout, "int8", 4, group)


def _integers(
    weights: Fields, activations: Any, fields: Fields, packed: bool
) -> StoredQuantization:
    weights.neutral({"type": "int", "block_structure": None})
    bits = weights.integer("num_bits", 4, 8)
    if bits not in (4, 8):
        weights.refuse("num_bits", "4 or 8")
    symmetric = weights.flag("symmetric", default=True)
    size = weights.take("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.choice("strategy", ["tensor", "channel", "group"], default=implied)
    group = None if size is None else group_size(weights, "group_size")
    if (strategy == "group") != (group is not None):
        weights.refuse("group_size", "a size where strategy is 'group', else null or -1")
    sorted_inputs = weights.take("actorder")
    if sorted_inputs not in (None, False, "weight", "static", "group", "dynamic"):
        weights.refuse("actorder", "null, 'weight', 'static', 'group' or 'dynamic'")
    rounds = _rounds_rows(activations, fields)
    if not symmetric and (rounds or not packed):
        weights.refuse("symmetric", "true, but where format is pack-quantized and activations null")
    if sorted_inputs in ("group", "dynamic") and rounds:
        weights.refuse("actorder", "null, 'weight' or 'static' where activations are rounded")
    form = "int8" if bits == 8 or not packed else "int4"
    return StoredQuantization(
        method=METHOD,
        layout="packed" if packed else "int8",
        form=form if form == "int4" or symmetric else "full",
        bits=bits,
        group=group,
        rounds_rows=rounds,
    )


def _rounds_rows(activations: Any, fields: Fields) -> bool:
    """Return whether `input_activations` are rounded to int8, each token's row with its own scale.

    Null gives False. Any other rounding is appended to the problems of `fields`.
    """
    if activations is None:
        return False
    prefix = f"{FIELD}.config_groups.input_activations."
    if not isinstance(activations, dict):
        fields.problems.append(f"{prefix[:-1]} is no object; allowed: an object, or null")
        return False
    inner = Fields(activations, fields.problems, prefix)
    inner.choice("strategy", ["token"])
    inner.neutral({"num_bits": 8, "type": "int", "symmetric": True})
    if inner.take("dynamic") is not True:
        inner.refuse("dynamic", "true (scales that were fixed by calibration are not supported)")
    inner.neutral({"group_size": None, "block_structure": None, "actorder": (None, False)})
    inner.finish(_MADE_BY)
    return True
