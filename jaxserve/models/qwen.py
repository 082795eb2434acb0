"""Qwen3, dense (Qwen team 2025): Llama with a norm on each query and key head before the rotation.

Reference implementation: `Qwen3ForCausalLM` in Hugging Face Transformers.
"""

from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.llama import llama_weights
from jaxserve.models.weight_table import WeightName, every_layer


def build_qwen3(config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> Decoder:
    """The shared decoder with query and key norms."""
    return Decoder(config, dtype, rngs, qk_norm=True)


def qwen3_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    layer = [
        WeightName("self_attn.q_norm.weight", "H -> H", "attention.query_norm.scale"),
        WeightName("self_attn.k_norm.weight", "H -> H", "attention.key_norm.scale"),
    ]
    return [*llama_weights(config), *every_layer(layer, config)]
