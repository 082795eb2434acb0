"""Shapes of the random models that benchmarks run."""

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
    # LFM2-350M: 10 layers of short convolutions and 6 of attention.
    "lfm2": sizes(
        16,
        1024,
        16,
        8,
        6656,
        architectures=["Lfm2ForCausalLM"],
        model_type="lfm2",
        vocab_size=65536,
        rms_norm_eps=None,
        norm_eps=1e-5,
        rope_theta=1000000.0,
        conv_L_cache=3,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
        block_auto_adjust_ff_dim=True,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
    ),
}


def shape_of(model: str) -> str:
    return model.removesuffix(BFLOAT16)


def dtype_of(model: str) -> str:
    """Return the dtype of weights, activations and KV cache. The checkpoint holds float32."""
    return "bfloat16" if model.endswith(BFLOAT16) else "float32"
