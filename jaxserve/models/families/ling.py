"""Ling 3 (inclusionAI 2026): Kimi's delta rule, and latent attention with a gate for each head.

Decays have a bound, and their projections full rank. Reference implementation:
`BailingHybridForCausalLM` in Hugging Face Transformers. The layers that predict further tokens are
not used.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.models.config.experts import Experts
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.latent import Latent
from jaxserve.models.config.layers import FULL, LINEAR, MAX_LAYERS, LayerTable, layer_kinds
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.recurrent import MAX_HEADS, MAX_SIZE, MAX_TAPS, ChannelDeltaSizes
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import ROUTING, ConfigRules
from jaxserve.models.families.deepseek import attention, read_latent
from jaxserve.models.families.glm4_moe_lite import listed_experts
from jaxserve.models.families.kimi_linear import (
    RENAMED,
    check_head,
    delta_layers,
    delta_weights,
    hybrid_weights,
)
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.weight_names import expert_weights
from jaxserve.models.weight_table import WeightName

LIMITS = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"


def _layers(fields: Fields, layers: int) -> LayerTable:
    """Read the kinds of layers: each group of layers ends with attention.

    `layer_types` may replace `layer_group_size`. Both together must agree.
    """
    group = fields.integer("layer_group_size", 1, MAX_LAYERS, default=6)
    default = [LINEAR if (index + 1) % group else FULL for index in range(layers)]
    kinds = layer_kinds(fields, layers, (FULL, LINEAR), default)
    if fields.has("layer_group_size") and kinds != default:
        fields.refuse("layer_group_size", "a size that gives layer_types, or nothing")
    return delta_layers(kinds, rotates=True)


def _sizes(fields: Fields) -> ChannelDeltaSizes:
    """Read the sizes of the delta rule.

    `head_dim` is the size of its heads, or in files of Transformers that of the rotated part of
    keys beside `linear_head_dim`.
    """
    if fields.has("linear_head_dim"):
        size = fields.integer("linear_head_dim", 1, MAX_SIZE)
        check_head(fields, fields.integer("qk_rope_head_dim", 2, MAX_SIZE), size)
    else:
        size = fields.integer("head_dim", 1, MAX_SIZE, default=128)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    heads = fields.integer("linear_num_heads", 1, MAX_HEADS, default=heads)
    width = fields.integer("short_conv_kernel_size", 2, MAX_TAPS, default=4)
    if fields.integer("linear_conv_kernel_dim", 2, MAX_TAPS, default=width) != width:
        fields.refuse("linear_conv_kernel_dim", f"{width} (short_conv_kernel_size), or nothing")
    bound = _bound(fields) if fields.flag("kda_safe_gate", default=True) else 0.0
    fields.take("kda_lower_bound")
    return ChannelDeltaSizes(width, heads, heads, size, size, bound=bound)


def _bound(fields: Fields) -> float:
    least: Any = fields.take("kda_lower_bound")
    least = -5.0 if least is None else least
    if type(least) not in (int, float) or not -1e3 <= least < 0:
        fields.refuse("kda_lower_bound", "a number from -1000 to below 0")
        return 5.0
    return -float(least)


def _latent(fields: Fields) -> Latent:
    interleaved = fields.flag("rope_interleave", default=True)
    latent = read_latent(fields, interleaved, reads_head=False)
    if fields.has("rotary_dim") and fields.take("rotary_dim") != latent.rotary:
        fields.refuse("rotary_dim", f"{latent.rotary}, or nothing")
    fields.take("rotary_dim")
    return latent


def _experts(fields: Fields, layers: int) -> Experts:
    experts = listed_experts(fields, layers, first=2)
    name = "moe_shared_expert_intermediate_size"
    if fields.has(name) and fields.take(name) != experts.shared:
        fields.refuse(name, f"{experts.shared} (moe_intermediate_size by n_shared_experts)")
    fields.take(name)
    for name in LIMITS:
        limits = fields.take(name)
        if limits is not None and (not isinstance(limits, list) or any(limits)):
            fields.refuse(name, "zeros, or nothing")
    return experts


def _weights(config: ModelConfig) -> list[WeightName]:
    delta = [
        *delta_weights(config),
        WeightName("self_attn.A_log", "Heads -> Heads", "delta.constants", np.s_[0, :, 0]),
        WeightName("self_attn.f_proj.weight", "Query D -> D Query", "delta.decay"),
        WeightName("self_attn.g_proj.weight", "Vals D -> D Vals", "delta.gate"),
    ]
    gate = WeightName("self_attn.g_proj.weight", "(K G) D -> D K G", "attention.head_gate")
    return hybrid_weights(config, delta, [*attention(config), gate], expert_weights(config))


NEUTRAL = MappingProxyType(
    {
        "embedding_dropout": 0.0,
        "gated_attention_proj_granularity_type": "head_wise",
        "group_norm_size": 1,
        "linear_attention": "kda",
        "linear_silu": True,
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "moe_router_enable_expert_bias": True,
        "no_kda_lora": True,
        "output_dropout": 0.0,
        "scale_router_input": False,
        "score_function": "sigmoid",
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "up_proj_norm": False,
        "use_bias": False,
        "use_kda_lora": False,
        "use_mla_nope": False,
        "use_nGPT": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "value_norm": False,
    }
)
LING = Family(
    architectures={
        "BailingHybridForCausalLM": Architecture(
            ConfigRules(
                "bailing_hybrid",
                renamed=RENAMED,
                neutral=NEUTRAL,
                ignored=ROUTING
                | {"mtp_loss_scaling_factor", "num_nextn_predict_layers", "pretraining_tp"}
                | {"router_dtype"},
                layers=_layers,
                rope=RopeRules(theta=6e6),
                experts=_experts,
                latent=_latent,
                recurrent=_sizes,
                extra_layers="num_nextn_predict_layers",
            ),
            _weights,
            FamilyTraits(router="sigmoid", gated="heads"),
            aliases=("BailingMoeV3ForCausalLM",),
            tensors=(
                (r"^model\.word_embeddings\.", "model.embed_tokens."),
                (r"\.attention\.", ".self_attn."),
                (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
                (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
            ),
        ),
    },
)
