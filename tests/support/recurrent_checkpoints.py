"""Tiny checkpoints of models with states, written by Transformers, by llama.cpp's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.support.gguf_files import Type

# Inputs of matrices are whole blocks of K-quants.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FULL, LINEAR = "full_attention", "linear_attention"
# A block of a K-quant holds all value heads, which the file has in another order.
DELTA = {
    "rms_norm_eps": 1e-5,
    "head_dim": 64,
    "layer_types": [LINEAR, FULL, LINEAR],
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.25,
    },
}
SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
MAMBA = {
    "layer_norm_epsilon": 1e-5,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
}
HYBRID = {
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
# Name of Transformers' class, and fields besides the sizes above.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2",
        {
            "norm_eps": 1e-5,
            "layer_types": ["conv", FULL, "conv"],
            "block_multiple_of": 256,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2moe": (
        "Lfm2Moe",
        {
            "norm_eps": 1e-5,
            "layer_types": ["conv", FULL, "conv"],
            "conv_L_cache": 3,
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3next": ("Qwen3Next", DELTA | SHARED_EXPERT),
    "qwen35": ("Qwen3_5", DELTA),
    "qwen35moe": ("Qwen3_5Moe", DELTA | SHARED_EXPERT),
    "nemotron_h": (
        "NemotronH",
        MAMBA | {"layers_block_type": [LINEAR, "mlp", FULL, LINEAR]},
    ),
    "nemotron_h_moe": (
        "NemotronH",
        MAMBA
        | {
            "layers_block_type": [LINEAR, "moe", FULL, "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "moe_shared_expert_intermediate_size": 256,
            "moe_latent_size": 256,
            "routed_scaling_factor": 1.5,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "granitehybrid": (
        "GraniteMoeHybrid",
        HYBRID
        | {
            "layer_types": ["mamba", "attention", "mamba"],
            "attention_multiplier": 0.07,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 256,
            "position_embedding_type": "nope",
        },
    ),
    # Products of these factors are exact, so that blocks hold them.
    "falcon-h1": (
        "FalconH1",
        HYBRID
        | {
            "mamba_d_ssm": 512,
            "head_dim": 64,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_in_multiplier": 2.0,
            "attention_out_multiplier": 0.5,
            "ssm_in_multiplier": 0.5,
            "ssm_out_multiplier": 2.0,
            "mlp_multipliers": [2.0, 0.5],
            "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 0.5],
            "key_multiplier": 0.25,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 4.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            "layer_norm_epsilon": 1e-5,
            "num_heads": 8,
            "head_dim": 64,
            "state_size": 16,
            "n_groups": 2,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "max_position_embeddings": None,
        },
    ),
}
CASES["kimi-linear"] = (
    "KimiLinear",
    {
        "rms_norm_eps": 1e-5,
        "layer_types": [LINEAR, FULL, LINEAR],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 256,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "routed_scaling_factor": 1.5,
    },
)
# Further models of an architecture above.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense granite": (
        "GraniteMoeHybrid",
        {**CASES["granitehybrid"][1], "num_local_experts": 0, "num_experts_per_tok": 0},
    ),
    "bamba": ("Bamba", HYBRID | {"attn_layer_indices": [1], "attn_rotary_emb": 32}),
}
LETTERS = {LINEAR: "M", "moe": "E", FULL: "*", "mlp": "-", "mamba": "M", "attention": "*"}


def levels(kind: Type) -> tuple[np.ndarray, np.ndarray] | None:
    """Return values that `kind` holds exactly in any order, and the share of each in a tensor."""
    if kind == Type.Q8_0:  # half of the values are the largest, by which a block is scaled
        values = np.round(np.arange(-6, 7) * 127 / 6).astype(np.float32) / 2**10
        return values, np.where(np.abs(np.arange(-6, 7)) == 6, 0.25, 0.5 / 11)
    if kind == Type.Q4_K:
        return np.arange(-8, 8, dtype=np.float32) / 64, np.full(16, 1 / 16)
    return None


def q4_k_blocks(values: np.ndarray) -> np.ndarray:
    """Pack multiples from -8 to 7 of a power of two as Q4_K, which the package gguf does not write.

    Each row has a power of its own.
    """
    scales = 2 ** np.ceil(np.log2(np.abs(values).max(-1, keepdims=True) / 8))
    codes = np.uint8(values / scales + 8).reshape(*values.shape[:-1], -1, 4, 2, 32)
    blocks = np.empty((*codes.shape[:-3], 144), np.uint8)
    both = np.repeat(scales[..., None], 2, axis=-1).astype(np.float16)
    blocks[..., :4] = np.ascontiguousarray(both).view(np.uint8)
    # Scales of 1 and minima of 8 of eight runs, in 6 bits each.
    blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16] = 1, 8, 1 | 8 << 4
    blocks[..., 16:] = (codes[..., 0, :] | codes[..., 1, :] << 4).reshape(*codes.shape[:-3], 128)
    packed = blocks.reshape(*values.shape[:-1], -1)
    np.testing.assert_array_equal(gguf.dequantize(packed, Type.Q4_K), values)
    return packed


def packed(values: np.ndarray, kind: Type) -> np.ndarray:
    """Return a matrix in blocks of `kind`."""
    return q4_k_blocks(values) if kind == Type.Q4_K else gguf.quantize(values, kind)


def save_checkpoint(
    architecture: str,
    folder: Path,
    kind: Type = Type.F32,
    fields: Mapping[str, Any] | None = None,
) -> Any:
    """Write the checkpoint folder of a case, and return Transformers' model.

    Every parameter matters: norms and biases are random too. Matrices have values that `kind` holds
    exactly.
    """
    name, own = {**CASES, **OTHERS}[architecture]
    torch.manual_seed(sum(architecture.encode()))
    of_text = f"{name}Text" if name.startswith("Qwen3_5") else name
    config = getattr(transformers, f"{of_text}Config")(**{**SIZES, **own, **(fields or {})})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator, exact = np.random.default_rng(0), levels(kind)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
            elif exact is not None and parameter.ndim > 1:
                values = generator.choice(exact[0], tuple(parameter.shape), p=exact[1])
                parameter.copy_(torch.from_numpy(values))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("correction_bias", "expert_bias")):
                buffer += 0.1 * torch.randn_like(buffer)
    model.save_pretrained(folder)
    if name == "NemotronH":
        _name_layers_by_letter(folder / "config.json", architecture)
    if name == "GraniteMoeHybrid":
        _name_layers_as_published(folder / "config.json")
    return model


def _name_layers_as_published(path: Path) -> None:
    raw = json.loads(path.read_text())
    older = {LINEAR: "mamba", FULL: "attention"}
    raw["layer_types"] = [older.get(kind, kind) for kind in raw["layer_types"]]
    path.write_text(json.dumps(raw))


def _name_layers_by_letter(path: Path, architecture: str) -> None:
    # As published config.json files do, which llama.cpp's converter expects.
    raw = json.loads(path.read_text())
    kinds = raw.pop("layers_block_type", None) or raw.pop("layer_types")
    raw["hybrid_override_pattern"] = "".join(LETTERS[kind] for kind in kinds)
    raw["num_hidden_layers"] = len(kinds)
    if architecture == "nemotron_h":
        of_experts = [key for key in raw if "expert" in key or key.startswith("moe_")]
        for key in (*of_experts, "n_group", "topk_group"):
            raw.pop(key, None)
    path.write_text(json.dumps(raw))
