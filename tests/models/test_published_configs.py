"""The config.json of each family's best-known checkpoints is read.

Fields and values equal the files on the Hugging Face hub, taken from copies in public
repositories where one was found and from memory otherwise. Lists of one number a rotated pair are
of the published length, not of the published numbers. A variant is written as its changes.
"""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import ml_dtypes  # noqa: F401, NumPy's bfloat16
import numpy as np
import pytest

from jaxserve.execution.state import memory_kinds
from jaxserve.models import parse_model_config
from jaxserve.models.config.rope import LongRopeScaling, YarnScaling
from jaxserve.models.shards import ONE_DEVICE, Split
from tests.models.test_quantization_config import BNB, W4A16, W8A8

Raw = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
COMMON: Raw = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02}
COMMON |= {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True}


def remote(family: str, name: str) -> Raw:
    """Return `auto_map` of a checkpoint that brings its own code."""
    code = f"modeling_{family}.{name}"
    classes = {
        "AutoConfig": f"configuration_{family}.{name}Config",
        "AutoModel": f"{code}Model",
        "AutoModelForCausalLM": f"{code}ForCausalLM",
    }
    return {"auto_map": classes}


def alternating(period: int, layers: int) -> list[str]:
    return [SLIDING if (index + 1) % period else FULL for index in range(layers)]


def shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int) -> Raw:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


