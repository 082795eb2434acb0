"""Command R and R+ and Aya (Cohere 2024), and Command R7B and A (2024, 2025; "Cohere 2").

Attention and MLP read one norm's result, side by side; norms subtract the mean, the rotary
embedding turns neighbours as pairs, and the logits are multiplied. Command R+ normalises each query
and key head, with a scale for each. Cohere 2 has a window on three layers of four, and rotates in
those alone. Reference implementations: `CohereForCausalLM` and `Cohere2ForCausalLM` in Hugging Face
Transformers.
"""

from dataclasses import replace

from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.llama import FINAL_NORM, projections
from jaxserve.models.layers import FamilyTraits
from jaxserve.models.weight_table import WeightName, embedding_weights, every_layer

DESIGN = FamilyTraits(parallel=True, interleaved=True, norm_centered=True, norm_rounds_last=True)


def build_cohere(config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> Decoder:
    """The shared decoder with parallel blocks."""
    return Decoder(
        config, dtype, rngs, replace(DESIGN, qk_norm="own" if config.use_qk_norm else None)
    )


def cohere_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    layer = [NORM, *projections(config), *(QK_NORMS if config.use_qk_norm else ())]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


NORM = WeightName("input_layernorm.weight", "D -> D", "attention_norm.scale")
QK_NORMS = (
    WeightName("self_attn.q_norm.weight", "(K G) H -> K G H", "attention.query_norm.scale"),
    WeightName("self_attn.k_norm.weight", "K H -> K H", "attention.key_norm.scale"),
)
