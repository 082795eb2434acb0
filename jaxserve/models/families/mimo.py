"""MiMo-V2-Flash (Xiaomi 2025): experts, keys longer than values, windows in most layers.

Layers with a window have twice as many kv heads, a rotary embedding of their own, and sinks. Values
are multiplied by a factor. Reference implementation: `MiMoV2FlashForCausalLM` in Hugging Face
Transformers. The modules that predict further tokens are not used.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from jaxserve.errors import UnsupportedModel
from jaxserve.models.config.experts import Experts, scored_experts
from jaxserve.models.config.fields import MAX_POSITIONS, Fields, shown
from jaxserve.models.config.layers import FULL, MAX_LAYERS, SLIDING, LayerTable, layer_kinds
from jaxserve.models.config.model_config import MAX_HEADS, ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, ROUTING, ConfigRules, Scales
from jaxserve.models.families.deepseek import CORRECTION
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import PATTERN as WINDOWS
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, read_rope_scaling, read_scored
from jaxserve.models.gguf.rules import (
    COMPUTED_BY_SCORES,
    EXPERTS,
    SCORED,
    SCORED_FIELDS,
    SCORED_READ,
    WINDOW,
    GgufRules,
)
from jaxserve.models.weight_names import (
    PRE_NORMS,
    by_heads,
    expert_weights,
    model_weights,
)
from jaxserve.models.weight_table import WeightName

PATTERN, FREQUENCY = "hybrid_layer_pattern", "moe_layer_freq"
KV, WINDOWED_KV = "num_key_value_heads", "swa_num_key_value_heads"


def _flags(fields: Fields, name: str, layers: int) -> list[bool] | None:
    """Read a list with 0 or 1 for each layer, or None if the field is absent."""
    listed = fields.take(name)
    if listed is None:
        return None
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or any(x not in (0, 1) for x in listed)
    ):
        fields.refuse(name, f"0 or 1 for each of {layers} layers")
        return None
    return [bool(x) for x in listed]


def _layers(fields: Fields, layers: int) -> LayerTable:
    """Read the layers with a window, whose length includes the token itself in `sliding_window`.

    Published files have `sliding_window_size`, which does not include it.
    """
    slides = _flags(fields, PATTERN, layers)
    if slides is None:
        kinds = layer_kinds(fields, layers, (FULL, SLIDING), [])
        slides = [kind == SLIDING for kind in kinds]
        if not kinds:
            fields.refuse("layer_types", f"{FULL!r} or {SLIDING!r} for each of {layers} layers")
            slides = [False] * layers
    window = fields.integer("sliding_window", 1, MAX_POSITIONS)
    if fields.has("sliding_window_size"):
        window = fields.integer("sliding_window_size", 1, MAX_POSITIONS - 1) + 1
    heads = fields.integer(KV, 1, MAX_HEADS)
    of_windows = fields.integer(WINDOWED_KV, 1, MAX_HEADS, default=2 * heads)
    if fields.integer("num_attention_heads", 1, MAX_HEADS) % of_windows:
        fields.refuse(WINDOWED_KV, "a divisor of num_attention_heads")
    return LayerTable(
        tuple(window if slide else None for slide in slides),
        (True,) * layers,
        kv_heads=tuple(of_windows if slide else heads for slide in slides),
    )


def _experts(fields: Fields, layers: int) -> Experts:
    experts, sparse = scored_experts(fields, layers), _flags(fields, FREQUENCY, layers)
    return experts if sparse is None else replace(experts, layers=tuple(sparse))


def _scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales(value=fields.number("attention_value_scale", 0.0, 1e4, default=1.0))


def _attention(config: ModelConfig) -> list[WeightName]:
    group = config.num_attention_heads // config.num_key_value_heads
    q, k = np.s_[..., :group, :], np.s_[..., group, :]
    return [
        WeightName("self_attn.q_proj.weight", "(K G H) D -> D K G H", "attention.qkv", q),
        WeightName("self_attn.k_proj.weight", "(K H) D -> D K H", "attention.qkv", k),
        WeightName("self_attn.v_proj.weight", "(K U) D -> D K U", "attention.value"),
        WeightName("self_attn.o_proj.weight", "D (K G U) -> K G U D", "attention.out"),
    ]


def _sinks(config: ModelConfig) -> list[WeightName]:
    return [WeightName("self_attn.attention_sink_bias", "(K G) -> K G", "attention.sinks")]


def _weights(config: ModelConfig) -> list[WeightName]:
    sinks = zip(by_heads(config, _sinks), config.layers.windows, strict=True)
    return [
        *model_weights(config, PRE_NORMS, [*expert_weights(config), CORRECTION]),
        *by_heads(config, _attention),
        *[tensor for tensor, window in sinks if window is not None],
    ]


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of MiMo-V2-Flash to the config.json `raw` of a GGUF file.

    The length of a window includes the token itself, as in llama.cpp. Layers without a router have
    a dense MLP.

    Raises:
        UnsupportedModel: the file does not list the windows and kv heads of each layer, or kv heads
            differ among the layers with a window or among the others.
    """
    read_scored(gguf, raw)
    read_rope_scaling(gguf, raw)
    layers, size = raw.get("num_hidden_layers"), raw.get("head_dim")
    count = layers if type(layers) is int and 0 < layers < MAX_LAYERS else 0
    slides = [bool(flag) for flag in _listed(gguf, WINDOWS)[:count]]
    heads = _listed(gguf, "attention.head_count_kv")[:count]
    for name, windowed in ((KV, False), (WINDOWED_KV, True)):
        some = {n for n, slide in zip(heads, slides, strict=False) if slide == windowed}
        if len(some) > 1:
            key = gguf.key("attention.head_count_kv")
            raise UnsupportedModel(
                f"{gguf.path}: {key} is {shown(heads)}; allowed: two numbers, for layers with a "
                "window and without one"
            )
        raw[name] = some.pop() if some else max(heads, default=1)
    raw[PATTERN] = [int(slide) for slide in slides]
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in gguf.tensors for layer in range(count)]
    raw[FREQUENCY] = [int(sparse) for sparse in routed]
    raw["norm_topk_prob"] = True  # as in llama.cpp's code
    del raw["first_k_dense_replace"]
    raw["partial_rotary_factor"] = gguf.get("rope.dimension_count", size) / (size or 1)


