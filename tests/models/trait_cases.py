"""Tiny random checkpoints of families that differ from others by switches and tables of weights.

`cases.py` describes the two tables, and adds them to its own.
"""

from __future__ import annotations

from typing import Any

import transformers

from tests.models.rope_cases import FULL, LINEAR, LLAMA3_SCALING, LOCAL_ROPE, SLIDING, YARN

SECTIONS = {
    "rope_type": "default",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 0],
}
SCORED = {
    "num_key_value_heads": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}

# Latent attention beside Kimi's delta rule.
DELTA = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}

TRAIT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": (
        "Glm4Moe",
        {**SCORED, "head_dim": 16, "first_k_dense_replace": 1, "use_qk_norm": True},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "laguna": (
        "Laguna",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, SLIDING],
            "num_attention_heads_per_layer": [4, 6, 6],
            "sliding_window": 9,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "moe_routed_scaling_factor": 1.5,
            "rope_parameters": {
                FULL: YARN | {"partial_rotary_factor": 0.5},
                SLIDING: LOCAL_ROPE,
            },
        },
    ),
    "muse_glimmer": (
        "MuseGlimmer",
        {
            "head_dim": 12,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "qk_scale_factor": 1.3,
            "output_multiplier": 0.8,
            "final_logit_softcapping": 5.0,
            "post_norm_eps": 1e-2,
        },
    ),
    "seed_oss": ("SeedOss", {"head_dim": 12, "attention_bias": True}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 12, "use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "exaone4": ("Exaone4", {"head_dim": 12, "sliding_window": 9, "layer_types": [SLIDING, FULL]}),
    "exaone_moe": (
        "ExaoneMoe",
        {
            "head_dim": 12,
            "sliding_window": 9,
            "layer_types": [SLIDING, FULL],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_shared_experts": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 100.0,
                "alpha": 50.0,
                "factor": 1.0,
                "mscale": 1.0,
            },
        },
    ),
    "hy_v3": (
        "HYV3",
        {
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.5,
        },
    ),
    "solar_open": ("SolarOpen", {**SCORED, "head_dim": 12}),
    "dots1": (
        "Dots1",
        {
            **SCORED,
            "head_dim": 12,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    "afmoe": (
        "Afmoe",
        {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING],
            "sliding_window": 9,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "route_scale": 1.5,
            "mup_enabled": True,
        },
    ),
    "mellum": (
        "Mellum",
        {
            "head_dim": 12,
            "layer_types": [SLIDING, FULL],
            "sliding_window": 9,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "rope_parameters": {FULL: YARN, SLIDING: LOCAL_ROPE},
        },
    ),
    "sarvam_moe": ("SarvamMoE", {**SCORED, "head_dim": 12, "first_k_dense_replace": 1}),
    "glm4v": ("Glm4v", {"attention_bias": True, "rope_parameters": SECTIONS}),
    "glm4v_moe": (
        "Glm4vMoe",
        {**SCORED, "attention_bias": True, "first_k_dense_replace": 1, "rope_parameters": SECTIONS},
    ),
    "arcee": ("Arcee", {}),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3_SCALING}),
    "nanochat": ("NanoChat", {"final_logit_softcapping": 5.0}),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            "head_dim": 18,
            "v_head_dim": 12,
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, SLIDING],
            "sliding_window": 9,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.334},
                SLIDING: LOCAL_ROPE | {"partial_rotary_factor": 0.667},
            },
        },
    ),
    "flex_olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3}),
    "kimi_linear": (
        "KimiLinear",
        DELTA
        | {
            "layer_types": ["linear_attention", FULL, "linear_attention"],
            "linear_head_dim": 12,
            "linear_num_heads": 3,
        },
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        DELTA
        | {
            "layer_group_size": 2,
            "first_k_dense_replace": 1,
            "head_dim": 12,
            "n_group": 3,
            "topk_group": 2,
            "rope_theta": 500.0,
        },
    ),
}

