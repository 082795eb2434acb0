"""Every field of config.json that a family reads changes its output, or its value is refused."""

import json
from collections.abc import Generator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import attention, decoder, experts, latent, read_model_config
from jaxserve.models.config.model_config import IGNORED, NEUTRAL
from jaxserve.models.registry import ARCHITECTURES
from pallas_kernels import grouped_matmul, latent_attention, ragged_paged_attention
from tests.models.cases import CASES, FULL, SLIDING, family_of, fields_of
from tests.models.tiny_models import load, reference_logits
from tests.models.trait_changes import TRAIT_CHANGES, TRAIT_WITHOUT_MLP
from tests.support.fast_compile import FAST
from tests.support.paged_runner import PagedRunner
from tests.support.quick_operations import quick_operations

TOKENS = np.random.default_rng(5).integers(0, 96, 70).tolist()

# For the first case of every family. Each change affects a shape, a name or a constant.
COMMON: list[dict[str, Any]] = [
    {"rms_norm_eps": 1e-2},
    {"num_attention_heads": 2, "num_key_value_heads": 1},
    {"hidden_size": 16},
    {"intermediate_size": 24},
    {"num_hidden_layers": 1},
    {"num_hidden_layers": 5},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
    {"head_dim": 18},
    {"vocab_size": 95},
    {"tie_word_embeddings": True},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"hidden_act": "gelu"},
    {"model_type": "gpt2"},
    {"architectures": ["GPT2LMHeadModel"]},
]
FIRST = {family_of(case): case for case in reversed(CASES)}

