"""Tiny models of every family and every form of weights, with random numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxserve
from jaxserve.models import Decoder, ModelConfig, parse_model_config
from jaxserve.weights import load_weights, random_weights
from jaxserve.weights.placement import scales_of, scales_parameter

VOCAB = 511
"""That of the bundled model, whose tokenizer reads and writes what guided rows hold."""
END = 3

LLAMA: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": END,
    }
)
# Shorter than the prompts.
WINDOW = {"sliding_window": 8, "rope_theta": 500.0}
GEMMA = {
    **WINDOW,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
}
MIXTRAL = {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def family(
    architecture: str, model_type: str, changes: Mapping[str, Any], without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Make a config.json: Llama's with changes, without None fields and fields of `without`."""
    names = {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type}
    fields = {**LLAMA, **changes, **names}
    return {name: value for name, value in fields.items() if name not in without}


BUNDLED = Path(jaxserve.__file__).parent / "demo_model"

FAMILIES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "bundled": json.loads((BUNDLED / "config.json").read_text()),
        "llama": dict(LLAMA),
        "qwen3": family("Qwen3", "qwen3", {}),
        "qwen3_moe": family(
            "Qwen3Moe",
            "qwen3_moe",
            {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
        ),
        "olmo3": family("Olmo3", "olmo3", WINDOW),
        "gemma2": family(
            "Gemma2",
            "gemma2",
            {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ),
        "gemma3": family("Gemma3", "gemma3_text", GEMMA),
        "mixtral": family("Mixtral", "mixtral", MIXTRAL),
        "gpt_oss": family(
            "GptOss",
            "gpt_oss",
            {**MIXTRAL, **WINDOW, "attention_bias": True, "rope_scaling": YARN},
        ),
        "deepseek_v3": family("DeepseekV3", "deepseek_v3", DEEPSEEK, without=("head_dim",)),
        "cohere2": family(
            "Cohere2",
            "cohere2",
            {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "sliding_window": 8},
            without=("rms_norm_eps",),
        ),
    }
)


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """Model with random weights, or the bundled one.

    Attributes:
        family: of `FAMILIES`.
        dtype: of weights and activations.
        quantization: form of the layers' matrices. None means `dtype`.
        kv_cache_dtype: "auto" or "fp8".
    """

    family: str
    dtype: str = "float32"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        """The family, and the settings that differ from the defaults."""
        cache = "" if self.kv_cache_dtype == "auto" else f"kv-{self.kv_cache_dtype}"
        parts = (self.family, self.dtype, self.quantization, cache)
        return "-".join(part for part in parts if part)

    def config(self) -> ModelConfig:
        """Read the model's config.json."""
        return parse_model_config(dict(FAMILIES[self.family]))

    def build(self) -> Decoder:
        """Build the model with its weights laid out as a card with Triton takes them."""
        config, dtype = self.config(), jnp.dtype(self.dtype)
        if self.family == "bundled":
            return load_weights(BUNDLED, config, dtype)
        model = random_weights(config, dtype, seed=3, quantization=self.quantization)
        if self.kv_cache_dtype == "fp8":
            set_scales(model)
        return model


def set_scales(model: Decoder) -> None:
    """Give the cache of each layer scales that differ from head to head."""
    for number, attention in enumerate(scales_of(model).values()):
        heads = model.config.num_key_value_heads
        scales = 0.01 * (1 + number + np.arange(2 * heads, dtype=np.float32)).reshape(2, heads)
        attention.kv_scales = scales_parameter(jnp.asarray(scales))


def leaves_of(model: Decoder) -> list[np.ndarray]:
    """Return a model's arrays in the order in which programs take them."""
    _, state = nnx.split(model)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


MODELS: Mapping[str, TinyModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            *(TinyModel(name) for name in FAMILIES),
            *(TinyModel("llama", dtype) for dtype in ("bfloat16", "float16")),
            TinyModel("bundled", "bfloat16"),
            TinyModel("mixtral", "bfloat16"),
            *(TinyModel("llama", quantization=form) for form in ("int8", "int4", "fp8")),
            TinyModel("llama", "bfloat16", "int4"),
            TinyModel("mixtral", quantization="int4"),
            TinyModel("mixtral", "bfloat16", "fp8"),
            TinyModel("deepseek_v3", quantization="int8"),
            TinyModel("llama", kv_cache_dtype="fp8"),
            TinyModel("llama", "bfloat16", kv_cache_dtype="fp8"),
        )
    }
)