LLAMA_2 = COMMON | shape(4096, 11008, 32, 32, 32, 32000)
LLAMA_2 |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
LLAMA_2 |= {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096}
LLAMA_2 |= {"pretraining_tp": 1, "rope_scaling": None, "transformers_version": "4.31.0.dev0"}
LLAMA_3 = LLAMA_2 | shape(4096, 14336, 32, 32, 8, 128256)
LLAMA_3 |= {"attention_bias": False, "mlp_bias": False, "rope_theta": 500000.0}
LLAMA_3 |= {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}
LLAMA_3 |= {"max_position_embeddings": 131072, "transformers_version": "4.42.3"}
LLAMA_3["rope_scaling"] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
MISTRAL = COMMON | shape(4096, 14336, 32, 32, 8, 32000)
MISTRAL |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
MISTRAL |= {"bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
MISTRAL |= {"max_position_embeddings": 32768, "sliding_window": 4096}
MINISTRAL_3_ROPE = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
    "type": "yarn",
}
MINISTRAL_3 = COMMON | shape(4096, 14336, 34, 32, 8, 131072)
MINISTRAL_3 |= {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
MINISTRAL_3 |= {"head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5}
MINISTRAL_3 |= {"rope_parameters": MINISTRAL_3_ROPE, "sliding_window": None, "pad_token_id": 11}
MIXTRAL = MISTRAL | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
MIXTRAL |= {"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False}
MIXTRAL |= {"router_aux_loss_coef": 0.02, "rope_theta": 1000000.0, "sliding_window": None}
QWEN_2 = COMMON | shape(3584, 18944, 28, 28, 4, 152064)
QWEN_2 |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
QWEN_2 |= {"bos_token_id": 151643, "eos_token_id": 151645, "rope_theta": 1000000.0}
QWEN_2 |= {"max_position_embeddings": 32768, "max_window_layers": 28}
QWEN_2 |= {"sliding_window": 131072, "use_sliding_window": False}
QWEN_3 = QWEN_2 | shape(4096, 12288, 36, 32, 8, 151936)
QWEN_3 |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
QWEN_3 |= {"attention_bias": False, "max_position_embeddings": 40960, "max_window_layers": 36}
QWEN_3 |= {"rope_scaling": None, "sliding_window": None}
QWEN_3_MOE = QWEN_3 | shape(2048, 6144, 48, 32, 4, 151936)
QWEN_3_MOE |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
QWEN_3_MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768}
QWEN_3_MOE |= {"norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8}
QWEN_3_MOE |= {"output_router_logits": False, "router_aux_loss_coef": 0.001}
GEMMA_2 = COMMON | shape(2304, 9216, 26, 8, 4, 256000)
GEMMA_2 |= {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 256}
GEMMA_2 |= {"attention_bias": False, "attn_logit_softcapping": 50.0, "rms_norm_eps": 1e-6}
GEMMA_2 |= {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
GEMMA_2 |= {"cache_implementation": "hybrid", "final_logit_softcapping": 30.0}
GEMMA_2 |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
GEMMA_2 |= {"max_position_embeddings": 8192, "query_pre_attn_scalar": 256}
GEMMA_2 |= {"rope_theta": 10000.0, "sliding_window": 4096}
del GEMMA_2["tie_word_embeddings"]
GEMMA_3 = COMMON | shape(1152, 6912, 26, 4, 1, 262144)
GEMMA_3 |= {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 256}
GEMMA_3 |= {"attention_bias": False, "attn_logit_softcapping": None, "rms_norm_eps": 1e-6}
GEMMA_3 |= {"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0}
GEMMA_3 |= {"cache_implementation": "hybrid", "final_logit_softcapping": None}
GEMMA_3 |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
GEMMA_3 |= {"max_position_embeddings": 32768, "rope_local_base_freq": 10000, "rope_scaling": None}
GEMMA_3 |= {"rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6}
del GEMMA_3["tie_word_embeddings"], GEMMA_3["hidden_act"]
PHI_3 = COMMON | shape(3072, 8192, 32, 32, 32, 32064) | remote("phi3", "Phi3")
PHI_3 |= {"_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"]}
PHI_3 |= {"attention_bias": False, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000}
PHI_3 |= {"max_position_embeddings": 4096, "model_type": "phi3", "pad_token_id": 32000}
PHI_3 |= {"original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5}
PHI_3 |= {"rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047}
PHI_3_LONG = PHI_3 | {"max_position_embeddings": 131072, "sliding_window": 262144}
PHI_3_LONG["rope_scaling"] = {
    "long_factor": [1.08] * 48,
    "short_factor": [1.0] * 48,
    "type": "longrope",
}
OLMO_2 = COMMON | shape(4096, 11008, 32, 32, 32, 100352)
OLMO_2 |= {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rms_norm_eps": 1e-6}
OLMO_2 |= {"attention_bias": False, "eos_token_id": 100257, "pad_token_id": 100277}
OLMO_2 |= {"max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 500000}
OLMO_2 |= {"torch_dtype": "float32", "use_cache": False}
OLMO_3 = OLMO_2 | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
OLMO_3 |= shape(5120, 27648, 64, 40, 8, 100278) | {"layer_types": alternating(4, 64)}
OLMO_3 |= {"dtype": "bfloat16", "max_position_embeddings": 65536, "sliding_window": 4096}
OLMO_3["rope_scaling"] = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
del OLMO_3["torch_dtype"]
GRANITE = COMMON | shape(4096, 12800, 40, 32, 8, 49159)
GRANITE |= {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
GRANITE |= {"attention_bias": False, "attention_multiplier": 0.0078125, "mlp_bias": False}
GRANITE |= {"bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0}
GRANITE |= {"logits_scaling": 16.0, "max_position_embeddings": 131072, "pad_token_id": 0}
GRANITE |= {"residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None}
GRANITE |= {"rope_theta": 10000000.0, "tie_word_embeddings": True}
SMOLLM_3 = COMMON | shape(2048, 11008, 36, 16, 4, 128256)
SMOLLM_3 |= {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
SMOLLM_3 |= {"attention_bias": False, "bos_token_id": None, "eos_token_id": 128012}
SMOLLM_3 |= {"layer_types": [FULL] * 36, "max_position_embeddings": 65536, "mlp_bias": False}
SMOLLM_3 |= {"max_window_layers": 28, "no_rope_layer_interval": 4}
SMOLLM_3 |= {"no_rope_layers": [1, 1, 1, 0] * 9, "pad_token_id": 128004, "pretraining_tp": 2}
SMOLLM_3 |= {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000000.0}
SMOLLM_3 |= {"sliding_window": None, "use_sliding_window": False}
del SMOLLM_3["tie_word_embeddings"]
COHERE = COMMON | shape(8192, 22528, 40, 64, 64, 256000)
COHERE |= {"architectures": ["CohereForCausalLM"], "model_type": "cohere", "logit_scale": 0.0625}
COHERE |= {"attention_bias": False, "bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0}
COHERE |= {"layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 8000000.0}
del COHERE["tie_word_embeddings"]
COHERE_2 = COHERE | shape(4096, 14336, 32, 32, 8, 256000)
COHERE_2 |= {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "head_dim": 128}
COHERE_2 |= {"cache_implementation": "hybrid", "layer_switch": 4, "logit_scale": 0.25}
COHERE_2 |= {"max_position_embeddings": 132096, "order_of_interleaved_layers": "local_attn_first"}
COHERE_2 |= {"position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000}
COHERE_2 |= {"rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4}
COHERE_2 |= {"use_embedding_sharing": True, "use_gated_activation": True}
COHERE_2 |= {"use_parallel_block": True, "use_parallel_embedding": True, "use_qk_norm": False}
GPT_OSS = COMMON | shape(2880, 2880, 24, 64, 8, 201088)
GPT_OSS |= {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64}
GPT_OSS |= {"attention_bias": True, "eos_token_id": 200002, "experts_per_token": 4}
GPT_OSS |= {"initial_context_length": 4096, "layer_types": alternating(2, 24)}
GPT_OSS |= {"max_position_embeddings": 131072, "num_experts_per_tok": 4, "num_local_experts": 32}
GPT_OSS |= {"output_router_logits": False, "pad_token_id": 199999, "router_aux_loss_coef": 0.9}
GPT_OSS |= {"rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0}
GPT_OSS["quantization_config"] = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
GPT_OSS["rope_scaling"] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
del GPT_OSS["torch_dtype"]
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK_V2 = COMMON | shape(5120, 12288, 60, 128, 128, 102400)
DEEPSEEK_V2 |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
DEEPSEEK_V2 |= remote("deepseek", "DeepseekV2")
DEEPSEEK_V2 |= {"attention_bias": False, "aux_loss_alpha": 0.001, "seq_aux": True}
DEEPSEEK_V2 |= {"bos_token_id": 100000, "eos_token_id": 100001, "pretraining_tp": 1}
DEEPSEEK_V2 |= {"first_k_dense_replace": 1, "moe_intermediate_size": 1536, "moe_layer_freq": 1}
DEEPSEEK_V2 |= {"kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128}
DEEPSEEK_V2 |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6}
DEEPSEEK_V2 |= {"max_position_embeddings": 163840, "n_group": 8, "topk_group": 3}
DEEPSEEK_V2 |= {"n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6}
DEEPSEEK_V2 |= {"norm_topk_prob": False, "routed_scaling_factor": 16.0, "scoring_func": "softmax"}
DEEPSEEK_V2 |= {"topk_method": "group_limited_greedy", "rope_theta": 10000}
DEEPSEEK_V2 |= {"rope_scaling": DEEPSEEK_YARN}
DEEPSEEK_V2_LITE = DEEPSEEK_V2 | shape(2048, 10944, 27, 16, 16, 102400)
DEEPSEEK_V2_LITE |= {"moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64}
DEEPSEEK_V2_LITE |= {"q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1}
DEEPSEEK_V2_LITE |= {"topk_method": "greedy"}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
FP8 |= {"weight_block_size": [128, 128]}
DEEPSEEK_V3 = DEEPSEEK_V2 | shape(7168, 18432, 61, 128, 128, 129280)
DEEPSEEK_V3 |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
DEEPSEEK_V3 |= remote("deepseek", "DeepseekV3")
DEEPSEEK_V3 |= {"bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3}
DEEPSEEK_V3 |= {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1}
DEEPSEEK_V3 |= {"norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1}
DEEPSEEK_V3 |= {"quantization_config": FP8, "routed_scaling_factor": 2.5, "topk_group": 4}
DEEPSEEK_V3 |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
DEEPSEEK_V3 |= {"rope_scaling": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
KIMI_K2 = DEEPSEEK_V3 | {"model_type": "kimi_k2", "num_attention_heads": 64}
KIMI_K2 |= {"num_key_value_heads": 64, "n_routed_experts": 384, "vocab_size": 163840}
KIMI_K2 |= {
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
}
KIMI_K2 |= {"max_position_embeddings": 131072, "rope_theta": 50000.0}
KIMI_K2["rope_scaling"] = DEEPSEEK_YARN | {"factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}
# The defaults of the classes of Transformers.
GLM_FLASH = COMMON | shape(2048, 10240, 47, 20, 20, 154880)
GLM_FLASH |= {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
GLM_FLASH |= {"attention_bias": False, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5}
GLM_FLASH |= {"moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1}
GLM_FLASH |= {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
GLM_FLASH |= {"routed_scaling_factor": 1.8, "q_lora_rank": 768, "kv_lora_rank": 512}
GLM_FLASH |= {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
GLM_FLASH |= {"mlp_layer_types": ["dense", *["sparse"] * 46], "rope_interleave": True}
GLM_FLASH |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
GLM_FLASH |= {"num_nextn_predict_layers": 1, "bos_token_id": 0, "eos_token_id": 1}
SARVAM_105B = COMMON | shape(4096, 16384, 32, 64, 64, 262144)
SARVAM_105B |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "sarvam_mla"}
SARVAM_105B |= {"attention_bias": False, "first_k_dense_replace": 1, "head_dim": 64}
SARVAM_105B |= {"kv_lora_rank": 512, "q_lora_rank": None, "max_position_embeddings": 4096}
SARVAM_105B |= {"moe_intermediate_size": 2048, "n_routed_experts": 128, "n_shared_experts": 1}
SARVAM_105B |= {"norm_topk_prob": True, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
SARVAM_105B |= {"num_nextn_predict_layers": 0, "output_router_logits": False, "qk_head_dim": 192}
SARVAM_105B |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SARVAM_105B |= {"rms_norm_eps": 1e-6, "rope_interleave": True, "routed_scaling_factor": 2.5}
SARVAM_105B |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
# The names of fields that Transformers translates, with the size of a cell as head_dim.
SARVAM_OLDER = SARVAM_105B | {"architectures": ["SarvamMLAForCausalLM"], "head_dim": 576}
SARVAM_OLDER |= {"num_experts": 128, "num_shared_experts": 1, "q_head_dim": 192}
SARVAM_OLDER |= {"max_position_embeddings": 131072, "rope_theta": 10000.0}
SARVAM_OLDER |= {"rope_scaling": DEEPSEEK_YARN | {"type": "deepseek_yarn"}}
for name in """
    rope_parameters n_routed_experts n_shared_experts qk_head_dim q_lora_rank n_group topk_group
    num_nextn_predict_layers rope_interleave
    """.split():
    del SARVAM_OLDER[name]
MISTRAL_SMALL_4 = COMMON | shape(4096, 12288, 36, 32, 32, 131072)
MISTRAL_SMALL_4 |= {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"}
MISTRAL_SMALL_4 |= {"attention_bias": False, "first_k_dense_replace": 0, "head_dim": 128}
MISTRAL_SMALL_4 |= {"moe_intermediate_size": 2048, "n_routed_experts": 128, "n_shared_experts": 1}
MISTRAL_SMALL_4 |= {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 1024}
MISTRAL_SMALL_4 |= {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "kv_lora_rank": 256}
MISTRAL_SMALL_4 |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
MISTRAL_SMALL_4 |= {"qk_head_dim": 128, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6}
MISTRAL_SMALL_4 |= {"bos_token_id": 1, "eos_token_id": 2, "rope_interleave": True}
MISTRAL_SMALL_4["rope_parameters"] = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "max_position_embeddings": 1048576,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 0.5,
}

LLAMA_32_ROPE = LLAMA_3["rope_scaling"] | {"factor": 32.0}
PHI_4_MINI = shape(3072, 8192, 32, 24, 8, 200064) | {
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
}
DEVSTRAL_2 = shape(12288, 28672, 88, 96, 8, 131072) | {
    "quantization_config": {
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": None,
    },
    "rope_parameters": MINISTRAL_3_ROPE
    | {
        "beta_fast": 4.0,
        "factor": 64.0,
        "llama_4_scaling_beta": 0.0,
        "mscale_all_dim": 0.0,
        "original_max_position_embeddings": 4096,
    },
}
GPTQ = {
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "damp_percent": 0.1,
    "dataset": "c4",
    "desc_act": True,
    "disable_exllama": False,
    "group_size": 128,
    "max_input_length": None,
    "model_seqlen": 4096,
    "module_name_preceding_first_block": ["model.embed_tokens"],
    "pad_token_id": None,
    "quant_method": "gptq",
    "sym": True,
    "tokenizer": None,
    "true_sequential": True,
    "use_cuda_fp16": False,
}

# Each with the positions that it is served for.
PUBLISHED: dict[str, tuple[Raw, int]] = {
    "Meta-Llama-3.1-8B-Instruct-quantized.w8a8": (LLAMA_3 | {"quantization_config": W8A8}, 131072),
    "Meta-Llama-3.1-8B-Instruct-quantized.w4a16": (
        LLAMA_3 | {"quantization_config": W4A16},
        131072,
    ),
    "Meta-Llama-3.1-8B-Instruct-bnb-4bit": (LLAMA_3 | {"quantization_config": BNB}, 131072),
    "Llama-2-7b": (LLAMA_2 | {"torch_dtype": "float16"}, 4096),
    "Llama-3.1-8B-Instruct": (LLAMA_3, 131072),
    "Llama-3.2-1B-Instruct": (
        LLAMA_3
        | shape(2048, 8192, 16, 32, 8, 128256)
        | {"head_dim": 64, "rope_scaling": LLAMA_32_ROPE, "tie_word_embeddings": True},
        131072,
    ),
    "DeepSeek-R1-Distill-Llama-8B": (LLAMA_3 | {"eos_token_id": 128001}, 131072),
    "Mistral-7B-v0.1": (MISTRAL, 32768),
    "Mistral-7B-OpenOrca-GPTQ": (MISTRAL | {"quantization_config": GPTQ}, 32768),
    "Mistral-7B-Instruct-v0.3": (
        MISTRAL | {"rope_theta": 1e6, "sliding_window": None, "vocab_size": 32768},
        32768,
    ),
    "Mistral-Nemo-Instruct-2407": (
        MISTRAL
        | shape(5120, 14336, 40, 32, 8, 131072)
        | {"head_dim": 128, "max_position_embeddings": 1024000, "rope_theta": 1e6}
        | {"sliding_window": None},
        1024000,
    ),
    "Mistral-Small-24B-Instruct-2501": (
        MISTRAL
        | shape(5120, 32768, 40, 32, 8, 131072)
        | {"head_dim": 128, "rope_theta": 100000000.0, "sliding_window": None},
        32768,
    ),
    "Ministral-3-8B (text)": (MINISTRAL_3, 262144),
    "Devstral-2-123B-Instruct-2512": (MINISTRAL_3 | DEVSTRAL_2, 262144),
    "Mixtral-8x7B-Instruct-v0.1": (MIXTRAL, 32768),
    "Mixtral-8x22B-Instruct-v0.1": (
        MIXTRAL
        | shape(6144, 16384, 56, 48, 8, 32768)
        | {"max_position_embeddings": 65536, "router_jitter_noise": 0.0},
        65536,
    ),
    "Qwen2-7B": (QWEN_2 | {"max_position_embeddings": 131072}, 131072),
    "Qwen2.5-7B-Instruct": (QWEN_2, 32768),
    "DeepSeek-R1-Distill-Qwen-7B": (
        QWEN_2 | {"max_position_embeddings": 131072, "sliding_window": 4096, "use_mrope": False},
        131072,
    ),
    "Qwen3-8B": (QWEN_3, 40960),
    "Qwen3-8B-FP8": (QWEN_3 | {"quantization_config": FP8}, 40960),
    "Qwen3-30B-A3B": (QWEN_3_MOE, 40960),
    "Qwen3-235B-A22B": (
        QWEN_3_MOE
        | shape(4096, 12288, 94, 64, 4, 151936)
        | {"max_window_layers": 94, "moe_intermediate_size": 1536},
        40960,
    ),
    "gemma-2-2b-it": (GEMMA_2, 8192),
    "gemma-2-9b-it": (
        GEMMA_2 | shape(3584, 14336, 42, 16, 8, 256000) | {"sliding_window_size": 4096},
        8192,
    ),
    "gemma-2-27b-it": (
        GEMMA_2
        | shape(4608, 36864, 46, 32, 16, 256000)
        | {"head_dim": 128, "query_pre_attn_scalar": 144, "sliding_window_size": 4096},
        8192,
    ),
    "gemma-3-270m": (
        GEMMA_3
        | shape(640, 2048, 18, 4, 1, 262144)
        | {"_sliding_window_pattern": 6, "layer_types": alternating(6, 18)}
        | {"use_bidirectional_attention": False},
        32768,
    ),
    "gemma-3-1b-it": (GEMMA_3, 32768),
    "gemma-3-4b-it (text)": (
        GEMMA_3
        | shape(2560, 10240, 34, 8, 4, 262208)
        | {"max_position_embeddings": 131072, "sliding_window": 1024}
        | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        131072,
    ),
    "Phi-3-mini-4k-instruct": (PHI_3, 4096),
    "Phi-3-mini-128k-instruct": (PHI_3_LONG, 131072),
    "Phi-3.5-mini-instruct": (PHI_3_LONG | {"_name_or_path": "Phi-3.5-mini-instruct"}, 131072),
    "phi-4": (
        {key: value for key, value in PHI_3.items() if key != "auto_map"}
        | shape(5120, 17920, 40, 40, 10, 100352)
        | {"bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349}
        | {"max_position_embeddings": 16384, "original_max_position_embeddings": 16384}
        | {"rope_theta": 250000.0, "sliding_window": None},
        16384,
    ),
    "Phi-4-mini-instruct": (PHI_3_LONG | PHI_4_MINI, 131072),
    "OLMo-2-1124-7B": (OLMO_2, 4096),
    "Olmo-3.1-32B-Instruct": (OLMO_3, 65536),
    "granite-3.3-8b-instruct": (GRANITE, 131072),
    "SmolLM3-3B": (SMOLLM_3, 65536),
    # Trained on `model_max_length` tokens, as vLLM and llama.cpp read the field.
    "c4ai-command-r-v01": (COHERE | {"model_max_length": 131072, "pretraining_tp": 1}, 131072),
    "c4ai-command-r-08-2024": (
        COHERE
        | shape(8192, 24576, 40, 64, 8, 256000)
        | {"max_position_embeddings": 131072, "rope_theta": 4000000.0, "use_qk_norm": False},
        131072,
    ),
    "c4ai-command-r-plus": (
        COHERE
        | shape(12288, 33792, 64, 96, 8, 256000)
        | {"logit_scale": 0.8333333333333334, "model_max_length": 131072}
        | {"rope_theta": 75000000.0, "use_qk_norm": True},
        131072,
    ),
    "aya-23-8B": (
        COHERE | shape(4096, 14336, 32, 32, 8, 256000) | {"rope_theta": 10000},
        8192,
    ),
    "aya-expanse-8b": (
        COHERE
        | shape(4096, 14336, 32, 32, 8, 256000)
        | {"logit_scale": 0.125, "rope_theta": 10000, "use_qk_norm": False},
        8192,
    ),
    "c4ai-command-r7b-12-2024": (COHERE_2, 132096),
    "c4ai-command-a-03-2025": (
        COHERE_2
        | shape(12288, 36864, 64, 96, 8, 256000)
        | {"_sliding_window_pattern": 4, "layer_types": alternating(4, 64)}
        | {"max_position_embeddings": 131072},
        131072,
    ),
    "gpt-oss-20b": (GPT_OSS, 131072),
    "gpt-oss-120b": (
        GPT_OSS
        | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": alternating(2, 36)},
        131072,
    ),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 163840),
    "DeepSeek-V2": (DEEPSEEK_V2, 163840),
    "DeepSeek-V3": (DEEPSEEK_V3, 163840),
    "DeepSeek-R1": (DEEPSEEK_V3 | {"transformers_version": "4.46.3"}, 163840),
    "DeepSeek-V3.1": (
        DEEPSEEK_V3 | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}},
        163840,
    ),
    "Kimi-K2-Instruct": (
        KIMI_K2,
        131072,
    ),
    "GLM-4.7-Flash": (GLM_FLASH, 202752),
    "Mistral-Small-4": (MISTRAL_SMALL_4, 1048576),
    "sarvam-105b (defaults of the class)": (SARVAM_105B, 4096),
    "sarvam-105b (older names of fields)": (SARVAM_OLDER, 163840),
}
# Bytes of a token in the cache in 16 bits: layers * (rank + rotated part) * 2.
LATENTS = {
    "DeepSeek-V2-Lite": 27 * (512 + 64) * 2,
    "DeepSeek-V3": 70_272,
    "Kimi-K2-Instruct": 70_272,
    "GLM-4.7-Flash": 54_144,
    "Mistral-Small-4": 36 * (256 + 64) * 2,
    "sarvam-105b (defaults of the class)": 32 * (512 + 64) * 2,
    "sarvam-105b (older names of fields)": 32 * (512 + 64) * 2,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name):
    raw, positions = deepcopy(PUBLISHED[name])
    config = parse_model_config(raw, name)
    assert config.context_length == positions
    assert config.vocab_size == raw["vocab_size"]
    assert config.num_hidden_layers == len(config.layers.windows) == raw["num_hidden_layers"]
    quantized = raw.get("quantization_config", {}).get("quant_method")
    methods = ("fp8", "gptq", "compressed-tensors", "bitsandbytes")
    assert (config.quantization is not None) == (quantized in methods)


@pytest.mark.parametrize("name", LATENTS)
def test_a_token_takes_its_latent_and_the_rotated_part_on_every_device(name):
    config = parse_model_config(deepcopy(PUBLISHED[name][0]))
    assert (config.num_attention_heads % 4, config.head_dim) == (0, config.latent.cell)
    for split in (ONE_DEVICE, Split(4)):
        pages = memory_kinds(replace(config, split=split), 16, np.dtype("bfloat16"), 1)[0]
        assert pages.bytes_per_unit == 16 * LATENTS[name]
    half = memory_kinds(replace(config, split=Split(4, context=2)), 16, np.dtype("bfloat16"), 1)[0]
    assert half.bytes_per_unit == 8 * LATENTS[name]


def test_what_the_unusual_ones_say():
    """Fields that only one family has, or that have no effect."""
    devstral = parse_model_config(PUBLISHED["Devstral-2-123B-Instruct-2512"][0])
    scaling = devstral.rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.query_beta, scaling.mscale_all_dim) == (0.0, 0.0)
    assert scaling.attention_factor == pytest.approx(1.0 + 0.1 * 4.158883, rel=1e-6)  # log 64
    mini = parse_model_config(PUBLISHED["Phi-4-mini-instruct"][0])
    assert isinstance(mini.rope.scaling, LongRopeScaling) and mini.rope.dimensions(128) == 96
    gemma = [parse_model_config(PUBLISHED[f"gemma-2-{size}-it"][0]) for size in ("9b", "27b")]
    assert all(config.layers.windows[:2] == (4096, None) for config in gemma)
    plus, small = (
        parse_model_config(PUBLISHED[f"c4ai-command-{name}"][0])
        for name in ("r-plus", "r7b-12-2024")
    )
    assert plus.use_qk_norm and plus.tie_word_embeddings and not small.use_qk_norm
    assert plus.scales.logit_factor == 0.8333333333333334
    assert small.layers.windows[:5] == (4096, 4096, 4096, None, 4096)
    assert small.layers.rotary[:5] == (True, True, True, False, True)
    plain, powers = (
        parse_model_config(PUBLISHED[name][0]) for name in ("DeepSeek-V3", "DeepSeek-V3.1")
    )
    assert plain == powers and plain.extra_layers == 1
