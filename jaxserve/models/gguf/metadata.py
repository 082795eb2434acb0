"""Metadata of a GGUF file, and readers of fields that several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models.config.fields import shown
from jaxserve.models.config.layers import FULL, MAX_LAYERS, SLIDING

Raw = dict[str, Any]  # the fields of a config.json
FURTHER = "nextn_predict_layers"
PATTERN = "attention.sliding_window_pattern"
# The division of pairs among the dimensions of an image, which does not affect text, and the number
# of layers to which an image encoder adds features. The encoder is not read.
VISION_KEYS = frozenset({"rope.dimension_sections", "n_deepstack_layers"})
WINDOW_KEYS = frozenset({PATTERN, "rope.freq_base_swa"})  # read by `read_windows`


@dataclass(frozen=True)
class GgufMetadata:
    """Metadata of one model in a GGUF file.

    Attributes:
        path: path of the file, for errors.
        architecture: llama.cpp's name of the architecture, the prefix of its keys.
        values: values of all keys, including keys with other prefixes.
        tensors: names of the tensors.
        read_factors: reads a tensor that is part of the configuration, and raises CheckpointError
            if it is not a short vector.
    """

    path: Path
    architecture: str
    values: Mapping[str, Any]
    tensors: Set[str]
    read_factors: Callable[[str], list[float]]

    def key(self, name: str) -> str:
        """Return the full metadata key "<architecture>.<name>"."""
        return f"{self.architecture}.{name}"

    def get(self, name: str, default: Any = None) -> Any:
        """Return the metadata value of key "<architecture>.<name>", or `default` if absent."""
        return self.values.get(self.key(name), default)


def skip_further(gguf: GgufMetadata, raw: Raw) -> None:
    """Subtract the blocks that predict further tokens from `num_hidden_layers` in `raw`.

    They are the last blocks of the GGUF file, and are not read.
    """
    further, layers = gguf.get(FURTHER, 0), raw.get("num_hidden_layers")
    if type(further) is int and type(layers) is int:
        raw["num_hidden_layers"] = layers - further


def read_scored(gguf: GgufMetadata, raw: Raw) -> None:
    """Add defaults of experts with DeepSeek-V3's router to the config.json `raw` of a GGUF file.

    They are llama.cpp's. The blocks that predict further tokens are subtracted (`skip_further`).
    """
    for name in ("n_group", "topk_group", "routed_scaling_factor"):
        raw[name] = raw.get(name) or 1  # 0 stands for an absent value
    raw["routed_scaling_factor"] = float(raw["routed_scaling_factor"])
    raw.setdefault("norm_topk_prob", False)
    raw.setdefault("first_k_dense_replace", 0)
    raw.setdefault("n_shared_experts", 0)
    skip_further(gguf, raw)


def layers_with(gguf: GgufMetadata, name: str, layers: Any) -> list[bool]:
    """Return whether the size under "<architecture>.<name>" is not 0, for each of `layers` layers.

    A single number is the size of every layer. Of a longer list, the first values count.
    """
    value = gguf.get(name, 0)
    count = layers if type(layers) is int and 0 <= layers < MAX_LAYERS else 0
    return [bool(value)] * count if np.ndim(value) == 0 else [bool(size) for size in value[:count]]


def has_tensor(gguf: GgufMetadata, ending: str) -> bool:
    """Return whether the name of a tensor in the GGUF file has this ending."""
    return any(name.endswith(ending) for name in gguf.tensors)


def quotient(gguf: GgufMetadata, name: str, divisor: str) -> int:
    """Return the quotient of two metadata values, which are positive integers.

    Raises:
        CheckpointError: a value is no positive integer, or the quotient is none.
    """
    whole, part = gguf.get(name), gguf.get(divisor)
    if type(whole) is not int or type(part) is not int or part <= 0 or whole <= 0 or whole % part:
        raise CheckpointError(
            f"{gguf.path}: {gguf.key(name)} is {shown(whole)}; allowed: a multiple of "
            f"{gguf.key(divisor)} ({shown(part)})"
        )
    return whole // part


def read_rope(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the config.json fields of a rotary embedding of whole heads to `raw`.

    Args:
        gguf: metadata of the file.
        raw: the config.json that is built from it.

    Raises:
        UnsupportedModel: only part of each head is rotated (see also `read_rope_scaling`).
    """
    heads = raw.get("num_attention_heads") or 1
    size = raw.get("head_dim") or (raw.get("hidden_size") or 0) // heads
    if gguf.get("rope.dimension_count", size) != size:
        raise UnsupportedModel(f"{gguf.path}: rotates only part of each head (of {size})")
    read_rope_scaling(gguf, raw)