TRAIT_CASES: dict[str, dict[str, Any]] = {
    "glm4_moe_groups": {"n_group": 3, "topk_group": 2},
    "glm4_moe_plain_bias_yarn": {
        "use_qk_norm": False,
        "attention_bias": True,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.25},
    },
    "glm4_moe_tied_whole_heads": {
        "tie_word_embeddings": True,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "rope_parameters": LINEAR | {"partial_rotary_factor": 1.0},
        "num_key_value_heads": 4,
    },
    "minimax_m2_half_rotated": {},
    "minimax_m2_tied_whole_heads": {
        "tie_word_embeddings": True,
        "rotary_dim": 16,
        "num_experts_per_tok": 1,
        "num_key_value_heads": 1,
    },
    "minimax_m2_many_yarn": {
        "num_local_experts": 9,
        "num_experts_per_tok": 5,
        "rotary_dim": None,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
        "num_key_value_heads": 4,
    },
    "laguna_heads_by_layer": {},
    "laguna_tied_cap": {
        "tie_word_embeddings": True,
        "moe_router_logit_softcapping": 0.7,
        "num_attention_heads_per_layer": None,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "num_key_value_heads": 1,
    },
    "laguna_bias_top1": {
        "attention_bias": True,
        "num_experts_per_tok": 1,
        "num_attention_heads_per_layer": [8, 4, 12],
        "num_key_value_heads": 4,
        "rope_parameters": {FULL: LINEAR, SLIDING: LOCAL_ROPE | {"partial_rotary_factor": 0.25}},
    },
    "muse_glimmer_every_fourth": {},
    "muse_glimmer_tied_listed": {
        "tie_word_embeddings": True,
        "num_hidden_layers": 2,
        "layer_types": [FULL, SLIDING],
        "layer_rope_theta": [10000.0, 0],
        "num_key_value_heads": 1,
    },
    "muse_glimmer_yarn": {
        "num_hidden_layers": 2,
        "rope_parameters": YARN,
        "head_dim": 14,
        "num_key_value_heads": 4,
    },
    "seed_oss_bias": {},
    "seed_oss_all_biases_tied": {
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "seed_oss_output_bias_alone_yarn": {
        "attention_bias": False,
        "attention_out_bias": True,
        "rope_parameters": YARN,
        "num_key_value_heads": 4,
    },
    "ernie4_5_biases": {},
    "ernie4_5_tied_linear": {
        "use_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": LINEAR,
        "num_key_value_heads": 1,
    },
    "ernie4_5_yarn": {"rope_parameters": YARN, "head_dim": 14, "num_key_value_heads": 4},
    "ernie4_5_moe_shared": {},
    "ernie4_5_moe_tied_interval": {
        "tie_word_embeddings": True,
        "num_hidden_layers": 4,
        "moe_layer_interval": 2,
        "moe_layer_end_index": 2,
        "moe_num_shared_experts": 0,
        "num_key_value_heads": 1,
    },
    "ernie4_5_moe_top1_linear": {
        "moe_k": 1,
        "moe_layer_start_index": 0,
        "rope_parameters": LINEAR,
        "num_key_value_heads": 4,
    },
    "exaone4_alternate": {},
    "exaone4_tied_without_windows": {
        "tie_word_embeddings": True,
        "sliding_window": None,
        "layer_types": [FULL, FULL],
        "rope_parameters": LLAMA3_SCALING,
        "num_key_value_heads": 1,
    },
    "exaone4_pattern": {
        "num_hidden_layers": 4,
        "layer_types": None,
        "sliding_window_pattern": 3,
        "num_key_value_heads": 4,
    },
    "exaone_moe_groups": {"n_group": 3, "topk_group": 2},
    "exaone_moe_tied_as_they_are": {
        "tie_word_embeddings": True,
        "norm_topk_prob": False,
        "mlp_layer_types": ["sparse", "sparse"],
        "num_key_value_heads": 1,
    },
    "exaone_moe_top1_yarn": {
        "num_experts_per_tok": 1,
        "num_shared_experts": 1,
        "layer_types": [FULL, SLIDING],
        "rope_parameters": YARN,
        "num_key_value_heads": 4,
    },
    "hunyuan_v1_dense_stretched": {},
    "hunyuan_v1_dense_tied_bias": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_parameters": LINEAR,
        "num_key_value_heads": 1,
    },
    "hunyuan_v1_dense_narrow_yarn": {
        "head_dim": 14,
        "rope_parameters": YARN,
        "num_key_value_heads": 4,
    },
    "hy_v3_first_dense": {},
    "hy_v3_tied_top1": {
        "tie_word_embeddings": True,
        "num_experts_per_tok": 1,
        "enable_moe_fp32_combine": False,
        "mlp_layer_types": ["sparse", "dense"],
        "num_key_value_heads": 1,
    },
    "hy_v3_bias_linear": {
        "attention_bias": True,
        "num_shared_experts": 1,
        "mlp_layer_types": ["sparse", "sparse"],
        "rope_parameters": LINEAR,
        "num_key_value_heads": 4,
    },
    "solar_open_groups": {"n_group": 3, "topk_group": 2},
    "solar_open_tied_bias_top1": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "num_experts_per_tok": 1,
        "num_key_value_heads": 1,
    },
    "solar_open_as_they_are_yarn": {
        "norm_topk_prob": False,
        "n_shared_experts": 1,
        "rope_parameters": YARN,
        "num_key_value_heads": 4,
    },
    "dots1_groups": {"n_group": 3, "topk_group": 2},
    "dots1_tied_bias_as_they_are": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "sliding_window": None,
        "num_key_value_heads": 1,
    },
    "dots1_top1_linear": {
        "num_experts_per_tok": 1,
        "layer_types": [SLIDING, FULL],
        "rope_parameters": LINEAR,
        "num_key_value_heads": 4,
    },
    "olmoe_as_they_are": {},
    "olmoe_tied_bias": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
    },
    "olmoe_top1_yarn": {
        "num_experts_per_tok": 1,
        "rope_parameters": YARN,
        "num_key_value_heads": 4,
    },
    "qwen2_moe_as_they_are": {},
    "qwen2_moe_one_dense_tied": {
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "qwen2_moe_window_without_biases": {
        "num_experts_per_tok": 1,
        "qkv_bias": False,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": [SLIDING, FULL],
        "decoder_sparse_step": 2,
    },
    "granitemoe_factors": {},
    "granitemoe_tied_bias": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "num_key_value_heads": 1,
    },
    "granitemoe_top1_yarn": {
        "num_experts_per_tok": 1,
        "rope_parameters": YARN,
        "num_key_value_heads": 4,
    },
    "afmoe_scaled": {},
    "afmoe_tied_period": {
        "tie_word_embeddings": True,
        "mup_enabled": False,
        "num_dense_layers": 0,
        "layer_types": None,
        "global_attn_every_n_layers": 3,
        "num_key_value_heads": 1,
    },
    "afmoe_top1_linear": {
        "num_experts_per_tok": 1,
        "num_shared_experts": 1,
        "num_hidden_layers": 2,
        "layer_types": [FULL, SLIDING],
        "rope_parameters": LINEAR,
        "num_key_value_heads": 4,
    },
    "mellum_two_ropes": {},
    "mellum_tied_one_dense": {
        "tie_word_embeddings": True,
        "mlp_layer_types": ["dense", "sparse"],
        "norm_topk_prob": False,
        "num_key_value_heads": 1,
    },
    "mellum_bias_top1": {
        "attention_bias": True,
        "num_experts_per_tok": 1,
        "layer_types": [FULL, SLIDING],
        "rope_parameters": {FULL: LINEAR, SLIDING: LOCAL_ROPE},
        "num_key_value_heads": 4,
    },
    "sarvam_moe_groups": {"n_group": 3, "topk_group": 2},
    "sarvam_moe_tied_top1": {
        "tie_word_embeddings": True,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 1,
    },
    "sarvam_moe_as_they_are_yarn": {
        "norm_topk_prob": False,
        "n_shared_experts": 1,
        "rope_parameters": YARN,
        "num_key_value_heads": 4,
    },
    "glm4v_half_rotated": {},
    "glm4v_tied_quarter": {
        "tie_word_embeddings": True,
        "rope_parameters": SECTIONS | {"partial_rotary_factor": 0.25, "mrope_section": [1]},
        "num_key_value_heads": 1,
    },
    "glm4v_narrow_whole_heads": {
        "hidden_size": 48,
        "rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0, "mrope_section": [3, 2, 1]},
        "num_key_value_heads": 4,
    },
    "glm4v_moe_groups": {"n_group": 3, "topk_group": 2},
    "glm4v_moe_tied_top1": {
        "tie_word_embeddings": True,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 0,
        "attention_bias": False,
        "num_key_value_heads": 1,
    },
    "glm4v_moe_as_they_are": {
        "norm_topk_prob": False,
        "n_shared_experts": 1,
        "hidden_size": 48,
        "rope_parameters": SECTIONS | {"mrope_section": [2, 1, 0]},
        "num_key_value_heads": 4,
    },
    "arcee_squared": {},
    "arcee_tied_biases": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 12,
        "num_key_value_heads": 1,
    },
    "arcee_yarn": {"rope_parameters": YARN, "num_key_value_heads": 4},
    "apertus_llama3": {},
    "apertus_tied_bias": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_parameters": LINEAR,
        "num_key_value_heads": 1,
    },
    "apertus_yarn": {"rope_parameters": YARN, "num_key_value_heads": 4},
    "nanochat_cap": {},
    "nanochat_tied_bias": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "final_logit_softcapping": None,
        "num_key_value_heads": 1,
    },
    "nanochat_yarn": {"rope_parameters": YARN, "num_key_value_heads": 4},
    "mimo_v2_flash_windows": {},
    "mimo_v2_flash_tied_groups": {
        "tie_word_embeddings": True,
        "n_group": 3,
        "topk_group": 2,
        "attention_value_scale": None,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "num_key_value_heads": 1,
    },
    "mimo_v2_flash_every_window_top1": {
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, SLIDING],
    },
    "flex_olmo_as_they_are": {},
    "flex_olmo_tied_bias": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
    },
    "flex_olmo_top1_yarn": {
        "num_experts_per_tok": 1,
        "rope_parameters": YARN,
        "num_key_value_heads": 4,
    },
    "kimi_linear_low_rank": {},
    "kimi_linear_latent_queries": {
        "layer_types": [FULL, "linear_attention", "linear_attention"],
        "q_lora_rank": 24,
        "linear_conv_kernel_dim": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "kimi_linear_bias_groups": {
        "attention_bias": True,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
    "bailing_hybrid_bounded": {},
    "bailing_hybrid_softplus_latent_queries": {
        "kda_safe_gate": False,
        "q_lora_rank": 24,
        "short_conv_kernel_size": 3,
    },
    "bailing_hybrid_bias_yarn": {
        "attention_bias": True,
        "kda_lower_bound": -2.0,
        "layer_group_size": 3,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    },
}

# Transformers' classes of models by those of configurations, where the names differ.
COMPUTED_BY = {"SarvamMoE": "Glm4Moe", "SarvamMLA": "DeepseekV3"}
# Transformers' classes of wrappers whose text has no class with logits of its own.
WRAPPERS = ("MuseGlimmer", "Glm4v", "Glm4vMoe")


def wrapped(name: str, fields: dict[str, Any]) -> Any:
    """Return the configuration of a wrapper around a text model, or None for a text model."""
    if name not in WRAPPERS:
        return None
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "depth": 1, "intermediate_size": 16}
    config = getattr(transformers, f"{name}Config")
    tied = fields["tie_word_embeddings"]
    return config(
        text_config=fields, vision_config=tower | {"num_heads": 2}, tie_word_embeddings=tied
    )
