"""GGUF files of families that differ from others by switches, as llama.cpp's converter writes them.

The metadata, names and changes of tensors are those of the classes in llama.cpp's `conversion/`
(build 11434, MIT license).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np

FULL, SLIDING = "full_attention", "sliding_attention"
SCORED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
}
WINDOWS = {"head_dim": 32, "sliding_window": 16, "layer_types": [SLIDING, FULL]}
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 16,
    "layer_types": [SLIDING, FULL],
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "rope_theta": None,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
# By a family's name and its variant: fields of config.json besides those of `gguf_files.BASE`.
TRAIT_CASES: dict[str, dict[str, Any]] = {
    "glm4moe": {
        **SCORED,
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
    },
    "glm4moe_plain": {
        **SCORED,
        "architectures": ["Glm4MoeForCausalLM"],
        "partial_rotary_factor": 1.0,
        "head_dim": 16,
        "use_qk_norm": False,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
    "minimax": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 32,
        "rotary_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "seedoss": {
        "architectures": ["SeedOssForCausalLM"],
        "head_dim": 32,
        "attention_bias": True,
        "attention_out_bias": False,
    },
    "arcee": {"architectures": ["ArceeForCausalLM"], "head_dim": 32},
    "ernie": {"architectures": ["Ernie4_5ForCausalLM"], "head_dim": 32, "use_bias": True},
    "erniemoe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_num_shared_experts": 2,
    },
    "exaone4": {**WINDOWS, "architectures": ["Exaone4ForCausalLM"]},
    "exaone4_plain": {"architectures": ["Exaone4ForCausalLM"], "sliding_window": None},
    "exaonemoe": {
        **SCORED,
        **WINDOWS,
        "architectures": ["ExaoneMoeForCausalLM"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "hunyuan": {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "dots1": {
        **SCORED,
        "architectures": ["Dots1ForCausalLM"],
        "head_dim": 32,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "sliding_window": None,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    },
    "qwen2moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
    },
    "granitemoe": {
        "architectures": ["GraniteMoeForCausalLM"],
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "afmoe": {
        **SCORED,
        **WINDOWS,
        "architectures": ["AfmoeForCausalLM"],
        "first_k_dense_replace": 1,
        "mup_enabled": True,
        "n_group": 1,
    },
    "apertus": {"architectures": ["ApertusForCausalLM"]},
    "mimo2": {
        **SCORED,
        "architectures": ["MiMoV2FlashForCausalLM"],
        "head_dim": 64,
        "v_head_dim": 32,
        "partial_rotary_factor": 0.5,
        "sliding_window": 16,
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "swa_num_key_value_heads": 4,
        "swa_rope_theta": 1e4,
        "attention_value_scale": 0.75,
        "n_shared_experts": None,
        "routed_scaling_factor": None,
    },
    "gemma4": GEMMA4,
    "gemma4_experts": {
        **GEMMA4,
        "enable_moe_block": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gemma4_inputs": {
        **GEMMA4,
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32,
    },
}
TRAIT_ARCHITECTURES = {
    "glm4moe": gguf.MODEL_ARCH.GLM4_MOE,
    "mistral4": gguf.MODEL_ARCH.MISTRAL4,
    "minimax": gguf.MODEL_ARCH.MINIMAXM2,
    "seedoss": gguf.MODEL_ARCH.SEED_OSS,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "ernie": gguf.MODEL_ARCH.ERNIE4_5,
    "erniemoe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "exaonemoe": gguf.MODEL_ARCH.EXAONE_MOE,
    "hunyuan": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "afmoe": gguf.MODEL_ARCH.AFMOE,
    "apertus": gguf.MODEL_ARCH.APERTUS,
    "mimo2": gguf.MODEL_ARCH.MIMO2,
    "gemma4": gguf.MODEL_ARCH.GEMMA4,
}
# Families whose converters write the keys of DeepSeek-V3's experts.
SCORING = ("glm4moe", "exaonemoe", "dots1", "afmoe", "mimo2")


def add_trait_metadata(writer: gguf.GGUFWriter, raw: Mapping[str, Any], family: str) -> None:
    """Add the keys that only some of these families have."""
    if family in SCORING:
        _add_scored(writer, raw)
    if family == "minimax":
        writer.add_expert_feed_forward_length(raw["intermediate_size"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        replace(writer, "rope.dimension_count", raw["rotary_dim"])
    if family == "erniemoe":
        writer.add_expert_count(raw["moe_num_experts"])
        writer.add_expert_used_count(raw["moe_k"])
        writer.add_interleave_moe_layer_step(raw["moe_layer_interval"])
        writer.add_leading_dense_block_count(raw["moe_layer_start_index"])
        writer.add_expert_shared_count(raw["moe_num_shared_experts"])
        width = raw["intermediate_size"] // raw["num_key_value_heads"]
        writer.add_expert_shared_feed_forward_length(width)
    if family == "exaonemoe":
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if family == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])
    if family == "mimo2":
        _add_mimo(writer, raw)
    if family == "gemma4":
        _add_gemma4(writer, raw)


def replace(writer: gguf.GGUFWriter, key: str, value: int | list[int]) -> None:
    """Add a key of the architecture, instead of its value."""
    key = f"{writer.arch}.{key}"
    writer.kv_data[0].pop(key, None)
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def _add_scored(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(raw["n_group"])
    writer.add_expert_group_used_count(raw["topk_group"])
    if raw["n_shared_experts"] is not None:
        writer.add_expert_shared_count(raw["n_shared_experts"])
        writer.add_expert_weights_scale(raw["routed_scaling_factor"])
        writer.add_expert_weights_norm(raw["norm_topk_prob"])
        dense = raw.get("mlp_layer_types", []).count("dense") or raw.get("first_k_dense_replace", 0)
        writer.add_leading_dense_block_count(dense)


def _add_mimo(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    # A block for further tokens has a window too.
    pattern = [*raw["hybrid_layer_pattern"], 1]
    heads = (raw["num_key_value_heads"], raw["swa_num_key_value_heads"])
    replace(writer, "block_count", len(pattern))
    writer.add_nextn_predict_layers(1)
    replace(writer, "attention.head_count_kv", [heads[slides] for slides in pattern])
    writer.add_sliding_window_pattern(pattern)
    replace(writer, "attention.value_length", raw["v_head_dim"])
    writer.add_rope_freq_base_swa(raw["swa_rope_theta"])
    writer.add_float32(f"{writer.arch}.attention.value_scale", raw["attention_value_scale"])


def _add_gemma4(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    slides = [kind == SLIDING for kind in raw["layer_types"]]
    shared = raw.get("num_kv_shared_layers", 0)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(raw["hidden_size_per_layer_input"])
    for name in ("key", "value"):
        replace(writer, f"attention.{name}_length", raw["global_head_dim"])
        replace(writer, f"attention.{name}_length_swa", raw["head_dim"])
    replace(writer, "rope.dimension_count", raw["global_head_dim"])
    replace(writer, "rope.dimension_count_swa", raw["head_dim"])
    full, local = (raw["rope_parameters"][kind]["rope_theta"] for kind in (FULL, SLIDING))
    writer.add_rope_freq_base(full)
    writer.add_rope_freq_base_swa(local)
    if raw.get("use_double_wide_mlp"):
        width, first = raw["intermediate_size"], len(slides) - shared
        widths = [width * (2 if layer >= first else 1) for layer in range(len(slides))]
        replace(writer, "feed_forward_length", widths)
    if raw["num_global_key_value_heads"] is not None:
        heads = (raw["num_global_key_value_heads"], raw["num_key_value_heads"])
        replace(writer, "attention.head_count_kv", [heads[windowed] for windowed in slides])


def add_trait_tensors(writer: gguf.GGUFWriter, raw: Mapping[str, Any], family: str) -> None:
    """Add the tensors that are no weights, and the weights that are metadata."""
    if family == "gemma4":
        pairs = raw["global_head_dim"] // 2
        rotated = int(pairs * raw["rope_parameters"][FULL]["partial_rotary_factor"])
        writer.add_tensor(
            "rope_freqs.weight", np.float32([1] * rotated + [1e30] * (pairs - rotated))
        )


def trait_parts(
    family: str, name: str, tensor: np.ndarray
) -> Iterator[tuple[str, np.ndarray]] | None:
    """Return tensors that the converter makes of one, or None for the usual rules."""
    if family == "granitemoe" and name.endswith("input_linear.weight"):
        base, (gate, up) = name.removesuffix("input_linear.weight"), np.split(tensor, 2, axis=1)
        base = base.replace("block_sparse_moe", "mlp.experts")
        return iter([(f"{base}gate_proj.weight", gate), (f"{base}up_proj.weight", up)])
    stacked = ".experts." in name and name.endswith("_proj")
    if family != "gptoss" and (stacked or name.endswith((".layer_scalar", ".attention_sink_bias"))):
        return iter([(f"{name}.weight", tensor)])
    return None


def trait_name(family: str, name: str) -> str | None:
    """Return the file's name of a tensor that gguf's table of names does not have."""
    if family != "gemma4":
        return None
    base = name.replace("model.layers.", "blk.").partition(".router.")[0]
    return {
        "scale": f"{base}.ffn_gate_inp.scale",
        "per_expert_scale": f"{base}.ffn_down_exps.scale",
    }.get(name.partition(".router.")[2])


def add_curves(writer: gguf.GGUFWriter, tensors: Mapping[str, np.ndarray], layers: int) -> None:
    """Add the numbers of Apertus' activation in each layer."""
    for name, add in (("alpha_p", writer.add_xielu_alpha_p), ("alpha_n", writer.add_xielu_alpha_n)):
        names = [f"model.layers.{layer}.mlp.act_fn.{name}" for layer in range(layers)]
        add([float(tensors[name][0]) for name in names])
    writer.add_xielu_beta([0.5] * layers)
    writer.add_xielu_eps([-1e-6] * layers)