GATED_DELTA: list[dict[str, Any]] = [
    {"layer_types": [FULL, "linear_attention"]},
    {"layer_types": [FULL, "conv"]},
    {"linear_conv_kernel_dim": 3},
    {"linear_num_key_heads": 1},
    {"linear_num_key_heads": 3},
    {"linear_num_value_heads": 2},
    {"linear_key_head_dim": 4},
    {"linear_value_head_dim": 6},
    {"attn_output_gate": False},
    {"rope_parameters.rope_theta": 600.0},
    {"rope_parameters.partial_rotary_factor": 0.5},
]
SHARED_EXPERT: list[dict[str, Any]] = [
    {"num_experts": 5},
    {"num_experts_per_tok": 2},
    {"moe_intermediate_size": 12},
    {"shared_expert_intermediate_size": 12},
]
CHANNEL_DELTA: list[dict[str, Any]] = [
    {"layer_types": [FULL, "linear_attention", "linear_attention"]},
    {"layer_types": [FULL, "conv", "conv"]},
    {"mlp_layer_types": ["sparse", "sparse", "sparse"]},
    {"linear_num_heads": 2},
    {"num_experts": 5},
    {"num_experts_per_token": 3},
    {"moe_intermediate_size": 12},
    {"moe_renormalize": False},
    {"num_shared_experts": 1},
    {"topk_group": 3},
    {"num_expert_group": 2},
    {"qk_rope_head_dim": 4},
    {"routed_scaling_factor": 2.0},
    {"attention_bias": True},
    {"q_lora_rank": 24},
    {"kv_lora_rank": 8},
    {"qk_nope_head_dim": 11},
    {"qk_head_dim": 21},
    {"v_head_dim": 8},
]
MAMBA: list[dict[str, Any]] = [
    {"mamba_n_heads": 8, "mamba_d_head": "auto"},
    {"mamba_n_heads": 7},
    {"mamba_d_head": 5},
    {"mamba_d_state": 8},
    {"mamba_n_groups": 1},
    {"mamba_n_groups": 3},
    {"mamba_d_conv": 3},
    {"mamba_conv_bias": False},
    {"time_step_limit": [0.5, 0.6]},
    {"time_step_limit": [0.5]},
]
GEMMA4: list[dict[str, Any]] = [
    {"attention_k_eq_v": False},
    {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 1, "moe_intermediate_size": 12},
    {"final_logit_softcapping": 3.0},
    {"hidden_activation": "silu"},
    {"layer_types": [SLIDING, SLIDING, FULL]},
    {"layer_types": [FULL, FULL, FULL]},
    {"num_kv_shared_layers": 1},
    {"per_layer_config": None, "global_head_dim": 12},
    {"per_layer_config.1.head_dim": 12},
    {"per_layer_config.1.num_key_value_heads": 2},
    {"per_layer_config.2.head_dim": 12},
    {"per_layer_config.2.num_key_value_heads": 2},
    {"per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}}},
    {"sliding_window": 5},
    {"use_bidirectional_attention": "all"},
    {"use_double_wide_mlp": True, "num_kv_shared_layers": 1},
]
# By case: changes of the settings that it exercises. A dot leads into a mapping.
PARTICULAR: dict[str, list[dict[str, Any]]] = {
    "llama3_rope": [
        {"rope_parameters.rope_type": "default"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters.rope_theta": 600.0},
        {"rope_parameters.factor": 2.0},
        {"rope_parameters.low_freq_factor": 2.0},
        {"rope_parameters.high_freq_factor": 8.0},
        {"rope_parameters.original_max_position_embeddings": 64},
        {"rope_parameters.partial_rotary_factor": 0.5},
    ],
    "llama_biases": [{"attention_bias": False}, {"mlp_bias": False}],
    "llama_tied": [{"tie_word_embeddings": False}],
    "llama_head_dim": [{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}],
    "llama_linear": [{"rope_parameters.factor": 3.0}],
    "llama_dynamic": [{"rope_parameters.factor": 2.0}, {"max_position_embeddings": 32}],
    "llama_yarn": [
        {"rope_parameters.factor": 2.0},
        {"rope_parameters.original_max_position_embeddings": 128},
        {"rope_parameters.beta_fast": 1.0},
        {"rope_parameters.beta_slow": 0.1},
        {"rope_parameters.truncate": False},
        {"rope_parameters.attention_factor": 1.5},
    ],
    "llama_yarn_mscale": [
        {"rope_parameters.mscale": 1.5},
        {"rope_parameters.mscale_all_dim": 0.5},
    ],
    "llama_longrope": [
        {"rope_parameters.factor": 3.0},
        {"rope_parameters.attention_factor": 1.5},
        {"rope_parameters.long_factor": [1.0, 2.0, 4.0]},
        {"rope_parameters.long_factor": [1.0, 2.0]},
        {"rope_parameters.original_max_position_embeddings": 16},
        {"max_position_embeddings": 32},
    ],
    "mistral_window": [
        {"sliding_window": 5},
        {"sliding_window": None},
        {"layer_types": [FULL, SLIDING]},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "ministral_alternate": [
        {"sliding_window": 5},
        {"sliding_window": None},
        {"layer_types": None},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "ministral3_growth": [
        {"sliding_window": 5},
        {"rope_parameters.llama_4_scaling_beta": 0.6},
        {"rope_parameters.max_position_embeddings": 16, "rope_parameters.llama_4_scaling_beta": 0},
        {"rope_parameters.rope_theta": 600.0},
        {"rope_parameters": None},
    ],
    "mixtral_top2": [
        {"num_local_experts": 3},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 5},
        {"sliding_window": 5},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "qwen3_moe_one_dense": [
        {"num_local_experts": 5},
        {"num_experts": 5},
        {"num_experts_per_tok": 2},
        {"moe_intermediate_size": 48},
        {"norm_topk_prob": False},
        {"mlp_only_layers": [0]},
        {"mlp_only_layers": [2]},
        {"decoder_sparse_step": 2},
        {"use_sliding_window": True, "sliding_window": 7},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "gpt_oss_alternate": [
        {"num_local_experts": 3},
        {"num_experts_per_tok": 3},
        {"swiglu_alpha": 1.0},
        {"swiglu_limit": 2.0},
        {"sliding_window": 5},
        {"layer_types": [FULL, SLIDING]},
        {"attention_bias": False},
        {"rope_parameters.truncate": True},
        {"rope_parameters": None},
        {"quantization_config": {"quant_method": "mxfp4"}},
    ],
    "gpt_oss_mxfp4": [
        {"quantization_config": None},
        {"quantization_config.quant_method": "fp8"},
    ],
    "deepseek_v2_groups": [
        {"topk_method": "greedy"},
        {"topk_method": "noaux_tc"},
        {"n_group": 2},
        {"n_group": 4},
        {"topk_group": 3},
        {"n_routed_experts": 5},
        {"num_experts_per_tok": 2},
        {"num_experts_per_tok": 5},
        {"moe_intermediate_size": 12},
        {"n_shared_experts": 1},
        {"first_k_dense_replace": 0},
        {"routed_scaling_factor": 2.0},
        {"norm_topk_prob": True},
        {"scoring_func": "sigmoid"},
        {"q_lora_rank": None},
        {"kv_lora_rank": 8},
        {"qk_nope_head_dim": 11},
        {"qk_head_dim": 21},
        {"qk_rope_head_dim": 4},
        {"v_head_dim": 8},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "deepseek_v2_one_projection_yarn": [{"rope_parameters.mscale_all_dim": 0.5}],
    "kimi_linear_low_rank": [
        *CHANNEL_DELTA,
        {"linear_head_dim": 8},
        {"linear_conv_kernel_dim": 3},
        {"mla_use_nope": False},
        {"moe_router_activation_func": "softmax"},
        {"linear_attn_config": {"head_dim": 8}},
        {"linear_attn_config": {"num_heads": 2, "short_conv_kernel_size": 3}},
        {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 2]}},
        {"linear_attn_config": {"gate_lower_bound": -5.0}},
        {"linear_attn_config": [1]},
    ],
    "bailing_hybrid_bounded": [
        *CHANNEL_DELTA,
        {"linear_head_dim": 8},
        {"linear_conv_kernel_dim": 3},
        {"first_k_dense_replace": 2},
        {"layer_group_size": 3},
        {"short_conv_kernel_size": 3},
        {"rope_theta": 600.0},
        {"kda_safe_gate": False},
        {"kda_lower_bound": -3.0},
        {"kda_lower_bound": 1.0},
        {"rotary_dim": 4},
        {"rope_interleave": False},
        {"rope_parameters.rope_theta": 600.0},
        {"no_kda_lora": False},
        {"gated_attention_proj_granularity_type": "element_wise"},
        {"moe_shared_expert_intermediate_size": 12},
        {"expert_swiglu_limit_list": [0.0, 7.0, 0.0]},
    ],
    "sarvam_mla_groups_yarn_tied": [
        {"n_group": 2},
        {"topk_group": 1},
        {"n_routed_experts": 5},
        {"num_experts_per_tok": 3},
        {"moe_intermediate_size": 12},
        {"n_shared_experts": 1},
        {"first_k_dense_replace": 0},
        {"num_nextn_predict_layers": 17},
        {"routed_scaling_factor": 2.0},
        {"norm_topk_prob": False},
        {"rope_interleave": False},
        {"attention_bias": True},
        {"q_lora_rank": None},
        {"kv_lora_rank": 8},
        {"qk_nope_head_dim": 11},
        {"qk_head_dim": 21},
        {"qk_rope_head_dim": 4},
        {"head_dim": 12},
        {"v_head_dim": 8},
        {"rope_parameters.rope_theta": 600.0},
        {"rope_parameters.mscale_all_dim": 0.5},
    ],
    "glm4_moe_lite_groups": [
        {"n_group": 2},
        {"topk_group": 1},
        {"n_routed_experts": 5},
        {"num_experts_per_tok": 3},
        {"moe_intermediate_size": 12},
        {"n_shared_experts": 1},
        {"mlp_layer_types": ["sparse", "sparse"]},
        {"mlp_layer_types": ["dense"]},
        {"mlp_layer_types": ["dense", "wide"]},
        {"first_k_dense_replace": 0},
        {"routed_scaling_factor": 2.0},
        {"norm_topk_prob": False},
        {"rope_interleave": False},
        {"attention_bias": True},
        {"q_lora_rank": None},
        {"kv_lora_rank": 8},
        {"qk_nope_head_dim": 11},
        {"qk_head_dim": 21},
        {"qk_rope_head_dim": 4},
        {"v_head_dim": 8},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "mistral4_growing": [
        {"n_group": 2},
        {"topk_group": 2},
        {"n_routed_experts": 5},
        {"num_experts_per_tok": 3},
        {"moe_intermediate_size": 12},
        {"n_shared_experts": 1},
        {"first_k_dense_replace": 0},
        {"routed_scaling_factor": 2.0},
        {"norm_topk_prob": False},
        {"rope_interleave": False},
        {"attention_bias": True},
        {"q_lora_rank": None},
        {"kv_lora_rank": 8},
        {"qk_nope_head_dim": 11},
        {"qk_head_dim": 21},
        {"qk_rope_head_dim": 4},
        {"head_dim": 8},
        {"v_head_dim": 8},
        {"rope_parameters.rope_theta": 600.0},
        {"rope_parameters.llama_4_scaling_beta": 0.5},
        {"rope_parameters.partial_rotary_factor": 0.5},
        {"rope_parameters.mscale_all_dim": 0.5},
    ],
    "deepseek_v3_groups": [
        {"topk_method": "greedy"},
        {"n_group": 2},
        {"topk_group": 1},
        {"n_routed_experts": 5},
        {"num_experts_per_tok": 3},
        {"moe_intermediate_size": 12},
        {"n_shared_experts": 1},
        {"first_k_dense_replace": 0},
        {"routed_scaling_factor": 2.0},
        {"norm_topk_prob": False},
        {"scoring_func": "softmax"},
        {"q_lora_rank": None},
        {"kv_lora_rank": 8},
        {"qk_nope_head_dim": 11},
        {"qk_head_dim": 21},
        {"qk_rope_head_dim": 4},
        {"v_head_dim": 8},
        {"rope_interleave": False},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "qwen2_tied_window": [
        {"sliding_window": 3},
        {"use_sliding_window": False},
        {"use_sliding_window": False, "layer_types": None},
        {"layer_types": [SLIDING, FULL]},
        {"layer_types": None, "max_window_layers": 0},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "lfm2_tied": [
        {"norm_eps": 1e-2},
        {"layer_types": ["full_attention", "conv", "conv"]},
        {"layer_types": ["conv", "conv"]},
        {"layer_types": None, "full_attn_idxs": [0]},
        {"layer_types": None, "full_attn_idxs": [3]},
        {"conv_L_cache": 4},
        {"conv_bias": True},
        {"block_auto_adjust_ff_dim": False},
        {"block_ffn_dim_multiplier": 2.0},
        {"block_multiple_of": 24},
        {"tie_word_embeddings": False},
        {"tie_embedding": False},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "lfm2_moe_corrected": [
        {"norm_eps": 1e-2},
        {"layer_types": [FULL, "conv", "conv"]},
        {"layer_types": None},
        {"conv_L_cache": 4},
        {"conv_bias": True},
        {"num_dense_layers": 2},
        {"num_dense_layers": 4},
        {"num_experts": 5},
        {"num_experts_per_tok": 2},
        {"moe_intermediate_size": 12},
        {"routed_scaling_factor": 2.0},
        {"norm_topk_prob": False},
        {"use_expert_bias": False},
        {"tie_word_embeddings": True},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "lfm3_window_and_full": [
        {"norm_eps": 1e-2},
        {"layer_types": ["conv", FULL, "conv", SLIDING]},
        {"layer_types": None},
        {"layer_types": ["conv", "conv", "conv", "linear_attention"]},
        {"sliding_window": 5},
        {"sliding_window": None},
        {"conv_L_cache": 4},
        {"conv_bias": True},
        {"attention_bias": True},
        {"use_sandwich_norm": False},
        {"use_attention_gate": False},
        {"tie_word_embeddings": True},
        {"rope_parameters": None},
        {"rope_parameters.full_attention.rope_theta": 600.0},
        {"rope_parameters.full_attention.rope_type": "default"},
        {"rope_parameters.full_attention.partial_rotary_factor": 0.25},
        {"rope_parameters.full_attention.factor": 2.0},
        {"rope_parameters.sliding_attention.rope_theta": 600.0},
    ],
    "lfm3_narrow_half_linear": [{"rope_parameters.sliding_attention.factor": 3.0}],
    "qwen3_5_two_a_key": [*GATED_DELTA],
    "qwen3_5_interval_four_a_key": [{"layer_types": None, "full_attention_interval": 3}],
    "qwen3_5_moe_two_a_key": [*GATED_DELTA, *SHARED_EXPERT],
    "qwen3_next_two_a_key": GATED_DELTA,
    "qwen3_next_one_dense": [
        *SHARED_EXPERT,
        {"mlp_only_layers": [1]},
        {"mlp_only_layers": [], "decoder_sparse_step": 3},
        {"intermediate_size": 24},
        {"norm_topk_prob": False},
    ],
    "nemotron_h_all_kinds": [
        {"layer_norm_epsilon": 1e-2},
        {"layers_block_type": ["mlp", "moe", FULL, "linear_attention"]},
        {"layers_block_type": ["linear_attention", "conv", FULL, "mlp"]},
        {"layers_block_type": None, "hybrid_override_pattern": "ME*-", "num_hidden_layers": 3},
        {"mamba_num_heads": 4},
        {"mamba_head_dim": 4},
        {"ssm_state_size": 8},
        {"n_groups": 3},
        {"n_groups": 4},
        {"conv_kernel": 3},
        {"use_conv_bias": False},
        {"use_bias": True},
        {"mamba_proj_bias": True},
        {"mamba_hidden_act": "gelu"},
        {"mlp_hidden_act": "silu"},
        {"time_step_min": 0.5},
        {"n_routed_experts": 5},
        {"num_experts_per_tok": 2},
        {"moe_intermediate_size": 12},
        {"moe_latent_size": 8},
        {"moe_shared_expert_intermediate_size": 12},
        {"n_shared_experts": 0},
        {"routed_scaling_factor": 2.0},
        {"n_group": 2},
        {"topk_group": 1},
        {"norm_topk_prob": False},
        {"sliding_window": 5},
        {"residual_in_fp32": True},
    ],
    "qwen3": [
        {"use_sliding_window": True},
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": None,
            "max_window_layers": 1,
        },
        {"rope_parameters.rope_theta": 600.0},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    ],
    "qwen3_window": [
        {"sliding_window": 3},
        {"layer_types": None, "max_window_layers": 1},
        {"layer_types": [SLIDING, SLIDING]},
    ],
    "phi3_window": [
        {"sliding_window": 5},
        {"sliding_window": None},
        {"rope_parameters.rope_theta": 600.0},
        {"rope_parameters.rope_type": "yarn"},
    ],
    "phi3_longrope": [
        {"rope_parameters.partial_rotary_factor": 1.0},
        {"rope_parameters.long_factor": [2.0, 2.0, 5.0]},
        {"original_max_position_embeddings": 64},
        {"max_position_embeddings": 128},
    ],
    "phi3_longrope_short": [{"rope_parameters.short_factor": [1.0, 1.2, 1.3]}],
    "phi3_odd_head": [
        {"partial_rotary_factor": 0.4},
        {"partial_rotary_factor": 0.4, "rope_parameters.partial_rotary_factor": 0.4},
    ],
    "smollm3_untied_bias": [
        {"attention_bias": False},
        {"mlp_bias": False},
        {"no_rope_layers": [0, 1, 1]},
        {"no_rope_layers": [0, 1]},
        {"no_rope_layers": None, "no_rope_layer_interval": 3},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "smollm3_window": [
        {"sliding_window": 4},
        {"use_sliding_window": False},
        {"layer_types": [SLIDING, FULL, FULL]},
    ],
    "olmo2_gqa": [{"rope_parameters.rope_theta": 600.0}],
    "olmo2_bias_tied": [{"attention_bias": False}],
    "olmo3_alternate": [
        {"sliding_window": 5},
        {"sliding_window": None},
        {"layer_types": [FULL, SLIDING]},
        {"layer_types": None},
        {"rope_parameters.full_attention.rope_theta": 600.0},
        {"rope_parameters.sliding_attention.rope_theta": 600.0},
        {"rope_parameters.sliding_attention": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 600.0}},
    ],
    "cohere_tied": [
        {"layer_norm_eps": 1e-2},
        {"logit_scale": 0.7},
        {"use_qk_norm": True},
        {"tie_word_embeddings": False},
        {"rope_parameters.rope_theta": 600.0},
        {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2"},
    ],
    "cohere_qk_norm_untied": [{"use_qk_norm": False}, {"layer_norm_eps": 1e-2}],
    "cohere_qk_norm_bias_head_dim": [{"attention_bias": False}, {"use_qk_norm": False}],
    "cohere2_tied": [
        {"layer_norm_eps": 1e-2},
        {"logit_scale": 0.7},
        {"sliding_window": 5},
        {"sliding_window": None},
        {"layer_types": [FULL, SLIDING, SLIDING]},
        {"layer_types": None},
        {"layer_types": None, "sliding_window_pattern": 3},
        {"use_qk_norm": True},
        {"tie_word_embeddings": False},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "cohere2_every_fourth_bias": [{"attention_bias": False}],
    "olmo_hybrid_rotated": [
        *GATED_DELTA[:-1],
        {"linear_allow_neg_eigval": False},
        {"rope_parameters.rope_theta": None},
        {"linear_value_head_dim": None},
    ],
    "mamba2_two_groups": [
        {"num_heads": 16, "head_dim": 4},
        {"num_heads": 7},
        {"state_size": 8},
        {"n_groups": 1},
        {"n_groups": 3},
        {"conv_kernel": 3},
        {"use_conv_bias": False},
        {"use_bias": True},
        {"expand": 3},
        {"layer_norm_epsilon": 0.1},
        {"tie_word_embeddings": True},
        {"hidden_act": "gelu"},
    ],
    "mamba2_expanded_narrow_taps": [
        {"time_step_limit": [0.5, 0.6]},
        {"time_step_limit": [0.5]},
    ],
    "falcon_h1_factors": [
        *MAMBA,
        {"mamba_d_ssm": 32},
        {"mamba_rms_norm": True},
        {"projectors_bias": True},
        {"projectors_bias": True, "mamba_proj_bias": True},
        {"key_multiplier": 0.5},
        {"attention_in_multiplier": 0.5},
        {"attention_out_multiplier": 0.5},
        {"ssm_in_multiplier": 0.5},
        {"ssm_out_multiplier": 0.5},
        {"ssm_multipliers": [0.8, 1.1, 0.7, 1.3, 0.6]},
        {"ssm_multipliers": [0.9, 1.0, 0.7, 1.3, 0.6]},
        {"ssm_multipliers": [0.9, 1.1, 0.6, 1.3, 0.6]},
        {"ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.6]},
        {"ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.5]},
        {"ssm_multipliers": [0.9, 1.1, 0.7, 1.3]},
        {"mlp_multipliers": [0.6, 1.7]},
        {"mlp_multipliers": [0.5, 1.6]},
        {"embedding_multiplier": 2.0},
        {"lm_head_multiplier": 0.5},
        {"mamba_use_mlp": False},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "falcon_h1_norm_after_biases_tied": [{"mamba_norm_before_gate": True}],
    "falcon_h1_norm_before_expanded": [{"mamba_expand": 4}],
    "bamba_half_rotated": [
        *MAMBA,
        {"attn_layer_indices": [0]},
        {"attn_layer_indices": [3]},
        {"mamba_expand": 4},
        {"mamba_proj_bias": True},
        {"rope_parameters.rope_theta": 600.0},
        {"rope_parameters.partial_rotary_factor": 1.0},
    ],
    "granitemoehybrid_experts": [
        {"layer_types": [FULL, "mamba", "attention"]},
        {"layer_types": [FULL, "conv", FULL]},
        {"layer_types": None},
        {"attention_multiplier": 0.3},
        {"embedding_multiplier": 4.0},
        {"residual_multiplier": 0.5},
        {"logits_scaling": 3.0},
        {"position_embedding_type": "rope"},
        {"position_embedding_type": "alibi"},
        {"num_local_experts": 5},
        {"num_local_experts": 0},
        {"num_experts_per_tok": 2},
        {"intermediate_size": 12},
        {"shared_intermediate_size": 12},
        *MAMBA,
        {"mamba_expand": 4},
        {"mamba_proj_bias": True},
        {"tie_word_embeddings": True},
    ],
    "granitemoehybrid_rotated_tied_biases": [{"rope_parameters.rope_theta": 600.0}],
    "granite_untied": [
        {"attention_multiplier": 0.3},
        {"embedding_multiplier": 4.0},
        {"residual_multiplier": 0.5},
        {"logits_scaling": 3.0},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "glm_half_rotated": [
        {"attention_bias": False},
        {"rope_parameters.partial_rotary_factor": 0.25},
        {"rope_parameters.rope_theta": 600.0},
        {"rope_parameters.rope_type": "dynamic", "rope_parameters.factor": 2.0},
        {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"},
    ],
    "glm_whole_heads_linear": [{"rope_parameters.factor": 3.0}],
    "glm4_half_rotated": [
        {"attention_bias": False},
        {"rope_parameters.partial_rotary_factor": 0.25},
        {"rope_parameters.rope_theta": 600.0},
        {"architectures": ["GlmForCausalLM"], "model_type": "glm"},
    ],
    "glm4_yarn_without_biases": [{"rope_parameters.beta_slow": 0.1}],
    "gemma_head_dim": [
        {"hidden_act": "silu"},
        {"hidden_activation": "silu"},
        {"use_bidirectional_attention": True},
        {"rope_parameters.rope_theta": 600.0},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    ],
    "gemma2_caps": [
        {"query_pre_attn_scalar": 30},
        {"attn_logit_softcapping": 3.0},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": 3.0},
        {"sliding_window": 5},
        {"sliding_window": None},
        {"layer_types": [FULL, SLIDING]},
        {"hidden_activation": "silu"},
        {"use_bidirectional_attention": True},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "gemma3_dynamic": [{"rope_parameters.sliding_attention.factor": 3.0}],
    "gemma3_longrope_local_yarn": [
        {"rope_parameters.full_attention.long_factor": [1.0, 2.0, 4.0]},
        {"rope_parameters.sliding_attention.factor": 2.0},
        {"rope_parameters.sliding_attention.partial_rotary_factor": 0.5},
    ],
    "gemma3_two_bases": [
        {"query_pre_attn_scalar": 30},
        {"attn_logit_softcapping": 3.0},
        {"final_logit_softcapping": 3.0},
        {"sliding_window": 5},
        {"layer_types": [FULL, SLIDING]},
        {"layer_types": None, "sliding_window_pattern": 3},
        {"hidden_activation": "silu"},
        {"use_bidirectional_attention": True},
        {"rope_parameters.full_attention.rope_theta": 600.0},
        {"rope_parameters.sliding_attention.rope_theta": 600.0},
    ],
    "gemma4_experts": [
        *GEMMA4,
        {"enable_moe_block": False},
        {"num_experts": 5},
        {"top_k_experts": 1},
        {"moe_intermediate_size": 12},
        {"hidden_size_per_layer_input": 8},
        {"hidden_size_per_layer_input": None},
        {"rope_parameters.full_attention.partial_rotary_factor": 1.0},
        {"rope_parameters.full_attention.rope_theta": 600.0},
        {"rope_parameters.sliding_attention.rope_theta": 600.0},
    ],
    "gemma4_shared_inputs": [
        {"num_kv_shared_layers": 1},
        {"num_kv_shared_layers": 4},
        {"num_kv_shared_layers": 9},
        {"use_double_wide_mlp": True},
        {"hidden_size_per_layer_input": 16},
        {"vocab_size_per_layer_input": 95},
        {"tie_word_embeddings": False},
        {"per_layer_config.4.head_dim": 12},
        {"per_layer_config.4.num_key_value_heads": 2},
    ],
    "gemma4_unified_windows": [
        *GEMMA4,
        {"hidden_size_per_layer_input": 8},
        {"tie_word_embeddings": False},
    ],
    "gemma4_unified_values_full": [{"per_layer_config.0.head_dim": 12}],
    **TRAIT_CHANGES,
}
# All layers have experts, whose width is another field.
WITHOUT_MLP = (
    *("qwen3_5_moe_two_a_key", "qwen3_next_two_a_key", "mamba2_two_groups"),
    *TRAIT_WITHOUT_MLP,
)
CHANGES = [
    *[
        (case, change)
        for case in FIRST.values()
        for change in COMMON
        if not change.items() <= fields_of(case).items()
        and not (case in WITHOUT_MLP and "intermediate_size" in change)
    ],
    *[(case, change) for case, changes in PARTICULAR.items() for change in changes],
]
# Fields of a wrapper.
OUTER = ("architectures", "tie_word_embeddings")
# They bound requests or end them, and change no logit (but see dynamic and LongRoPE above).
NO_OUTPUT = {"max_position_embeddings", "model_max_length", "dtype", "eos_token_id", "bos_token_id"}


def leaves(raw: dict[str, Any], prefix: str = "") -> set[str]:
    """Return the names of all fields, where names inside a mapping begin with its path."""
    names = set()
    for key, value in raw.items():
        name = prefix + key
        names |= leaves(value, f"{name}.") if isinstance(value, dict) else {name}
    return names


def without_rope(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("rope_parameters.")}


def changed(raw: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with some fields, of the text in a wrapper, set to other values."""
    raw = deepcopy(raw)
    for path, value in change.items():
        *outer, key = path.split(".")
        inner = raw if path in OUTER or "text_config" not in raw else raw["text_config"]
        for step in outer:
            inner = inner[step]
        inner[key] = value
    return raw


def test_every_field_read_is_changed_once(checkpoints):
    rope_read, rope_changed = set(), set()
    for family in FIRST:
        cases = [case for case in CASES if family_of(case) == family]
        written, unread = set(), set()
        for case in cases:
            raw = json.loads((checkpoints[case][0] / "config.json").read_text())
            written |= leaves(raw.get("text_config", raw))
            rules = ARCHITECTURES[read_model_config(checkpoints[case][0]).architecture].config
            unread |= IGNORED | NEUTRAL.keys() | rules.ignored
        asked = {key for case, change in CHANGES if case in cases for key in change}
        assert without_rope(written) - unread - NO_OUTPUT - asked == set(), family
        rope_read |= {name.split(".")[-1] for name in written - without_rope(written)}
        rope_changed |= {name.split(".")[-1] for name in asked}
    # The sections of a head have equal positions in a text.
    assert rope_read - {"mrope_section"} <= rope_changed


@pytest.fixture(scope="module", autouse=True)
def operations_are_compiled_quickly() -> Generator[None]:
    """Compile operations quickly, since each operation of a model is compiled by itself here."""
    with quick_operations():
        yield


@pytest.fixture(scope="module", autouse=True)
def attention_is_compiled_once():
    """Compile attention's loops once, while all other code is compiled by operation."""
    static = "implementation"
    compiled = jax.jit(ragged_paged_attention, static_argnames=static, compiler_options=FAST)
    static = "one_query", "implementation"
    latents = jax.jit(latent_attention, static_argnames=static, compiler_options=FAST)
    product = jax.jit(grouped_matmul, static_argnames="implementation", compiler_options=FAST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ragged_attention", compiled)
        patch.setattr(latent, "attend_latents", latents)
        patch.setattr(experts, "grouped_matmul", product)
        patch.setattr(decoder, "run_layer", decoder.run_layer.__wrapped__)
        yield


def last_logits(directory: Path) -> np.ndarray:
    # Not compiled as a whole: most operations are the same as in the case before.
    return PagedRunner(load(directory), page_size=16, max_tokens=96, whole=False).run([TOKENS])[0]


@pytest.fixture(scope="module")
def unchanged(checkpoints) -> dict[str, np.ndarray]:
    """Return Transformers' logits of each unchanged case, which need no compilation.

    With dynamic scaling a token's rotation depends on how many are read together.
    """
    return {
        case: reference_logits(checkpoints[case][1], TOKENS, 64 if "dynamic" in case else 0)
        for case in dict.fromkeys([*PARTICULAR, *FIRST.values()])
    }


@pytest.mark.parametrize("case", ["llama_dynamic", "gemma3_two_bases", "gpt_oss_mxfp4"])
def test_without_a_change_no_difference_would_be_seen(checkpoints, unchanged, case):
    got = last_logits(checkpoints[case][0])
    assert np.abs(got - unchanged[case]).max() < 1e-4


@pytest.mark.parametrize(("case", "change"), CHANGES)
def test_a_changed_field_changes_the_output_or_is_refused(
    checkpoints, unchanged, tmp_path, case, change
):
    source = checkpoints[case][0]
    raw = changed(json.loads((source / "config.json").read_text()), change)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "weights")
    (tmp_path / "weights").write_bytes((source / "model.safetensors").read_bytes())
    try:
        got = last_logits(tmp_path)
    except (CheckpointError, UnsupportedModel):
        return
    assert np.abs(got - unchanged[case]).max() > 1e-3


def test_longrope_takes_the_factors_of_the_length_served(checkpoints):
    config = read_model_config(checkpoints["llama_longrope"][0])
    long, short = config.rope, config.for_length(32).rope
    assert long != short and config.for_length(33).rope == long
    layered = replace(config, local_rope=long)
    assert layered.for_length(32).local_rope == short
    assert layered.for_length(33).local_rope == long
