"""Shapes of the random Llamas that benchmarks run."""

from __future__ import annotations

from typing import Any

# A model's name is that of its shape, with this behind it where engines run it in bfloat16.
BFLOAT16 = "-bf16"

COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def sizes(
    layers: int, width: int, heads: int, kv_heads: int, mlp: int, **others: Any
) -> dict[str, Any]:
    """Return the fields of a config.json that give a model its size, and others as named."""
    return others | {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
    }


SHAPES = {
    # For tests of the comparison itself.
    "tiny": sizes(2, 64, 2, 1, 128, vocab_size=1024),
    # 14M parameters, two thirds of them in the vocabulary.
    "small": sizes(6, 288, 6, 2, 768, vocab_size=32000),
    # 137M parameters in 14 layers of the width of GPT-2 small.
    "wide": sizes(14, 768, 12, 4, 2048),
    # SmolLM-135M: 30 narrow layers, and 1.6 times the KV cache a token.
    "deep": sizes(30, 576, 9, 3, 1536),
}


def shape_of(model: str) -> str:
    return model.removesuffix(BFLOAT16)


def dtype_of(model: str) -> str:
    """Return the dtype of weights, activations and KV cache. The checkpoint holds float32."""
    return "bfloat16" if model.endswith(BFLOAT16) else "float32"
