"""GGUF files of tiny models, written by gguf's own writer as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxserve.models import ModelConfig, checkpoint_weights
from jaxserve.models.weight_table import dimensions

Type = gguf.GGMLQuantizationType
BASE: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "tie_word_embeddings": True,
}
LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [1.0, 2.0, 4.0, 6.0, 8.0, 9.0],
}
# By the architecture's name in the file: fields of config.json besides those above.
CASES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama_biases": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 8,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.5},
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": 20,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 32,
        "rope_scaling": LONG,
    },
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **GEMMA, **CAPS},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], **GEMMA},
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


def raw_config(case: str) -> dict[str, Any]:
    return BASE | CASES[case]


def random_tensors(raw: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors under the names and shapes of a Hugging Face checkpoint."""
    config, generator = ModelConfig.from_dict(raw), np.random.default_rng(seed)
    return {
        weight.name: generator.normal(size=weight.shape(dimensions(config))).astype(np.float32)
        for weight in checkpoint_weights(config)
    }


def write_gguf(
    path: Path,
    case: str,
    tensors: Mapping[str, np.ndarray],
    kind: Type = Type.F32,
    metadata: Mapping[str, Any] | None = None,
    raw: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint; matrices in `kind`, the rest in float32."""
    raw, family = raw or raw_config(case), case.partition("_")[0]
    writer = gguf.GGUFWriter(path, family)
    _add_metadata(writer, raw)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], raw["num_hidden_layers"])
    if family == "phi3":
        writer.add_tensor("rope_factors_long.weight", np.float32(LONG["long_factor"]))
        writer.add_tensor("rope_factors_short.weight", np.float32(LONG["short_factor"]))
    for name, tensor in tensors.items():
        other = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert other is not None, name
        values = as_llama_cpp(family, raw, name, tensor)
        if values.ndim > 1 and kind != Type.F32:
            writer.add_tensor(other, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(other, values)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_llama_cpp(family: str, raw: Mapping[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    """A tensor as llama.cpp's converter changes it."""
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    if family == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
    return tensor


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        add.get(type(value), writer.add_string)(key, value)


def _add_metadata(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    writer.add_name("tiny")
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_vocab_size(raw["vocab_size"])
    size = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    writer.add_rope_dimension_count(int(size * raw.get("partial_rotary_factor", 1.0)))
    if "head_dim" in raw:
        writer.add_key_length(size)
        writer.add_value_length(size)
    if "sliding_window" in raw:
        writer.add_sliding_window(raw["sliding_window"])
    if "attn_logit_softcapping" in raw:
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    scaling = raw.get("rope_scaling", {})
    if "rope_type" in scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
    original = raw.get("original_max_position_embeddings") or scaling.get(
        "original_max_position_embeddings"
    )
    if original:
        writer.add_rope_scaling_orig_ctx_len(original)
