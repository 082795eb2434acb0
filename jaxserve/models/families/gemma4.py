"""Gemma 4 (Google 2026): layers with a window have other heads than the layers without one.

Layers without a window have larger heads, and in most models fewer kv heads, whose projected keys
are the values too. They rotate a part of each head. Values are normalized without a scale, and a
learned number multiplies the residual stream after each layer. The 26B-A4B has experts beside the
MLP of each layer. Reference implementations: `Gemma4ForCausalLM` and `Gemma4UnifiedForCausalLM` in
Hugging Face Transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxserve.models.config.experts import Experts, expert_counts, expert_width
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import FULL, SLIDING, LayerTable, every
from jaxserve.models.config.model_config import MAX_HEAD_DIM, MAX_HEADS, ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, ConfigRules, Scales
from jaxserve.models.families.gemma import NORMS
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.weight_names import (
    FINAL_NORM,
    GATE,
    QK_NORMS,
    UP,
    attention_projections,
    by_heads,
    embedding_weights,
    every_layer,
    mlp_projections,
)
from jaxserve.models.weight_table import WeightName

GLOBAL_SIZE, GLOBAL_HEADS, BY_LAYER = (
    "global_head_dim",
    "num_global_key_value_heads",
    "per_layer_config",
)
PERIOD = 6  # every sixth layer has no window by default
ROPES: Mapping[str, Any] = MappingProxyType(
    {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
)


def _of_full_layers(fields: Fields) -> tuple[int, int]:
    """Read the size of a head, and the number of kv heads, of the layers without a window.

    Transformers writes them as differences of each layer (`per_layer_config`), published files as
    fields of their own.
    """
    heads = fields.integer("num_key_value_heads", 1, MAX_HEADS)
    size, own = fields.integer(GLOBAL_SIZE, 2, MAX_HEAD_DIM, default=512), heads
    shares = fields.flag("attention_k_eq_v", default=False)
    if fields.take(GLOBAL_HEADS) is not None and shares:
        own = fields.integer(GLOBAL_HEADS, 1, MAX_HEADS)
    listed = fields.take(BY_LAYER)
    if listed is not None:
        layers = list(listed.values()) if isinstance(listed, dict) else []
        known = {"head_dim", "num_key_value_heads"}
        if (
            not layers
            or any(not isinstance(one, dict) or one != layers[0] for one in layers)
            or not layers[0].keys() <= known
        ):
            fields.refuse(BY_LAYER, f"the same {' and '.join(sorted(known))} for some layers")
            return size, own
        inner = Fields(layers[0], fields.problems, f"{BY_LAYER}.")
        size = inner.integer("head_dim", 2, MAX_HEAD_DIM, default=size)
        own = inner.integer("num_key_value_heads", 1, MAX_HEADS, default=own)
    if fields.integer("num_attention_heads", 1, MAX_HEADS) % own:
        fields.refuse(GLOBAL_HEADS, "a divisor of num_attention_heads")
    return size, own


def _full_size(fields: Fields) -> int:
    return _of_full_layers(fields)[0]


def _layers(fields: Fields, layers: int) -> LayerTable:
    """Read the window of each layer. The last layer never has one, as in Transformers."""
    windows = list(every(PERIOD)(fields, layers).windows)
    windows[-1] = None
    full, heads = (
        [window is None for window in windows],
        fields.integer("num_key_value_heads", 1, MAX_HEADS),
    )
    size, (full_size, full_heads) = (
        fields.integer("head_dim", 2, MAX_HEAD_DIM),
        _of_full_layers(fields),
    )
    listed = fields.take(BY_LAYER)
    if isinstance(listed, dict) and listed.keys() != {
        str(layer) for layer, is_full in enumerate(full) if is_full
    }:
        fields.refuse(BY_LAYER, "the layers without a window")
    shares = fields.flag("attention_k_eq_v", default=False)
    return LayerTable(
        tuple(windows),
        (True,) * layers,
        kv_heads=tuple(full_heads if is_full else heads for is_full in full),
        head_dims=tuple(full_size if is_full else size for is_full in full),
        keys_as_values=tuple(shares and is_full for is_full in full),
    )


def _experts(fields: Fields, layers: int) -> Experts | None:
    if not fields.flag("enable_moe_block", default=False):
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            fields.take(name)
        return None
    count, chosen = expert_counts(fields, ("num_experts",))
    width = expert_width(fields, "moe_intermediate_size")
    return Experts(count, width, chosen, (True,) * layers, stacked=True, beside=True)


def _scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales(
        attention=1.0,
        logit_cap=fields.optional("final_logit_softcapping", 0.0, 1e6),
        embedding=hidden_size**0.5,
    )


def _attention(config: ModelConfig) -> list[WeightName]:
    projections = [*attention_projections(config), *QK_NORMS]
    if not config.keys_as_values:
        return projections
    return [tensor for tensor in projections if ".v_proj." not in tensor.name]


FACTOR = WeightName("layer_scalar", "One -> One", "layer_factor")
BESIDE = (
    WeightName("mlp.gate_proj.weight", "F D -> D F", "mlp.dense.gate_up", GATE),
    WeightName("mlp.up_proj.weight", "F D -> D F", "mlp.dense.gate_up", UP),
    WeightName("mlp.down_proj.weight", "D F -> F D", "mlp.dense.down"),
    WeightName("router.proj.weight", "E D -> D E", "mlp.router"),
    WeightName("router.scale", "D -> D", "mlp.router_norm.scale"),
    WeightName("router.per_expert_scale", "E -> E", "mlp.expert_factors"),
    WeightName("experts.gate_up_proj", "E (P M) D -> E D P M", "mlp.gate_up"),
    WeightName("experts.down_proj", "E D M -> E M D", "mlp.down"),
    WeightName("pre_feedforward_layernorm_2.weight", "D -> D", "mlp.routed_input_norm.scale"),
    WeightName("post_feedforward_layernorm_1.weight", "D -> D", "mlp.dense_norm.scale"),
    WeightName("post_feedforward_layernorm_2.weight", "D -> D", "mlp.routed_norm.scale"),
)


def _weights(config: ModelConfig) -> list[WeightName]:
    mlp = mlp_projections(config) if config.experts is None else BESIDE
    return [
        *embedding_weights(config),
        *every_layer([*NORMS, *mlp, FACTOR], config),
        *by_heads(config, _attention),
        FINAL_NORM,
    ]


_RULES = ConfigRules(
    "gemma4_text",
    renamed=MappingProxyType({"top_k_experts": "num_experts_per_tok"}),
    neutral=MappingProxyType(
        {
            "attention_bias": False,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_bidirectional_attention": (None, False, "vision"),
            "use_double_wide_mlp": False,
        }
    ),
    ignored=frozenset({"vocab_size_per_layer_input"}),
    defaults=MappingProxyType({"rope_parameters": ROPES}),
    explicit=HEADS,
    layers=_layers,
    rope=RopeRules(
        kinds=("default", "proportional"),
        by_layer_type=True,
        theta=1e6,
        local_theta=1e4,
        full_size=_full_size,
    ),
    scales=_scales,
    experts=_experts,
    tied=True,
    qkv_bias=False,
    output_bias=False,
)
_TRAITS = FamilyTraits(
    norms="around",
    qk_norm="head",
    norm_values=True,
    norm_rounds_last=True,
    layer_factor=True,
    activation="gelu_tanh",
    overflows_float16=True,
)
GEMMA4 = Family(
    architectures={
        "Gemma4ForCausalLM": Architecture(
            replace(_RULES, explicit=HEADS | {"hidden_size_per_layer_input"}), _weights, _TRAITS
        ),
        "Gemma4UnifiedForCausalLM": Architecture(
            replace(_RULES, model_type="gemma4_unified_text"), _weights, _TRAITS
        ),
    }
)