def read_rope_scaling(gguf: GgufMetadata, raw: Raw) -> None:
    """Add `rope_scaling` and a default `rope_theta` to the config.json `raw` of a GGUF file.

    The scaling comes from the keys `rope.scaling`, or from the tensor of Llama 3's factors of each
    rotated pair. Without either, no `rope_scaling` is added.

    Raises:
        UnsupportedModel: another kind of scaling, both sources, or YaRN with an extrapolation
            factor.
        CheckpointError: see `GgufMetadata.read_factors`.
    """
    raw.setdefault("rope_theta", 10_000.0)
    kind, factor = scaling_of(gguf)
    if "rope_freqs.weight" in gguf.tensors:
        if kind != "none":
            raise UnsupportedModel(
                f"{gguf.path}: {gguf.key('rope.scaling.type')} is {shown(kind)}, beside the tensor "
                "rope_freqs.weight; allowed: one of the two scalings"
            )
        # Llama 3's scaling, precomputed: a divisor for each pair, independent of the position.
        factors = gguf.read_factors("rope_freqs.weight")
        raw["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": raw.get("max_position_embeddings"),
        }
    elif kind == "linear":
        raw["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        raw["rope_scaling"] = {"rope_type": "yarn", "factor": factor} | _yarn(gguf)
    elif kind != "none":
        raise UnsupportedModel(f"{gguf.path}: rope.scaling.type is {str(kind)[:80]!r}")


def scaling_of(gguf: GgufMetadata) -> tuple[Any, Any]:
    """Return the kind of a GGUF file's rope scaling and its factor, ("none", None) without scaling.

    As in llama.cpp, `rope.scale_linear` is the older name of the factor, and a factor without a
    type means linear scaling.
    """
    factor = gguf.get("rope.scaling.factor") or gguf.get("rope.scale_linear")
    kind = gguf.get("rope.scaling.type", "linear" if factor else "none")
    return ("none", None) if (kind, factor) == ("linear", 1) else (kind, factor)


YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def _yarn(gguf: GgufMetadata) -> Raw:
    if gguf.get("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{gguf.path}: rope.scaling.yarn_ext_factor must be 1")
    values = {name: gguf.get(key) for key, name in YARN.items()}
    return {name: value for name, value in values.items() if value is not None}


def read_biases(gguf: GgufMetadata, raw: Raw) -> None:
    """Set `attention_bias` and `mlp_bias` in the config.json `raw`.

    They are true if layer 0 of the GGUF file has tensors of these biases.
    """
    raw["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    raw["mlp_bias"] = "blk.0.ffn_up.bias" in gguf.tensors


def read_windows(gguf: GgufMetadata, raw: Raw) -> None:
    """Add `layer_types` to the config.json `raw` of a GGUF file whose layers share a rotary base.

    Raises:
        UnsupportedModel: layers with a window have a separate rotary base (see also
            `read_pattern`).
    """
    if gguf.get("rope.freq_base_swa", raw["rope_theta"]) != raw["rope_theta"]:
        raise UnsupportedModel(f"{gguf.path}: rope.freq_base_swa must be rope.freq_base")
    read_pattern(gguf, raw)


def read_pattern(gguf: GgufMetadata, raw: Raw) -> None:
    """Add `layer_types` to the config.json `raw` if the GGUF file has a pattern of sliding windows.

    The pattern is a period n, by which every n-th layer has no window, or a list with true for each
    layer that has a window.

    Raises:
        UnsupportedModel: a pattern of another form.
    """
    pattern = gguf.get(PATTERN)
    layers = raw.get("num_hidden_layers")
    if pattern is None or type(layers) is not int or not 0 < layers < 1 << 12:
        return
    if isinstance(pattern, np.ndarray) and len(pattern) == layers:
        windows = [bool(flag) for flag in pattern]
    elif type(pattern) is int and pattern > 0:
        windows = [(index + 1) % pattern != 0 for index in range(layers)]
    else:
        raise UnsupportedModel(
            f"{gguf.path}: {gguf.key(PATTERN)} is {shown(pattern)}; allowed: a period, or "
            f"true or false for each of {layers} layers"
        )
    raw["layer_types"] = [SLIDING if slides else FULL for slides in windows]
