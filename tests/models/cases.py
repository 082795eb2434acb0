"""The tiny random checkpoints: every family's cases exercise its switches."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import transformers

from tests.models.rope_cases import (
    CONV,
    DYNAMIC,
    FULL,
    LINEAR,
    LLAMA3_SCALING,
    LOCAL_ROPE,
    LONGROPE,
    SLIDING,
    YARN,
)
from tests.models.trait_cases import COMPUTED_BY, TRAIT_CASES, TRAIT_FAMILIES, wrapped

EXPERTS = {
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
LITE = {key: value for key, value in EXPERTS.items() if key != "first_k_dense_replace"}
GROWING = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
COHERE = {"layer_norm_eps": 1e-3, "logit_scale": 0.8, "tie_word_embeddings": True}
PROPORTIONAL = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
    },
    "sliding_attention": LOCAL_ROPE,
}

# Three quarters of the pairs of a head, with halved angles.
LINEAR_PARTS = {
    "rope_type": "proportional",
    "rope_theta": 300.0,
    "partial_rotary_factor": 0.75,
    "factor": 2.0,
}
GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, FULL],
    "sliding_window": 9,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "rope_parameters": PROPORTIONAL,
    "tie_word_embeddings": True,
}
# Layers that read the pages of others, and inputs of each layer, as in E2B.
SHARED = {
    "enable_moe_block": False,
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
}

DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", FULL],
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.25,
    },
}
SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
# Transformers' names of models whose configurations have "Text" in their names.
TEXTS = ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")
# Sizes of attention, which Mamba 2 lacks.
ATTENTION = frozenset({"num_attention_heads", "num_key_value_heads", "max_position_embeddings"})
BAMBA = {"mamba_n_heads": 4, "mamba_d_state": 12, "mamba_n_groups": 2}
# Read by every family. A case changes some of it.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

# By prefix of a case's name: Transformers' names, and fields of every case of the family.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral4": ("Mistral4", {**EXPERTS, "rope_parameters": GROWING}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 12,
            "rope_parameters": YARN
            | {
                "llama_4_scaling_beta": 0.3,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "max_position_embeddings": 256,
            },
        },
    ),
    "ministral": ("Ministral", {"sliding_window": 9, "head_dim": 12}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "nemotron_h": (
        "NemotronH",
        {
            "layer_norm_epsilon": 1e-3,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "moe", FULL, "mlp"],
            "head_dim": 12,
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 20,
            "routed_scaling_factor": 1.5,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA, **SHARED_EXPERT}),
    "qwen3_5": ("Qwen3_5", {**DELTA}),
    "qwen3_next": ("Qwen3Next", {**DELTA, **SHARED_EXPERT}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {"original_max_position_embeddings": 256}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 9, "layer_types": [SLIDING, FULL]}),
    "olmo_hybrid": (
        "OlmoHybrid",
        {
            "layer_types": ["linear_attention", FULL],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            "layer_norm_epsilon": 1e-3,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 12,
            "n_groups": 2,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            "head_dim": 12,
            "mamba_d_ssm": 48,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.6,
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.6],
            "mlp_multipliers": [0.5, 1.7],
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
            **BAMBA,
        },
    ),
    "bamba": (
        "Bamba",
        {"num_hidden_layers": 3, "attn_layer_indices": [1], "hidden_size": 48, **BAMBA},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", FULL, "linear_attention"],
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "shared_intermediate_size": 20,
            **BAMBA,
        },
    ),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "cohere2": (
        "Cohere2",
        {
            **COHERE,
            "num_hidden_layers": 3,
            "sliding_window": 9,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
    "cohere": ("Cohere", {**COHERE, "use_qk_norm": False}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "attention_bias": True,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "swiglu_limit": 0.7,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**EXPERTS}),
    "deepseek_v3": ("DeepseekV3", {**EXPERTS, "n_group": 3, "topk_group": 2}),
    "sarvam_mla": ("SarvamMLA", {**EXPERTS, "q_lora_rank": None}),
    "glm4_moe_lite": ("Glm4MoeLite", {**LITE, "n_group": 3, "topk_group": 2}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 500.0},
                SLIDING: LOCAL_ROPE,
            },
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            **GEMMA4,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4_unified": ("Gemma4Unified", {**GEMMA4, "num_global_key_value_heads": 1}),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "norm_eps": 1e-3,
            "num_hidden_layers": 3,
            "layer_types": [CONV, FULL, CONV],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm3": (
        "Lfm3",
        {
            "norm_eps": 1e-3,
            "num_hidden_layers": 4,
            "layer_types": [CONV, SLIDING, CONV, FULL],
            "head_dim": 12,
            "sliding_window": 9,
            "conv_L_cache": 7,
            "rope_parameters": PROPORTIONAL,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "norm_eps": 1e-3,
            "num_hidden_layers": 3,
            "layer_types": [CONV, FULL, CONV],
            "block_multiple_of": 16,
        },
    ),
    # Read as "gelu_pytorch_tanh", which its first files meant.
    "gemma": ("Gemma", {"head_dim": 12, "hidden_act": "gelu"}),
    **TRAIT_FAMILIES,
}

# Every case exercises other settings, and has H != D / N or K < N somewhere.
# Prompts are longer than every window, and pass every original context.
CASES: dict[str, dict[str, Any]] = {
    "llama_gqa_untied": {},
    "llama_tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama_biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "llama3_rope": {"rope_parameters": LLAMA3_SCALING},
    "llama_head_dim": {"head_dim": 12},
    "llama_linear": {"rope_parameters": LINEAR},
    "llama_dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 64},
    "llama_yarn": {"rope_parameters": YARN},
    "llama_yarn_mscale": {
        "rope_parameters": YARN
        | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_slow": 0.02}
    },
    "llama_longrope": {
        "rope_parameters": LONGROPE | {"factor": 6.0},
        "head_dim": 6,
    },
    "mistral_window": {},
    "mistral_no_window_tied": {"sliding_window": None, "tie_word_embeddings": True},
    "mistral_odd_head_yarn": {"head_dim": 14, "rope_parameters": YARN, "num_key_value_heads": 1},
    "ministral_alternate": {"layer_types": [FULL, SLIDING]},
    "ministral_every_layer": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "ministral_linear": {"rope_parameters": LINEAR, "head_dim": 14, "num_key_value_heads": 1},
    "ministral3_growth": {},
    "ministral3_window_tied": {"sliding_window": 9, "tie_word_embeddings": True},
    "ministral3_odd_head": {"head_dim": 14, "num_key_value_heads": 1, "intermediate_size": 40},
    "mixtral_top2": {},
    "mixtral_top1_window_tied": {
        "num_experts_per_tok": 1,
        "sliding_window": 9,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    },
    "mixtral_many_yarn": {
        "num_local_experts": 9,
        "num_experts_per_tok": 5,
        "head_dim": 12,
        "rope_parameters": YARN,
        "num_key_value_heads": 1,
    },
    "qwen2_untied": {},
    "qwen2_tied_window": {
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "num_key_value_heads": 1,
    },
    "qwen2_yarn": {"rope_parameters": YARN, "head_dim": 12},
    "qwen3": {},
    "qwen3_tied_bias": {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    "qwen3_window": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": [SLIDING, FULL],
        "num_key_value_heads": 1,
    },
    # Three groups of layers, two of them with the window.
    "qwen3_window_groups": {
        "num_hidden_layers": 6,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": [SLIDING, FULL, SLIDING] * 2,
    },
    "qwen3_moe_one_dense": {"mlp_only_layers": [1]},
    "qwen3_moe_weights_as_they_are": {
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "qwen3_moe_window_bias": {
        "num_experts_per_tok": 1,
        "use_sliding_window": True,
        "sliding_window": 7,
        "attention_bias": True,
        "decoder_sparse_step": 2,
    },
    "phi3_window": {"sliding_window": 9},
    "phi3_longrope": {
        "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75},
        "original_max_position_embeddings": 32,
        "tie_word_embeddings": True,
    },
    "phi3_longrope_short": {
        "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75},
    },
    "phi3_odd_head": {
        "hidden_size": 52,
        "partial_rotary_factor": 0.6,
        "num_key_value_heads": 4,
    },
    "smollm3_window": {"use_sliding_window": True, "sliding_window": 6, "head_dim": 12},
    "smollm3_untied_bias": {"attention_bias": True, "mlp_bias": True},
    "smollm3_tied_listed": {"tie_word_embeddings": True, "no_rope_layers": [0, 1, 1]},
    "olmo2_gqa": {},
    "olmo2_bias_tied": {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    },
    "olmo2_linear_head_dim": {"rope_parameters": LINEAR, "head_dim": 12, "num_key_value_heads": 1},
    "olmo3_alternate": {},
    "olmo3_yarn": {
        "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 500.0}},
        "head_dim": 12,
        "num_key_value_heads": 1,
    },
    "olmo3_bias_tied": {
        "num_hidden_layers": 4,
        "layer_types": None,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "granite_untied": {},
    "granite_tied_biases": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
    },
    "granite_llama3_head_dim": {"rope_parameters": LLAMA3_SCALING, "head_dim": 12},
    "cohere_tied": {},
    "cohere_qk_norm_untied": {"use_qk_norm": True, "tie_word_embeddings": False},
    "cohere_qk_norm_bias_head_dim": {
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 12,
        "num_key_value_heads": 1,
        "rope_parameters": LLAMA3_SCALING,
    },
    "cohere_yarn": {"rope_parameters": YARN, "num_key_value_heads": 4, "logit_scale": 0.0625},
    "cohere_longrope": {"rope_parameters": LONGROPE | {"factor": 6.0}, "head_dim": 6},
    "cohere_dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 64},
    "cohere2_tied": {},
    "cohere2_pattern_untied": {
        "layer_types": None,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": False,
        "rope_parameters": LINEAR,
        "num_key_value_heads": 1,
    },
    "cohere2_every_fourth_bias": {
        "num_hidden_layers": 4,
        "layer_types": None,
        "attention_bias": True,
        "num_key_value_heads": 4,
    },
    "cohere2_head_dim_yarn": {
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL],
        "rope_parameters": YARN,
        "head_dim": 14,
        "logit_scale": 1.25,
    },
    "cohere2_no_rotation": {"num_hidden_layers": 1, "layer_types": [FULL]},
    "gpt_oss_alternate": {},
    "gpt_oss_truncated_tied": {
        "rope_parameters": YARN | {"truncate": True},
        "attention_bias": False,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.2,
    },
    "gpt_oss_top1_types": {
        "num_experts_per_tok": 1,
        "layer_types": [FULL, SLIDING],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "swiglu_limit": 7.0,
    },
    "gpt_oss_mxfp4": {"intermediate_size": 64},
    "deepseek_v2_groups": {
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 3,
    },
    "deepseek_v2_one_projection_yarn": {
        "q_lora_rank": None,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
        "tie_word_embeddings": True,
    },
    "deepseek_v2_bias_wide_values": {
        "attention_bias": True,
        "first_k_dense_replace": 0,
        "v_head_dim": 24,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
    },
    "deepseek_v3_groups": {},
    "deepseek_v3_halves_as_they_are": {
        "rope_interleave": False,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3_bias_yarn_tied": {
        "attention_bias": True,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        "tie_word_embeddings": True,
        "num_experts_per_tok": 4,
        "v_head_dim": 20,
    },
    "sarvam_mla_one_projection": {},
    "sarvam_mla_groups_yarn_tied": {
        "n_group": 3,
        "topk_group": 2,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        "tie_word_embeddings": True,
        "q_lora_rank": 24,
    },
    "sarvam_mla_halves_top1": {
        "rope_interleave": False,
        "norm_topk_prob": False,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 0,
        "v_head_dim": 20,
    },
    "glm4_moe_lite_groups": {},
    "glm4_moe_lite_types_halves": {
        "mlp_layer_types": ["sparse", "dense"],
        "rope_interleave": False,
        "q_lora_rank": None,
        "norm_topk_prob": False,
    },
    "glm4_moe_lite_bias_yarn_tied": {
        "attention_bias": True,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        "tie_word_embeddings": True,
        "v_head_dim": 20,
    },
    "mistral4_growing": {},
    "mistral4_groups_tied": {
        "n_group": 3,
        "topk_group": 2,
        "tie_word_embeddings": True,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 0,
    },
    "mistral4_halves_bias": {
        "rope_interleave": False,
        "attention_bias": True,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "v_head_dim": 20,
    },
    "glm_half_rotated": {},
    "glm_tied_quarter": {
        "tie_word_embeddings": True,
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.25,
        },
        "num_key_value_heads": 1,
    },
    "glm_whole_heads_linear": {
        "rope_parameters": LINEAR | {"partial_rotary_factor": 1.0},
        "num_key_value_heads": 4,
    },
    "glm4_half_rotated": {},
    "glm4_tied_three_quarters": {
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.75,
        },
        "num_key_value_heads": 1,
    },
    "glm4_yarn_without_biases": {
        "attention_bias": False,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
        "num_key_value_heads": 4,
    },
    "lfm2_tied": {"tie_word_embeddings": True},
    "lfm2_bias_wide": {
        "conv_bias": True,
        "conv_L_cache": 7,
        "block_auto_adjust_ff_dim": False,
        "layer_types": None,
        "full_attn_idxs": [2],
        "num_key_value_heads": 1,
    },
    "lfm2_narrow": {
        "conv_L_cache": 4,
        "hidden_size": 40,
        "num_key_value_heads": 4,
        "block_ffn_dim_multiplier": 1.3,
        "layer_types": [FULL, CONV, CONV],
    },
    "lfm2_moe_corrected": {},
    "lfm2_moe_plain_tied": {
        "use_expert_bias": False,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "conv_L_cache": 5,
        "num_key_value_heads": 1,
    },
    "lfm2_moe_all_sparse_biases": {
        "num_dense_layers": 0,
        "num_experts_per_tok": 1,
        "conv_bias": True,
        "conv_L_cache": 7,
        "layer_types": [CONV, CONV, FULL],
    },
    "lfm3_window_and_full": {},
    "lfm3_tied_biases": {
        "tie_word_embeddings": True,
        "conv_bias": True,
        "conv_L_cache": 3,
        "attention_bias": True,
        "num_key_value_heads": 1,
        "layer_types": None,
    },
    "lfm3_narrow_half_linear": {
        "conv_L_cache": 4,
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "layer_types": [FULL, CONV, SLIDING],
        "rope_parameters": {
            FULL: PROPORTIONAL[FULL] | {"partial_rotary_factor": 0.3, "factor": 2.0},
            SLIDING: LINEAR,
        },
    },
    "granitemoehybrid_experts": {},
    "granitemoehybrid_rotated_tied_biases": {
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "mamba_d_conv": 3,
        "mamba_n_groups": 1,
        "num_experts_per_tok": 1,
        "num_key_value_heads": 1,
    },
    "granitemoehybrid_dense_wide_taps": {
        "num_local_experts": 0,
        "mamba_d_conv": 7,
        "mamba_expand": 3,
        "mamba_n_groups": 4,
        "time_step_limit": [0.05, 0.7],
        "layer_types": [FULL, "linear_attention", "linear_attention"],
    },
    "granitemoehybrid_attention_alone": {
        "layer_types": [FULL, FULL],
        "num_hidden_layers": 2,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "mamba2_two_groups": {},
    "mamba2_tied_biases_wide_taps": {
        "tie_word_embeddings": True,
        "use_bias": True,
        "conv_kernel": 7,
        "n_groups": 1,
    },
    "mamba2_expanded_narrow_taps": {
        "num_hidden_layers": 3,
        "expand": 3,
        "num_heads": 12,
        "n_groups": 4,
        "use_conv_bias": False,
        "conv_kernel": 3,
        "time_step_limit": [0.05, 0.7],
    },
    "falcon_h1_factors": {},
    "falcon_h1_norm_after_biases_tied": {
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "mamba_d_conv": 7,
        "num_key_value_heads": 1,
    },
    "falcon_h1_norm_before_expanded": {
        "mamba_rms_norm": True,
        "mamba_d_ssm": None,
        "mamba_conv_bias": False,
        "mamba_d_conv": 3,
        "mamba_n_groups": 4,
        "ssm_multipliers": None,
        "mlp_multipliers": None,
        "time_step_limit": [0.05, 0.7],
    },
    "bamba_half_rotated": {},
    "bamba_tied_biases": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "mamba_proj_bias": True,
        "mamba_d_conv": 7,
        "num_key_value_heads": 1,
    },
    "bamba_narrow_taps": {
        "mamba_d_conv": 3,
        "mamba_conv_bias": False,
        "mamba_n_groups": 1,
        "attn_layer_indices": [0, 2],
        "time_step_limit": [0.05, 0.7],
        "num_key_value_heads": 4,
    },
    "olmo_hybrid_rotated": {},
    "olmo_hybrid_without_rotation_wide_taps": {
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "linear_allow_neg_eigval": False,
        "linear_conv_kernel_dim": 7,
        "linear_num_value_heads": 2,
        "num_key_value_heads": 1,
    },
    "olmo_hybrid_tied_default_sizes": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "num_hidden_layers": 3,
        "layer_types": None,
        "linear_num_key_heads": None,
        "linear_num_value_heads": None,
        "linear_key_head_dim": None,
        "linear_value_head_dim": None,
        "linear_conv_kernel_dim": 3,
        "num_key_value_heads": 4,
    },
    "nemotron_h_all_kinds": {},
    "nemotron_h_latent_biases": {
        "moe_latent_size": 20,
        "use_bias": True,
        "conv_kernel": 7,
        "n_groups": 1,
        "layers_block_type": ["linear_attention", "linear_attention", "moe", FULL],
    },
    "nemotron_h_dense_biases": {
        "layers_block_type": ["linear_attention", "mlp", FULL, "mlp"],
        "mlp_bias": True,
        "use_conv_bias": False,
        "conv_kernel": 3,
        "n_groups": 6,
    },
    "qwen3_5_two_a_key": {},
    "qwen3_5_tied_wide_taps": {
        "tie_word_embeddings": True,
        "linear_conv_kernel_dim": 7,
        "linear_num_value_heads": 2,
        "num_key_value_heads": 1,
    },
    "qwen3_5_interval_four_a_key": {
        "num_hidden_layers": 3,
        "layer_types": None,
        "full_attention_interval": 2,
        "linear_num_key_heads": 1,
        "linear_conv_kernel_dim": 3,
    },
    "qwen3_5_moe_two_a_key": {},
    "qwen3_5_moe_tied_top1": {
        "tie_word_embeddings": True,
        "num_experts_per_tok": 1,
        "linear_conv_kernel_dim": 3,
    },
    "qwen3_5_moe_one_a_key": {"linear_num_value_heads": 2, "linear_value_head_dim": 8},
    "qwen3_next_two_a_key": {},
    "qwen3_next_one_dense": {"mlp_only_layers": [0], "linear_conv_kernel_dim": 3},
    "qwen3_next_weights_as_they_are": {
        "norm_topk_prob": False,
        "linear_num_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "gemma_head_dim": {},
    "gemma_tied_linear": {
        "tie_word_embeddings": True,
        "rope_parameters": LINEAR,
        "num_key_value_heads": 1,
    },
    "gemma_bias_yarn": {
        "attention_bias": True,
        "rope_parameters": YARN,
        "head_dim": 16,
        "num_key_value_heads": 4,
    },
    "gemma2_caps": {},
    "gemma2_tied_no_caps": {
        "tie_word_embeddings": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "num_key_value_heads": 4,
    },
    "gemma2_bias_types": {"attention_bias": True, "layer_types": [FULL, SLIDING]},
    "gemma3_two_bases": {},
    "gemma3_tied_linear": {
        "tie_word_embeddings": True,
        "rope_parameters": {FULL: LINEAR, SLIDING: LOCAL_ROPE},
        "num_key_value_heads": 1,
    },
    "gemma3_dynamic": {
        "rope_parameters": {FULL: DYNAMIC, SLIDING: DYNAMIC | {"factor": 2.0}},
        "max_position_embeddings": 64,
    },
    "gemma3_longrope_local_yarn": {
        "rope_parameters": {FULL: LONGROPE, SLIDING: YARN},
        "head_dim": 6,
    },
    "gemma3_bias_cap_types": {
        "attention_bias": True,
        "final_logit_softcapping": 4.0,
        "layer_types": [FULL, SLIDING],
        "head_dim": 16,
    },
    "gemma4_experts": {},
    "gemma4_dense_untied": {
        "enable_moe_block": False,
        "tie_word_embeddings": False,
        "global_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "gemma4_projected_values_top1": {
        "attention_k_eq_v": False,
        "top_k_experts": 1,
        "final_logit_softcapping": None,
        "layer_types": [SLIDING, SLIDING, FULL],
        "rope_parameters": {FULL: LINEAR_PARTS, SLIDING: LOCAL_ROPE},
    },
    "gemma4_shared_inputs": SHARED,
    "gemma4_shared_wide_values": {
        **SHARED,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 3,
    },
    "gemma4_unified_windows": {},
    "gemma4_unified_four_pages": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "gemma4_unified_values_full": {
        "attention_k_eq_v": False,
        "layer_types": [FULL, FULL],
        "num_hidden_layers": 2,
    },
    **TRAIT_CASES,
}


# Cases whose layers resemble other cases of the family, so that they add no coverage of their own.
ONE_LAYER = frozenset(
    """
    llama_tied llama_biases llama3_rope llama_head_dim llama_linear llama_dynamic llama_yarn
    llama_yarn_mscale llama_longrope mistral_no_window_tied mistral_odd_head_yarn
    ministral_every_layer ministral_linear ministral3_window_tied ministral3_odd_head
    mixtral_top1_window_tied mixtral_many_yarn qwen2_yarn qwen3_tied_bias
    qwen3_moe_weights_as_they_are phi3_longrope phi3_longrope_short phi3_odd_head olmo2_bias_tied
    olmo2_linear_head_dim granite_tied_biases granite_llama3_head_dim cohere_qk_norm_untied
    cohere_yarn cohere_longrope cohere_dynamic gpt_oss_truncated_tied
    deepseek_v2_bias_wide_values deepseek_v3_halves_as_they_are glm_tied_quarter
    glm_whole_heads_linear glm4_tied_three_quarters glm4_yarn_without_biases gemma_tied_linear
    gemma_bias_yarn
    """.split()
)


def family_of(case: str) -> str:
    """Return the family that a case's name begins with: the longest of several."""
    return max((family for family in FAMILIES if case.startswith(family)), key=len)


def fields_of(case: str) -> dict[str, Any]:
    """Return the config.json fields that a case sets."""
    layers = {"num_hidden_layers": 1} if case in ONE_LAYER else {}
    fields = {**SIZES, **FAMILIES[family_of(case)][1], **layers, **CASES[case]}
    if {
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_eps",
    } & fields.keys():  # in place of the other
        del fields["rms_norm_eps"]
    return {
        name: fields[name] for name in fields if not (name in ATTENTION and "num_heads" in fields)
    }


def transformers_config(case: str, sizes: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return Transformers' configuration of a case, with some sizes changed."""
    name, _ = FAMILIES[family_of(case)]
    name = f"{name}Text" if name in TEXTS else name
    fields = {**fields_of(case), **sizes}
    return wrapped(name, fields) or getattr(transformers, f"{name}Config")(**fields)


def transformers_model(case: str, sizes: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return Transformers' model of a case, with its own random weights."""
    name, _ = FAMILIES[family_of(case)]
    config = transformers_config(case, sizes)
    name = COMPUTED_BY.get(name, name)
    name += "ForConditionalGeneration" if hasattr(config, "text_config") else "ForCausalLM"
    return getattr(transformers, name)(config)
