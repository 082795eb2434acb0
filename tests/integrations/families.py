"""Small random models of the families that Tunix has."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.integrations.trees import decoder_tree
from jaxserve.models import parse_model_config

_SIZES = {
    "vocab_size": 511,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,  # Tunix's Llama 3 knows no other
    "eos_token_id": 3,
    "dtype": "float32",
}
_GEMMA = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
}
_FIELDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama3": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
        "llama3_tied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
        "qwen2": {
            "architectures": ["Qwen2ForCausalLM"],
            "tie_word_embeddings": True,
            "head_dim": 8,
        },
        "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
        "qwen3_moe": {
            "architectures": ["Qwen3MoeForCausalLM"],
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
        "gemma2": {
            "architectures": ["Gemma2ForCausalLM"],
            **_GEMMA,
            "rope_theta": 10000.0,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        "gemma3": {
            "architectures": ["Gemma3ForCausalLM"],
            **_GEMMA,
            "num_hidden_layers": 6,  # the last has no window
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
        },
        "gemma3_fused": {
            "architectures": ["Gemma3ForCausalLM"],
            **_GEMMA,
            "num_key_value_heads": 4,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
        },
    }
)
FAMILIES = tuple(_FIELDS)


def fields_of(family: str) -> dict[str, Any]:
    """Return the fields of config.json of a family's model."""
    return {**_SIZES, **_FIELDS[family]}


def arrays_of(family: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random float32 arrays by the names of Hugging Face."""
    tree = decoder_tree(parse_model_config(fields_of(family)))
    generator = np.random.default_rng(seed)
    return {
        part.name: (0.2 * generator.standard_normal(part.shape(tree.dims))).astype(np.float32)
        for part in tree.table
    }
