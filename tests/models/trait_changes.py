"""Changes of config.json for the cases of `trait_cases.py`, which `test_fields.py` describes."""

from __future__ import annotations

from typing import Any

from tests.models.rope_cases import FULL, SLIDING

THETA = {"rope_parameters.rope_theta": 600.0}
PARTIAL = {"rope_parameters.partial_rotary_factor": 0.75}
SCORED: list[dict[str, Any]] = [
    {"n_routed_experts": 5},
    {"num_experts_per_tok": 1},
    {"moe_intermediate_size": 12},
    {"n_shared_experts": 1},
    {"routed_scaling_factor": 2.5},
    {"norm_topk_prob": False},
    {"n_group": 2},
    {"topk_group": 1},
]

TRAIT_CHANGES: dict[str, list[dict[str, Any]]] = {
    "glm4_moe_groups": [
        *SCORED,
        {"use_qk_norm": False},
        {"first_k_dense_replace": 0},
        {"num_nextn_predict_layers": 17},
        THETA,
        PARTIAL,
    ],
    "minimax_m2_half_rotated": [
        {"num_local_experts": 5},
        {"num_experts_per_tok": 1},
        {"rotary_dim": 12},
        {"attn_type_list": [1, 0]},
        THETA,
        PARTIAL,
    ],
    "laguna_heads_by_layer": [
        {"num_attention_heads_per_layer": [4, 6, 4]},
        {"num_attention_heads_per_layer": [4, 6, 5]},
        {"layer_types": [FULL, SLIDING, FULL]},
        {"sliding_window": 5},
        {"mlp_layer_types": ["dense", "sparse", "dense"]},
        {"num_experts": 5},
        {"num_experts_per_tok": 1},
        {"moe_intermediate_size": 12},
        {"shared_expert_intermediate_size": 12},
        {"moe_routed_scaling_factor": 2.5},
        {"moe_router_logit_softcapping": 0.5},
        {"moe_apply_router_weight_on_input": True},
        {"gating": "per-element"},
        {"rope_parameters.full_attention.partial_rotary_factor": 1.0},
        {"rope_parameters.sliding_attention.rope_theta": 600.0},
    ],
    "muse_glimmer_every_fourth": [
        {"layer_types": [FULL, SLIDING, FULL, SLIDING]},
        {"layer_rope_theta": [1e4, 0, 1e4, 0]},
        {"layer_rope_theta": [1e4, 0, 1e5, 0]},
        {"sliding_window": 5},
        {"qk_scale_factor": 2.0},
        {"output_multiplier": 0.3},
        {"final_logit_softcapping": 3.0},
        {"post_norm_eps": 0.1},
        {"hidden_activation": "gelu"},
        {"rope_parameters.rope_theta": 600.0},
    ],
    "seed_oss_bias": [{"attention_bias": False}, {"attention_out_bias": True}, THETA],
    "ernie4_5_biases": [{"use_bias": False}, THETA],
    "ernie4_5_moe_shared": [
        {"moe_num_experts": 5},
        {"moe_k": 1},
        {"moe_intermediate_size": 12},
        {"moe_num_shared_experts": 1},
        {"moe_layer_start_index": 0},
        {"moe_layer_end_index": 0},
        {"moe_layer_interval": 3},
        {"moe_norm_min": 1.0},
        {"use_bias": True},
        THETA,
    ],
    "exaone4_alternate": [
        {"sliding_window": 5},
        {"sliding_window": None},
        {"layer_types": [FULL, SLIDING]},
        {"layer_types": None, "sliding_window_pattern": 3},
        THETA,
    ],
    "exaone_moe_groups": [
        {"num_experts": 5},
        {"num_experts_per_tok": 1},
        {"moe_intermediate_size": 12},
        {"num_shared_experts": 1},
        {"routed_scaling_factor": 2.5},
        {"norm_topk_prob": False},
        {"n_group": 2},
        {"topk_group": 1},
        {"mlp_layer_types": ["sparse", "sparse"]},
        {"mlp_layer_types": None, "first_k_dense_replace": 0},
        {"sliding_window": 5},
        {"sliding_window_pattern": 3, "layer_types": None},
        THETA,
    ],
    "hunyuan_v1_dense_stretched": [
        THETA,
        {"rope_parameters.alpha": 20.0},
        {"rope_parameters.factor": 2.0},
        {"rope_parameters.alpha": None},
        {"use_qk_norm": False},
    ],
    "hy_v3_first_dense": [
        {"num_experts": 5},
        {"num_experts_per_tok": 1},
        {"moe_intermediate_size": 12},
        {"num_shared_experts": 1},
        {"router_scaling_factor": 2.5},
        {"mlp_layer_types": ["sparse", "sparse"]},
        THETA,
    ],
    "solar_open_groups": [
        *SCORED,
        {"first_k_dense_replace": 1},
        {"use_qk_norm": True},
        THETA,
    ],
    "dots1_groups": [
        *SCORED,
        {"first_k_dense_replace": 0},
        {"layer_types": [SLIDING, FULL]},
        {"layer_types": None, "max_window_layers": 0},
        {"sliding_window": 5},
        THETA,
    ],
    "olmoe_as_they_are": [
        {"num_experts": 5},
        {"num_experts_per_tok": 1},
        {"norm_topk_prob": True},
        {"clip_qkv": 8.0},
        THETA,
    ],
}
# All layers have experts, whose width is another field.
TRAIT_WITHOUT_MLP: tuple[str, ...] = ("solar_open_groups",)
