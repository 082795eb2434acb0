"""Published checkpoints of families that differ by switches: their config.json is read.

Fields are those of the files on the Hugging Face hub, as far as copies of them are known. Where
"defaults of the class" is part of a name, they are those of Transformers' class. The bytes of a
token's keys and values at 16 bits are written as a product of layers, heads and sizes.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jaxserve.execution.state import memory_kinds
from jaxserve.models import parse_model_config
from jaxserve.start.plan.cache_kinds import cache_kinds
from tests.models.test_published_configs import (
    COMMON,
    FP8,
    FULL,
    LLAMA_3,
    SLIDING,
    alternating,
    shape,
)

Raw = dict[str, Any]


def defaults(kind: str, name: str = "", **fields: Any) -> Raw:
    """Return the fields that Transformers' class `kind` writes, with some changed."""
    config = getattr(transformers, f"{kind}Config")(**fields)
    return config.to_dict() | {"architectures": [f"{name or kind}ForCausalLM"]}


GLM_45 = COMMON | shape(5120, 12288, 92, 96, 8, 151552)
GLM_45 |= {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "head_dim": 128}
GLM_45 |= {"attention_bias": True, "eos_token_id": [151329, 151336, 151338]}
GLM_45 |= {"first_k_dense_replace": 3, "max_position_embeddings": 131072, "pad_token_id": 151329}
GLM_45 |= {"moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160}
GLM_45 |= {"n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8}
GLM_45 |= {"num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}
GLM_45 |= {"rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5}
GLM_45 |= {"topk_group": 1, "use_qk_norm": True, "transformers_version": "4.54.0"}
GLM_45_AIR = GLM_45 | shape(4096, 10944, 46, 96, 8, 151552)
GLM_45_AIR |= {"first_k_dense_replace": 1, "moe_intermediate_size": 1408}
GLM_45_AIR |= {"n_routed_experts": 128, "routed_scaling_factor": 1.0, "use_qk_norm": False}
MINIMAX = COMMON | shape(3072, 1536, 62, 48, 8, 200064)
MINIMAX |= {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2"}
MINIMAX |= {"attn_type_list": [1] * 62, "bos_token_id": None, "eos_token_id": None}
MINIMAX |= {"head_dim": 128, "layernorm_full_attention_beta": 1.0, "layernorm_mlp_beta": 1.0}
MINIMAX |= {"layernorm_linear_attention_beta": 1.0, "max_position_embeddings": 196608}
MINIMAX |= {"mlp_intermediate_size": 8192, "mtp_transformer_layers": 1, "num_mtp_modules": 3}
MINIMAX |= {"num_experts_per_tok": 8, "num_local_experts": 256, "output_router_logits": False}
MINIMAX |= {"qk_norm_type": "per_layer", "rms_norm_eps": 1e-6}
MINIMAX |= {"rope_theta": 5000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001}
MINIMAX |= {"router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0}
MINIMAX |= {"shared_moe_mode": "sigmoid", "sliding_window": None, "use_mtp": True}
MINIMAX |= {"use_qk_norm": True, "use_routing_bias": True}
MINIMAX["quantization_config"] = FP8 | {
    "fmt": "float8_e4m3fn",
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
LAGUNA = COMMON | shape(2048, 8192, 40, 48, 8, 100352)
LAGUNA |= {"architectures": ["LagunaForCausalLM"], "model_type": "laguna", "head_dim": 128}
LAGUNA |= {"attention_bias": False, "gating": "per-head", "sliding_window": 512}
LAGUNA |= {"max_position_embeddings": 262144, "rms_norm_eps": 1e-6}
LAGUNA |= {"layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 10}
LAGUNA |= {"num_attention_heads_per_layer": [48, 64, 64, 64] * 10}
LAGUNA |= {"mlp_layer_types": ["dense"] + ["sparse"] * 39, "mlp_only_layers": [0]}
LAGUNA |= {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
LAGUNA |= {"moe_router_logit_softcapping": 0.0, "moe_routed_scaling_factor": 2.5}
LAGUNA |= {"norm_topk_prob": True, "shared_expert_intermediate_size": 512}
LAGUNA["rope_parameters"] = {
    FULL: {
        "attention_factor": 1.0,
        "beta_fast": 64,
        "beta_slow": 1,
        "factor": 32,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.5,
        "rope_theta": 500000,
        "rope_type": "yarn",
    },
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
SEED_OSS = COMMON | shape(5120, 27648, 64, 80, 8, 155136)
SEED_OSS |= {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "head_dim": 128}
SEED_OSS |= {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}
SEED_OSS |= {"attention_dropout": 0.1, "residual_dropout": 0.1, "rms_norm_eps": 1e-6}
SEED_OSS |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "pretraining_tp": 1}
SEED_OSS |= {"max_position_embeddings": 524288, "rope_scaling": {"rope_type": "default"}}
SEED_OSS |= {"rope_theta": 10000000.0}
ERNIE = COMMON | shape(1024, 3072, 18, 16, 2, 103424) | {"model_type": "ernie4_5"}
ERNIE |= {"architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2}
ERNIE |= {"head_dim": 128, "max_position_embeddings": 131072, "pad_token_id": 0}
ERNIE |= {"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 500000.0}
ERNIE |= {"tie_word_embeddings": True, "use_bias": False, "use_cache": False}
ERNIE_MOE = ERNIE | shape(2560, 12288, 28, 20, 4, 103424) | {"model_type": "ernie4_5_moe"}
ERNIE_MOE |= {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_capacity": [64, 64, 64]}
ERNIE_MOE |= {"moe_gate": "topk", "moe_intermediate_size": 1536, "moe_k": 6}
ERNIE_MOE |= {"moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1}
ERNIE_MOE |= {"moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_use_aux_free": True}
ERNIE_MOE |= {"num_nextn_predict_layers": 1, "router_aux_loss_coef": 0.001}
del ERNIE_MOE["head_dim"]
EXAONE_4 = COMMON | shape(5120, 27392, 64, 40, 8, 102400) | {"model_type": "exaone4"}
EXAONE_4 |= {"architectures": ["Exaone4ForCausalLM"], "head_dim": 128, "rms_norm_eps": 1e-5}
EXAONE_4 |= {"bos_token_id": 1, "eos_token_id": 361, "pad_token_id": 0, "sliding_window": 4096}
EXAONE_4 |= {"layer_types": alternating(4, 64), "max_position_embeddings": 131072}
EXAONE_4 |= {"rope_scaling": LLAMA_3["rope_scaling"] | {"factor": 16.0}, "rope_theta": 1000000}
EXAONE_4 |= {"sliding_window_pattern": "LLLG"}
EXAONE_4_SMALL = EXAONE_4 | shape(2048, 4096, 30, 32, 8, 102400) | {"head_dim": 64}
EXAONE_4_SMALL |= {"layer_types": [FULL] * 30, "max_position_embeddings": 65536}
EXAONE_4_SMALL |= {"sliding_window": None, "sliding_window_pattern": None}
EXAONE_4_SMALL |= {"tie_word_embeddings": True}
HUNYUAN = COMMON | shape(4096, 14336, 32, 32, 8, 128167) | {"model_type": "hunyuan_v1_dense"}
HUNYUAN |= {"architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": False}
HUNYUAN |= {"attention_head_dim": 128, "bos_token_id": 127958, "cla_share_factor": 2}
HUNYUAN |= {"eod_token_id": 127967, "eos_token_id": 127960, "head_dim": 128, "mlp_bias": False}
HUNYUAN |= {"max_position_embeddings": 262144, "norm_type": "hf_rms", "pad_token_id": 127961}
HUNYUAN |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "use_cla": False, "use_qk_norm": True}
HUNYUAN["rope_scaling"] = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "type": "dynamic",
}
DOTS = COMMON | shape(4096, 10944, 62, 32, 32, 152064) | {"model_type": "dots1"}
DOTS |= {"architectures": ["Dots1ForCausalLM"], "attention_bias": False, "head_dim": 128}
DOTS |= {"eos_token_id": 151643, "first_k_dense_replace": 1, "max_position_embeddings": 32768}
DOTS |= {"max_window_layers": 62, "moe_intermediate_size": 1408, "moe_layer_freq": 1}
DOTS |= {"n_group": 1, "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True}
DOTS |= {"num_experts_per_tok": 6, "rms_norm_eps": 1e-5, "rope_scaling": None}
DOTS |= {"rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc"}
DOTS |= {"sliding_window": None, "topk_group": 1}
OLMOE = COMMON | shape(2048, 1024, 16, 16, 16, 50304) | {"model_type": "olmoe"}
OLMOE |= {"architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None}
OLMOE |= {"eos_token_id": 50279, "max_position_embeddings": 4096, "norm_topk_prob": False}
OLMOE |= {"num_experts": 64, "num_experts_per_tok": 8, "output_router_logits": False}
OLMOE |= {"pad_token_id": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0}
OLMOE |= {"router_aux_loss_coef": 0.01}
QWEN_MOE = COMMON | shape(2048, 5632, 24, 16, 16, 151936) | {"model_type": "qwen2_moe"}
QWEN_MOE |= {"architectures": ["Qwen2MoeForCausalLM"], "bos_token_id": 151643}
QWEN_MOE |= {"decoder_sparse_step": 1, "eos_token_id": 151645, "max_position_embeddings": 8192}
QWEN_MOE |= {"max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False}
QWEN_MOE |= {"num_experts": 60, "num_experts_per_tok": 4, "output_router_logits": False}
QWEN_MOE |= {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001}
QWEN_MOE |= {"shared_expert_intermediate_size": 5632, "sliding_window": 32768}
QWEN_MOE |= {"use_sliding_window": False}
GRANITE_MOE = COMMON | shape(1536, 512, 32, 24, 8, 49155) | {"model_type": "granitemoe"}
GRANITE_MOE |= {"architectures": ["GraniteMoeForCausalLM"], "attention_multiplier": 0.015625}
GRANITE_MOE |= {"attention_bias": False, "bos_token_id": 0, "embedding_multiplier": 12.0}
GRANITE_MOE |= {"eos_token_id": 0, "logits_scaling": 6.0, "max_position_embeddings": 131072}
GRANITE_MOE |= {"num_experts_per_tok": 8, "num_local_experts": 40, "pad_token_id": 0}
GRANITE_MOE |= {"output_router_logits": False, "residual_multiplier": 0.22}
GRANITE_MOE |= {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000000}
GRANITE_MOE |= {"router_aux_loss_coef": 0.0, "tie_word_embeddings": True}
GLM_41V_TEXT = COMMON | shape(4096, 13696, 40, 32, 2, 151552) | {"model_type": "glm4v_text"}
GLM_41V_TEXT |= {"attention_bias": True, "eos_token_id": [151329, 151336, 151338, 151348]}
GLM_41V_TEXT |= {"max_position_embeddings": 65536, "pad_token_id": 151329}
GLM_41V_TEXT |= {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
GLM_41V_TEXT |= {"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}
GLM_41V_TEXT |= {"architectures": ["Glm4vForCausalLM"]}
GLM_45V_TEXT = GLM_45_AIR | {"model_type": "glm4v_moe_text", "vocab_size": 151552}
GLM_45V_TEXT |= {"architectures": ["Glm4vMoeForCausalLM"], "max_position_embeddings": 65536}
GLM_45V_TEXT |= {"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}
ARCEE = COMMON | shape(2560, 18432, 36, 20, 4, 128004) | {"model_type": "arcee"}
ARCEE |= {"architectures": ["ArceeForCausalLM"], "attention_bias": False, "head_dim": 128}
ARCEE |= {"bos_token_id": 128000, "eos_token_id": 128003, "hidden_act": "relu2"}
ARCEE |= {"max_position_embeddings": 65536, "mlp_bias": False, "rms_norm_eps": 1e-5}
ARCEE |= {"rope_theta": 10000.0}
ARCEE["rope_scaling"] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 20.0,
    "mscale": 1.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
}
APERTUS = COMMON | shape(4096, 21504, 32, 32, 8, 131072) | {"model_type": "apertus"}
APERTUS |= {"architectures": ["ApertusForCausalLM"], "attention_bias": False, "mlp_bias": False}
APERTUS |= {"bos_token_id": 1, "eos_token_id": 68, "hidden_act": "xielu", "pad_token_id": 3}
APERTUS |= {"max_position_embeddings": 65536, "post_norm": False, "qk_norm": True}
APERTUS |= {"rms_norm_eps": 1e-5, "rope_theta": 12000000}
APERTUS |= {"rope_scaling": LLAMA_3["rope_scaling"]}
NANOCHAT = COMMON | shape(2048, 8192, 32, 16, 16, 65536) | {"model_type": "nanochat"}
NANOCHAT |= {"architectures": ["NanoChatForCausalLM"], "attention_bias": False}
NANOCHAT |= {"bos_token_id": 65527, "eos_token_id": 65531, "final_logit_softcapping": 15.0}
NANOCHAT |= {"hidden_act": "relu2", "max_position_embeddings": 2048, "pad_token_id": 65527}
NANOCHAT |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
MIMO = COMMON | shape(4096, 16384, 48, 64, 4, 152576) | {"model_type": "mimo_v2_flash"}
MIMO |= {"architectures": ["MiMoV2FlashForCausalLM"], "head_dim": 192, "v_head_dim": 128}
MIMO |= {"add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True}
MIMO |= {"attention_bias": False, "attention_chunk_size": 128, "attention_value_scale": 0.707}
MIMO |= {"hybrid_layer_pattern": [0] + [int((i + 1) % 6 > 0) for i in range(1, 48)]}
MIMO |= {"layernorm_epsilon": 1e-5, "max_position_embeddings": 262144}
MIMO |= {"moe_intermediate_size": 2048, "moe_layer_freq": [0] + [1] * 47, "n_group": 1}
MIMO |= {"n_routed_experts": 256, "n_shared_experts": None, "norm_topk_prob": True}
MIMO |= {"num_experts_per_tok": 8, "partial_rotary_factor": 0.334, "rope_theta": 5000000}
MIMO |= {"routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128}
MIMO |= {"sliding_window_size": 128, "swa_head_dim": 192, "swa_num_attention_heads": 64}
MIMO |= {"swa_num_key_value_heads": 8, "swa_rope_theta": 10000, "swa_v_head_dim": 128}
MIMO |= {"topk_group": 1, "topk_method": "noaux_tc"}

# Gemma 4: every sixth layer sees all positions.
GEMMA_ROPES = {
    FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
}
GEMMA_4 = COMMON | {
    "hidden_act": None,
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
}
GEMMA_4 |= {"attention_bias": False, "attention_k_eq_v": True, "final_logit_softcapping": 30.0}
GEMMA_4 |= {"head_dim": 256, "global_head_dim": 512, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA_4 |= {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262144}
GEMMA_4 |= {"num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "rope_parameters": GEMMA_ROPES}
GEMMA_4 |= {"sliding_window": 1024, "tie_word_embeddings": True, "use_double_wide_mlp": False}
GEMMA_4 |= {"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 262144}
GEMMA_26B = GEMMA_4 | shape(2816, 2112, 30, 16, 8, 262144) | {"enable_moe_block": True}
GEMMA_26B |= {"moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8}
GEMMA_26B |= {"layer_types": [*[SLIDING] * 5, FULL] * 5, "num_global_key_value_heads": 2}
GEMMA_31B = GEMMA_4 | shape(5376, 21504, 60, 32, 16, 262144) | {"enable_moe_block": False}
GEMMA_31B |= {"layer_types": [*[SLIDING] * 5, FULL] * 10, "num_global_key_value_heads": 4}
GEMMA_12B = GEMMA_4 | shape(3840, 15360, 48, 16, 8, 262144) | {"model_type": "gemma4_unified_text"}
GEMMA_12B |= {"architectures": ["Gemma4UnifiedForCausalLM"], "num_global_key_value_heads": 1}
GEMMA_12B |= {"layer_types": [*[SLIDING] * 5, FULL] * 8}
GEMMA_E2B = GEMMA_4 | shape(1536, 6144, 35, 8, 1, 262144) | {"hidden_size_per_layer_input": 256}
GEMMA_E2B |= {"attention_k_eq_v": False, "layer_types": [*[SLIDING] * 4, FULL] * 7}
GEMMA_E2B |= {"num_kv_shared_layers": 20, "sliding_window": 512, "use_double_wide_mlp": True}

# By name: fields, and for each kind of pages its window, its layers, the bytes of a token in these
# layers, and the pages into which the tokens of a block are divided. Values of MiMo are as long in
# the cache as keys.
KINDS: dict[str, tuple[Raw, list[tuple[int | None, int, int, int]]]] = {
    "gemma-4-26B-A4B-it": (
        GEMMA_26B,
        [(None, 5, 5 * 2 * 2 * 512 * 2, 1), (1024, 25, 25 * 2 * 8 * 256 * 2, 2)],
    ),
    "gemma-4-31B-it": (
        GEMMA_31B,
        [(None, 10, 10 * 2 * 4 * 512 * 2, 1), (1024, 50, 50 * 2 * 16 * 256 * 2, 2)],
    ),
    "gemma-4-12B-it": (
        GEMMA_12B,
        [(None, 8, 8 * 2 * 1 * 512 * 2, 1), (1024, 40, 40 * 2 * 8 * 256 * 2, 4)],
    ),
    "gemma-4-E2B-it": (  # 15 layers have pages, of which 3 see all positions
        GEMMA_E2B,
        [(None, 3, 3 * 2 * 1 * 512 * 2, 2), (512, 12, 12 * 2 * 1 * 256 * 2, 1)],
    ),
    "MiMo-V2-Flash": (
        MIMO,
        [(None, 9, 9 * 2 * 4 * 192 * 2, 1), (129, 39, 39 * 2 * 8 * 192 * 2, 2)],
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_published_config_has_kinds_of_pages(name: str) -> None:
    raw, wanted = KINDS[name]
    config = parse_model_config(deepcopy(raw), name)
    layout, tokens = config.page_layout, 16 * config.page_layout.most_splits
    (pages, *_) = memory_kinds(config, tokens, np.dtype(jnp.bfloat16), 1)
    kinds = cache_kinds(config, pages.bytes_per_unit, tokens)
    assert [
        (kind.window, kind.layers, kind.token_bytes, layout.splits(number))
        for number, kind in enumerate(kinds)
    ] == wanted


# Name: fields, and bytes of a token's keys and values.
PUBLISHED: dict[str, tuple[Raw, int]] = {
    "GLM-4.5": (GLM_45, 2 * 92 * 8 * 128 * 2),
    "GLM-4.5-Air": (GLM_45_AIR, 2 * 46 * 8 * 128 * 2),
    "GLM-4.7": (GLM_45 | {"max_position_embeddings": 202752}, 2 * 92 * 8 * 128 * 2),
    "Laguna-XS.2": (LAGUNA, 2 * 40 * 8 * 128 * 2),
    "Muse-Glimmer-30B (defaults of the class)": (
        defaults("MuseGlimmerText", "MuseGlimmer", layer_types=[*[SLIDING] * 3, FULL] * 13),
        2 * 52 * 2 * 128 * 2,
    ),
    "MiniMax-M2": (MINIMAX, 2 * 62 * 8 * 128 * 2),
    "MiniMax-M2.5": (MINIMAX | {"max_position_embeddings": 204800}, 2 * 62 * 8 * 128 * 2),
    "Seed-OSS-36B-Instruct": (SEED_OSS, 2 * 64 * 8 * 128 * 2),
    "ERNIE-4.5-0.3B-PT": (ERNIE, 2 * 18 * 2 * 128 * 2),
    "ERNIE-4.5-21B-A3B-PT": (ERNIE_MOE, 2 * 28 * 4 * 128 * 2),
    "EXAONE-4.0-32B": (EXAONE_4, 2 * 64 * 8 * 128 * 2),
    "EXAONE-4.0-1.2B": (EXAONE_4_SMALL, 2 * 30 * 8 * 64 * 2),
    "EXAONE MoE (defaults of the class)": (defaults("ExaoneMoe"), 2 * 32 * 32 * 128 * 2),
    "Hunyuan-7B-Instruct": (HUNYUAN, 2 * 32 * 8 * 128 * 2),
    "Hy3 (defaults of the class)": (defaults("HYV3"), 2 * 80 * 8 * 128 * 2),
    "Solar-Open-100B (defaults of the class)": (defaults("SolarOpen"), 2 * 48 * 8 * 128 * 2),
    "dots.llm1.inst": (DOTS, 2 * 62 * 32 * 128 * 2),
    "OLMoE-1B-7B-0924-Instruct": (OLMOE, 2 * 16 * 16 * 128 * 2),
    "Qwen1.5-MoE-A2.7B-Chat": (QWEN_MOE, 2 * 24 * 16 * 128 * 2),
    "granite-3.1-3b-a800m-instruct": (GRANITE_MOE, 2 * 32 * 8 * 64 * 2),
    "Trinity (defaults of the class)": (defaults("Afmoe"), 2 * 32 * 16 * 128 * 2),
    "Mellum2-12B-A2.5B (defaults of the class)": (
        defaults("Mellum", layer_types=alternating(4, 28)),
        2 * 28 * 4 * 128 * 2,
    ),
    "sarvam-30b (defaults of the class)": (defaults("SarvamMoE"), 2 * 19 * 4 * 64 * 2),
    "GLM-4.1V-9B-Thinking (text)": (GLM_41V_TEXT, 2 * 40 * 2 * 128 * 2),
    "GLM-4.5V (text)": (GLM_45V_TEXT, 2 * 46 * 8 * 128 * 2),
    "AFM-4.5B": (ARCEE, 2 * 36 * 4 * 128 * 2),
    "Apertus-8B-Instruct-2509": (APERTUS, 2 * 32 * 8 * 128 * 2),
    "nanochat-d32": (NANOCHAT, 2 * 32 * 16 * 128 * 2),
    "MiMo-V2-Flash": (MIMO, (9 * 4 + 39 * 8) * (192 + 128) * 2),
    "FlexOlmo-7x7B (defaults of the class)": (defaults("FlexOlmo"), 2 * 32 * 32 * 128 * 2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_and_its_pages_are_counted(name: str) -> None:
    raw, page_bytes = PUBLISHED[name]
    config = parse_model_config(deepcopy(raw), name)
    assert config.num_hidden_layers == raw["num_hidden_layers"]
    assert config.vocab_size == raw["vocab_size"]
    layers = map(config.for_layer, range(config.num_hidden_layers))
    heads = sum(layer.num_key_value_heads for layer in layers)
    assert heads * (config.head_dim + (config.value_dim or config.head_dim)) * 2 == page_bytes