def _listed(gguf: GgufMetadata, name: str) -> Sequence[int]:
    values = gguf.get(name)
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise UnsupportedModel(
            f"{gguf.path}: {gguf.key(name)} is {shown(values)}; allowed: a value for each layer"
        )
    return values.tolist()


MIMO = Family(
    architectures={
        "MiMoV2FlashForCausalLM": Architecture(
            ConfigRules(
                "mimo_v2_flash",
                renamed=MappingProxyType(
                    {
                        "layernorm_epsilon": "rms_norm_eps",
                        "swa_rope_theta": "rope_local_base_freq",
                    }
                ),
                neutral=MappingProxyType(
                    {
                        "add_full_attention_sink_bias": False,
                        "add_swa_attention_sink_bias": True,
                        "attention_bias": False,
                        "n_shared_experts": 0,
                        "scoring_func": "sigmoid",
                        "topk_method": "noaux_tc",
                        "use_qk_norm": False,
                    }
                ),
                # The second to fourth repeat other fields.
                ignored=ROUTING
                | {
                    "attention_chunk_size",
                    "swa_head_dim",
                    "swa_num_attention_heads",
                    "swa_v_head_dim",
                    "num_nextn_predict_layers",
                },
                explicit=HEADS,
                layers=_layers,
                rope=RopeRules(by_layer_type=True, local_theta=1e4, partial=0.334),
                scales=_scales,
                experts=_experts,
                value_dim="v_head_dim",
                qkv_bias=False,
                output_bias=False,
            ),
            _weights,
            FamilyTraits(router="sigmoid", sinks="windows"),
            tensors=((r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),),
        )
    },
    gguf={
        "mimo2": GgufRules(
            "MiMoV2FlashForCausalLM",
            _finish_gguf,
            tensors=MappingProxyType(
                {
                    **SCORED,
                    "blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.attention_sink_bias",
                }
            ),
            fields=MappingProxyType(
                {
                    **WINDOW,
                    **SCORED_FIELDS,
                    "attention.value_length": "v_head_dim",
                    "attention.value_scale": "attention_value_scale",
                    "rope.freq_base_swa": "rope_local_base_freq",
                }
            ),
            read=SCORED_READ | {WINDOWS},
            experts=EXPERTS,
            computed=COMPUTED_BY_SCORES,
            lists=frozenset({"attention.head_count_kv"}),
        )
    },
)
