"""Laguna (Poolside 2026): experts, windows, a gate for each head, query heads by layer.

The softplus of a projection of the layer's input multiplies the result of each query head. Layers
with a window have a rotary embedding of their own. Reference implementation: `LagunaForCausalLM` in
Hugging Face Transformers.
"""

from dataclasses import replace
from types import MappingProxyType

from jaxserve.models.config.experts import (
    MAX_SCALE,
    Experts,
    expert_counts,
    expert_width,
    listed_layers,
)
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import LayerTable, by_type
from jaxserve.models.config.model_config import MAX_HEADS, ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, ROUTING, ConfigRules
from jaxserve.models.families.deepseek import CORRECTION, SHARED
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.weight_names import (
    PRE_NORMS,
    QK_NORMS,
    attention_projections,
    by_heads,
    expert_weights,
    model_weights,
)
from jaxserve.models.weight_table import WeightName

HEADS_BY_LAYER = "num_attention_heads_per_layer"
CAP = "moe_router_logit_softcapping"


def _layers(fields: Fields, layers: int) -> LayerTable:
    """Read the window of each layer from `layer_types`, and its number of query heads."""
    table = by_type(fields, layers)
    listed = fields.take(HEADS_BY_LAYER)
    kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS)
    if listed is None:
        heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
        return replace(table, heads=(heads,) * layers)
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or any(type(heads) is not int or not 0 < heads <= MAX_HEADS for heads in listed)
        or any(heads % kv_heads for heads in listed)
    ):
        fields.refuse(HEADS_BY_LAYER, f"a multiple of {kv_heads} for each of {layers} layers")
        return table
    return replace(table, heads=tuple(listed))


def _experts(fields: Fields, layers: int) -> Experts:
    count, chosen = expert_counts(fields, ("num_experts",))
    cap = 0.0 if fields.take(CAP) == 0 else fields.number(CAP, 0.0, MAX_SCALE, default=0.0)
    fields.neutral({"mlp_only_layers": ([], [0])})  # repeats mlp_layer_types
    return Experts(
        count,
        expert_width(fields, "moe_intermediate_size"),
        chosen,
        listed_layers(fields, layers),
        scaling=fields.number("moe_routed_scaling_factor", 0.0, MAX_SCALE, default=1.0),
        sum_eps=0.0,
        shared=expert_width(fields, "shared_expert_intermediate_size"),
        score_cap=cap,
    )


def _attention(config: ModelConfig) -> list[WeightName]:
    gate = WeightName("self_attn.g_proj.weight", "(K G) D -> D K G", "attention.head_gate")
    return [*attention_projections(config), gate]


def _weights(config: ModelConfig) -> list[WeightName]:
    experts = [*expert_weights(config), *SHARED, CORRECTION]
    layer = [*PRE_NORMS, *QK_NORMS]
    return [*model_weights(config, layer, experts), *by_heads(config, _attention)]


LAGUNA = Family(
    architectures={
        "LagunaForCausalLM": Architecture(
            ConfigRules(
                "laguna",
                neutral=MappingProxyType(
                    {
                        "decoder_sparse_step": 1,
                        "gating": (True, "per-head"),
                        "moe_apply_router_weight_on_input": False,
                        "norm_topk_prob": True,
                        "qkv_bias": False,
                    }
                ),
                ignored=ROUTING,
                explicit=HEADS | {"mlp_layer_types", "layer_types", "rope_parameters"},
                layers=_layers,
                rope=RopeRules(by_layer_type=True, partial=1.0),
                experts=_experts,
            ),
            _weights,
            FamilyTraits(
                qk_norm="head", router="sigmoid", gated="heads", gate_activation="softplus"
            ),
            tensors=(
                (r"\.mlp\.experts\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
                (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
            ),
        )
    }
)
