"""Gemma 2 (Google 2024) and the text model of Gemma 3 (2025).

Embeddings are multiplied by the root of their size, norms stand before and after each block and
scale by 1 + weight, the MLP is gated by GELU. Gemma 2 caps scores and logits; Gemma 3 normalises
query and key heads instead, and rotates layers with a window by a base of their own. Reference
implementations: `Gemma2ForCausalLM` and `Gemma3ForCausalLM` in Hugging Face Transformers.
"""

from dataclasses import replace

from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.llama import FINAL_NORM, projections
from jaxserve.models.families.qwen import QK_NORMS
from jaxserve.models.layers import FamilyTraits
from jaxserve.models.weight_table import WeightName, embedding_weights, every_layer

GEMMA2 = FamilyTraits(
    norms="around", norm_offset=1.0, norm_rounds_last=True, activation="gelu_tanh"
)
GEMMA3 = replace(GEMMA2, qk_norm="head")


def build_gemma2(config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> Decoder:
    """The shared decoder in Gemma's design."""
    return Decoder(config, dtype, rngs, GEMMA2)


def build_gemma3(config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> Decoder:
    """Gemma 2's with query and key norms."""
    return Decoder(config, dtype, rngs, GEMMA3)


def gemma2_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    layer = [*NORMS, *projections(config)]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def gemma3_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    return [*gemma2_weights(config), *every_layer(QK_NORMS, config)]


NORMS = (
    WeightName("input_layernorm.weight", "D -> D", "attention_norm.scale"),
    WeightName("post_attention_layernorm.weight", "D -> D", "attention_out_norm.scale"),
    WeightName("pre_feedforward_layernorm.weight", "D -> D", "mlp_norm.scale"),
    WeightName("post_feedforward_layernorm.weight", "D -> D", "mlp_out_norm.scale"),
)
