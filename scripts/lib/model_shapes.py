"""Shapes of the random Llamas that benchmarks run."""

from __future__ import annotations

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
SHAPES = {
    # For tests of the comparison itself.
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    # 14M parameters, two thirds of them in the vocabulary.
    "small": {
        "vocab_size": 32000,
        "hidden_size": 288,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    # 137M parameters in 14 layers of the width of GPT-2 small.
    "wide": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 14,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    # SmolLM-135M: 30 narrow layers, and 1.6 times the KV cache a token.
    "deep": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}


def shape_of(model: str) -> str:
    return model.removesuffix(BFLOAT16)


def dtype_of(model: str) -> str:
    """Return the dtype of weights, activations and KV cache. The checkpoint holds float32."""
    return "bfloat16" if model.endswith(BFLOAT16) else "float32"
