"""The models that vLLM lists as validated on CPU are read; models of images are read as text.

The list: vLLM's docs/models/hardware_supported_models/cpu.md. Of each config.json the fields that
decide are written down here, from the published file, as in `test_published_configs`.
"""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import UnsupportedModel
from jaxserve.models import parse_model_config
from tests.models.test_published_configs import (
    COMMON,
    FP8,
    GPT_OSS,
    GPTQ,
    GRANITE,
    LLAMA_2,
    LLAMA_3,
    LLAMA_32_ROPE,
    MINISTRAL_3,
    MISTRAL,
    PHI_3,
    QWEN_2,
    QWEN_3,
    QWEN_3_MOE,
    Raw,
    remote,
    shape,
)

AWQ: Raw = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
AWQ |= {"zero_point": True, "modules_to_not_convert": None}
_INT8 = {"actorder": None, "block_structure": None, "group_size": None, "num_bits": 8}
_INT8 |= {"observer_kwargs": {}, "symmetric": True, "type": "int"}
W8A8: Raw = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "input_activations": {
                **_INT8, "dynamic": True, "observer": "memoryless", "strategy": "token",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {**_INT8, "dynamic": False, "observer": "mse", "strategy": "channel"},
        }
    },
    "global_compression_ratio": 1.4,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
}  # fmt: skip
TIED_ROPE = {"rope_scaling": LLAMA_32_ROPE, "tie_word_embeddings": True}
LLAMA_1B = LLAMA_3 | shape(2048, 8192, 16, 32, 8, 128256) | {"head_dim": 64, **TIED_ROPE}
LLAMA_3B = LLAMA_3 | shape(3072, 8192, 28, 24, 8, 128256) | {"head_dim": 128, **TIED_ROPE}
LLAMA_70B = LLAMA_3 | shape(8192, 28672, 80, 64, 8, 128256)
TINY_LLAMA = LLAMA_2 | shape(2048, 5632, 22, 32, 4, 32000) | {"max_position_embeddings": 2048}
QWEN_14B = QWEN_3 | shape(5120, 17408, 40, 40, 8, 151936) | {"max_window_layers": 40}
QWQ = QWEN_2 | shape(5120, 27648, 64, 40, 8, 152064) | {"max_window_layers": 64}
QWQ |= {"max_position_embeddings": 40960, "sliding_window": 32768, "rms_norm_eps": 1e-5}
QWEN_15 = QWEN_2 | shape(1024, 2816, 24, 16, 16, 151936) | {"max_window_layers": 21}
QWEN_15 |= {"sliding_window": 32768, "tie_word_embeddings": True}
GLM = COMMON | shape(4096, 13696, 40, 32, 2, 151552)
GLM |= {"architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True}
GLM |= {"eos_token_id": [151329, 151336, 151338], "head_dim": 128, "pad_token_id": 151329}
GLM |= {"max_position_embeddings": 8192, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0}
GEMMA = COMMON | shape(3072, 24576, 28, 16, 16, 256000)
GEMMA |= {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 256}
GEMMA |= {"attention_bias": False, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
GEMMA |= {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192}
GEMMA |= {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0}
del GEMMA["tie_word_embeddings"]
PHI_4 = {key: value for key, value in PHI_3.items() if key != "auto_map"}
PHI_4 |= shape(5120, 17920, 40, 40, 10, 100352) | {"rope_theta": 500000, "sliding_window": None}
PHI_4 |= {"bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349}
PHI_4 |= {"max_position_embeddings": 32768, "original_max_position_embeddings": 32768}
MISTRAL_2 = MISTRAL | {"rope_theta": 1000000.0, "sliding_window": None}


def quantized(raw: Raw, how: Raw) -> Raw:
    return raw | {"quantization_config": how}


# Text alone, with the positions that each is served for.
TEXT: dict[str, tuple[Raw, int]] = {
    "openai/gpt-oss-20b": (GPT_OSS, 131072),
    "meta-llama/Llama-3.1-8B": (LLAMA_3 | {"eos_token_id": 128001}, 131072),
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA_3, 131072),
    "meta-llama/Llama-3.2-1B": (LLAMA_1B | {"eos_token_id": 128001}, 131072),
    "meta-llama/Llama-3.2-1B-Instruct": (LLAMA_1B, 131072),
    "meta-llama/Llama-3.2-3B-Instruct": (LLAMA_3B, 131072),
    "meta-llama/Llama-3.3-70B-Instruct": (LLAMA_70B, 131072),
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": (quantized(LLAMA_3, AWQ), 131072),
    "AMead10/Llama-3.2-1B-Instruct-AWQ": (quantized(LLAMA_1B, AWQ), 131072),
    "AMead10/Llama-3.2-3B-Instruct-AWQ": (quantized(LLAMA_3B, AWQ), 131072),
    "TheBloke/TinyLlama-1.1B-Chat-v1.0-AWQ": (quantized(TINY_LLAMA, AWQ), 2048),
    "TheBloke/TinyLlama-1.1B-Chat-v1.0-GPTQ": (quantized(TINY_LLAMA, GPTQ), 2048),
    "ibm-granite/granite-3.2-2b-instruct": (
        GRANITE
        | shape(2048, 8192, 40, 32, 8, 49155)
        | {"attention_multiplier": 0.015625, "logits_scaling": 8.0, "rope_theta": 5000000.0},
        131072,
    ),
    "Qwen/Qwen3-1.7B": (QWEN_3 | shape(2048, 6144, 28, 16, 8, 151936), 40960),
    "Qwen/Qwen3-4B": (QWEN_3 | shape(2560, 9728, 36, 32, 8, 151936), 40960),
    "Qwen/Qwen3-8B": (QWEN_3, 40960),
    "Qwen/Qwen3-14B": (QWEN_14B, 40960),
    "Qwen/Qwen3-14B-FP8": (quantized(QWEN_14B, FP8), 40960),
    "Qwen/Qwen3-14B-AWQ": (quantized(QWEN_14B, AWQ), 40960),
    "Qwen/Qwen3-30B-A3B": (QWEN_3_MOE, 40960),
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": (
        quantized(QWEN_3_MOE, FP8) | {"max_position_embeddings": 262144, "rope_theta": 1e7},
        262144,
    ),
    "Qwen/QwQ-32B": (QWQ, 40960),
    "Qwen/QwQ-32B-AWQ": (quantized(QWQ, AWQ), 40960),
    "Qwen/Qwen1.5-0.5B-Chat-GPTQ-Int4": (quantized(QWEN_15, GPTQ), 32768),
    "zai-org/glm-4-9b-hf": (GLM, 8192),
    "google/gemma-7b": (GEMMA, 8192),
    "microsoft/Phi-4-reasoning": (PHI_4, 32768),
    "mistralai/Mistral-7B-Instruct-v0.2": (MISTRAL_2, 32768),
    "TheBloke/Mistral-7B-Instruct-v0.2-AWQ": (quantized(MISTRAL_2, AWQ), 32768),
}
INT8: dict[str, tuple[Raw, int]] = {
    "RedHatAI/Meta-Llama-3.1-8B-quantized.w8a8": (LLAMA_3, 131072),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": (LLAMA_3, 131072),
    "RedHatAI/Llama-3.2-1B-Instruct-quantized.w8a8": (LLAMA_1B, 131072),
    "RedHatAI/Llama-3.2-3B-Instruct-quantized.w8a8": (LLAMA_3B, 131072),
    "RedHatAI/DeepSeek-R1-Distill-Llama-70B-quantized.w8a8": (LLAMA_70B, 131072),
    "RedHatAI/QwQ-32B-quantized.w8a8": (QWQ, 40960),
}

VISION: Raw = {"vision_config": {"hidden_size": 1152, "model_type": "a_tower"}}
GEMMA_3_ROPE = {"factor": 8.0, "rope_type": "linear"}


def gemma_3(hidden: int, mlp: int, layers: int, **more: Any) -> Raw:
    """Return Gemma 3's wrapper, whose text configuration holds only deviations from its class."""
    text = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    text |= {"model_type": "gemma3_text", "rope_scaling": GEMMA_3_ROPE, "sliding_window": 1024}
    return VISION | {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eos_token_id": [1, 106],
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": text | more,
        "torch_dtype": "bfloat16",
    }


VL_IDS: Raw = {"image_token_id": 151655, "video_token_id": 151656}
VL_IDS |= {"vision_start_token_id": 151652, "vision_end_token_id": 151653}
QWEN_25_VL = VISION | VL_IDS | QWEN_2 | {"model_type": "qwen2_5_vl", "vision_token_id": 151654}
QWEN_25_VL |= {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
QWEN_25_VL |= {"max_position_embeddings": 128000, "sliding_window": 32768}
QWEN_25_VL |= {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
_VL_TEXT = {key: value for key, value in QWEN_3_MOE.items() if key != "architectures"}
_VL_TEXT |= {"model_type": "qwen3_vl_moe_text", "max_position_embeddings": 262144}
_VL_TEXT |= {"rope_theta": 5000000, "rope_scaling": {
    "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
}}  # fmt: skip
QWEN_3_VL = VISION | VL_IDS | {"model_type": "qwen3_vl_moe", "text_config": _VL_TEXT}
QWEN_3_VL |= {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}
QWEN_3_VL |= {"tie_word_embeddings": False}

# Of images and text: positions served and layers of the text.
WRAPPERS: dict[str, tuple[Raw, int, int]] = {
    "google/gemma-3-4b-it": (gemma_3(2560, 10240, 34), 131072, 34),
    "google/gemma-3-12b-it": (
        gemma_3(3840, 15360, 48, num_attention_heads=16, num_key_value_heads=8),
        131072,
        48,
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (QWEN_25_VL, 128000, 28),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (QWEN_3_VL, 262144, 48),
}
# Of models that are not on the list, and are downloaded as much.
_SMALL_31 = shape(5120, 32768, 40, 32, 8, 131072) | {"head_dim": 128, "hidden_act": "silu"}
_SMALL_31 |= {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
_SMALL_31 |= {"max_position_embeddings": 131072, "model_type": "mistral", "sliding_window": None}
_SMALL_31 |= {"rms_norm_eps": 1e-5, "rope_theta": 1000000000.0}
_MISTRAL_3 = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
_MISTRAL_3 |= {"image_token_index": 10, "multimodal_projector_bias": False}
_MISTRAL_3 |= {"projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1}
_MINISTRAL = {key: value for key, value in MINISTRAL_3.items() if key != "architectures"}
_VICUNA = {"_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"]}
_VICUNA |= {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-5}
_VICUNA |= {"torch_dtype": "float16", "vocab_size": 32064}
_SMOL = COMMON | shape(576, 1536, 30, 9, 3, 49280) | {"model_type": "llama", "head_dim": 64}
_SMOL |= {"_flash_attn_2_enabled": True, "architectures": ["VLlama3ForCausalLM"]}
_SMOL |= {"is_llama_config": True, "max_position_embeddings": 8192, "neftune_noise_alpha": 0.0}
_SMOL |= {"perceiver_config": {"model_type": "vllama3"}, "pixel_shuffle_factor": 4}
_SMOL |= {"pretraining_tp": 1, "qk_layer_norms": False, "rms_norm_eps": 1e-5}
_SMOL |= {"rope_interleaved": False, "rope_theta": 100000, "use_resampler": False}
_INTERN = QWEN_2 | {"attn_implementation": "flash_attention_2", "num_beams": 1, "top_k": 50}
_INTERN |= {"rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}}
FURTHER: dict[str, tuple[Raw, int, int]] = {
    "google/gemma-3-27b-it": (
        gemma_3(5376, 21504, 62, num_attention_heads=32, num_key_value_heads=16),
        131072,
        62,
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (
        VISION | _MISTRAL_3 | {"text_config": _SMALL_31, "torch_dtype": "bfloat16"},
        131072,
        40,
    ),
    "mistralai/Ministral-3-8B-Instruct-2512": (
        quantized(
            VISION | _MISTRAL_3 | {"text_config": _MINISTRAL, "dtype": "bfloat16"},
            {"activation_scheme": "static", "dequantize": False, "quant_method": "fp8"}
            | {"modules_to_not_convert": ["model.vision_tower", "lm_head"]}
            | {"weight_block_size": None},
        ),
        262144,
        34,
    ),
    "llava-hf/llava-1.5-7b-hf": (
        VISION
        | {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
        | {"ignore_index": -100, "image_token_index": 32000, "tie_word_embeddings": False}
        | {"text_config": _VICUNA, "vision_feature_select_strategy": "default"},
        4096,
        32,
    ),
    "HuggingFaceTB/SmolVLM-256M-Instruct": (
        VISION
        | {"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3"}
        | {"image_token_id": 49190, "scale_factor": 4, "text_config": _SMOL, "vocab_size": 49280}
        | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"},
        8192,
        30,
    ),
    "OpenGVLab/InternVL3-8B": (
        VISION
        | {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat"}
        | {"llm_config": _INTERN, "dynamic_image_size": True, "template": "internvl2_5"}
        | {"auto_map": {"AutoModel": "modeling.X"}, "torch_dtype": "bfloat16"},
        65536,
        28,
    ),
}
KIMI_K2: Raw = COMMON | shape(7168, 18432, 61, 64, 64, 163840) | remote("deepseek", "DeepseekV3")
KIMI_K2 |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
KIMI_K2 |= {"attention_bias": False, "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1}
KIMI_K2 |= {"bos_token_id": 163584, "eos_token_id": 163585, "pretraining_tp": 1}
KIMI_K2 |= {"first_k_dense_replace": 1, "moe_intermediate_size": 2048, "moe_layer_freq": 1}
KIMI_K2 |= {"kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128, "rms_norm_eps": 1e-6}
KIMI_K2 |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "n_group": 1, "topk_group": 1}
KIMI_K2 |= {"max_position_embeddings": 131072, "n_routed_experts": 384, "n_shared_experts": 1}
KIMI_K2 |= {"norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 0}
KIMI_K2 |= {"quantization_config": FP8, "routed_scaling_factor": 2.827, "rope_theta": 50000.0}
KIMI_K2 |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
KIMI_K2["rope_scaling"] = {
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
INTERNLM_3 = LLAMA_2 | shape(4096, 10240, 48, 32, 2, 128512) | {"model_type": "internlm3"}
INTERNLM_3 |= {"architectures": ["InternLM3ForCausalLM"], **remote("internlm3", "InternLM3")}
INTERNLM_3 |= {"bias": False, "qkv_bias": False, "head_dim": 128, "rope_theta": 50000000}
INTERNLM_3 |= {"max_position_embeddings": 32768, "pad_token_id": 2}
INTERNLM_3 |= {"rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}}
IQUEST = LLAMA_2 | shape(5120, 27648, 80, 40, 8, 76800) | {"model_type": "iquestcoder"}
IQUEST |= {"architectures": ["IQuestCoderForCausalLM"], **remote("iquestcoder", "IQuestCoder")}
IQUEST |= {"attention_bias": False, "clip_qkv": None, "head_dim": 128, "mlp_bias": False}
IQUEST |= {"max_position_embeddings": 131072, "max_window_layers": 0, "rope_theta": 500000.0}
IQUEST |= {"sliding_window": None, "use_sliding_window": False}
GLM_0414 = GLM | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}
GLM_0414 |= shape(6144, 23040, 61, 48, 8, 151552) | {"attention_bias": False}
GLM_0414 |= {"max_position_embeddings": 32768, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}
OTHERS: dict[str, tuple[Raw, int]] = {
    "moonshotai/Kimi-K2-Instruct": (KIMI_K2, 131072),
    "internlm/internlm3-8b-instruct": (INTERNLM_3, 196608),
    "IQuestLab/IQuest-Coder-V1-40B-Instruct": (IQUEST, 131072),
    "zai-org/GLM-4-32B-0414": (GLM_0414, 32768),
    "google/gemma-2b": (
        GEMMA | shape(2048, 16384, 18, 8, 1, 256000) | {"hidden_act": "gelu"},
        8192,
    ),
}
REFUSED = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "Llama4ForConditionalGeneration",
    "google/gemma-3n-E4B-it": "Gemma3nForConditionalGeneration",
    "microsoft/Phi-4-multimodal-instruct": "Phi4MMForCausalLM",
    "openai/whisper-large-v3": "WhisperForConditionalGeneration",
}


@pytest.mark.parametrize("name", [*TEXT, *OTHERS])
def test_a_model_of_text_is_read(name: str) -> None:
    raw, positions = (TEXT | OTHERS)[name]
    config = parse_model_config(raw, name)
    assert config.context_length == positions and config.vocab_size == raw["vocab_size"]
    stored = raw.get("quantization_config", {}).get("quant_method", "mxfp4")
    assert (config.quantization is not None) == (stored != "mxfp4")


@pytest.mark.parametrize("name", INT8)
def test_a_model_stored_in_int8_is_read(name: str) -> None:
    raw, positions = INT8[name]
    config = parse_model_config(quantized(raw, W8A8), name)
    assert config.context_length == positions and config.quantization is not None
    assert config.quantization.form == "int8"


def test_the_list_is_whole() -> None:
    assert len(TEXT) + len(INT8) == 35


@pytest.mark.parametrize("name", [*WRAPPERS, *FURTHER])
def test_a_model_of_images_is_read_as_text(name: str) -> None:
    raw, positions, layers = (WRAPPERS | FURTHER)[name]
    config = parse_model_config(raw, name)
    assert (config.context_length, config.num_hidden_layers) == (positions, layers)
    assert config.wrapper == raw["architectures"][0]
    assert config.dtype == ("float16" if "llava" in name else "bfloat16")
    assert (config.quantization is not None) == ("quantization_config" in raw)


def test_what_a_wrapper_leaves_out_is_what_its_class_says() -> None:
    config = parse_model_config(WRAPPERS["google/gemma-3-4b-it"][0])
    assert (config.vocab_size, config.head_dim, config.num_key_value_heads) == (262208, 256, 4)
    assert config.layers.windows[:6] == (1024,) * 5 + (None,)
    assert config.eos_token_ids == (1, 106) and config.tie_word_embeddings


def test_what_a_family_leaves_out_is_its_own_default() -> None:
    glm = parse_model_config(GLM)
    assert (glm.rope.partial, glm.attention_bias, glm.output_bias) == (0.5, True, False)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_a_family_here_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=REFUSED[name]):
        parse_model_config({"architectures": [REFUSED[name]]}, name)
