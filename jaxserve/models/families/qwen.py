"""Qwen2 and 2.5 (Qwen team 2024) and Qwen3 (2025), dense and with experts.

Qwen2 is Llama with biases on queries, keys and values; Qwen3 has none, and a norm on each query and
key head before the rotation. Reference implementations: `Qwen2ForCausalLM`, `Qwen3ForCausalLM` and
`Qwen3MoeForCausalLM` in Hugging Face Transformers.
"""

from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.llama import (
    FINAL_NORM,
    PRE_NORMS,
    attention_projections,
    llama_weights,
    mlp_projections,
)
from jaxserve.models.families.mixtral import expert_weights
from jaxserve.models.layers import FamilyTraits
from jaxserve.models.weight_table import WeightName, embedding_weights, every_layer


def build_qwen3(config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> Decoder:
    """The shared decoder with query and key norms."""
    return Decoder(config, dtype, rngs, FamilyTraits(qk_norm="head"))


def qwen3_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    return [*llama_weights(config), *every_layer(QK_NORMS, config)]


def qwen3_moe_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    layer = [*PRE_NORMS, *attention_projections(config), *QK_NORMS]
    return [
        *embedding_weights(config),
        *every_layer(layer, config),
        *every_layer(mlp_projections(config), config, sparse=False),
        *every_layer(expert_weights(config), config, sparse=True),
        FINAL_NORM,
    ]


# Norms of each head, as in Gemma 3.
QK_NORMS = (
    WeightName("self_attn.q_norm.weight", "H -> H", "attention.query_norm.scale"),
    WeightName("self_attn.k_norm.weight", "H -> H", "attention.key_norm.scale"),
)
