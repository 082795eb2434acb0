"""OLMo 2 and 3 (Allen Institute for AI 2024, 2025): norms after the blocks, not before.

Queries and keys are normalised over all heads together. OLMo 3 has a window on three layers of
four, which scaling of the rotary embedding leaves alone. Reference implementations:
`Olmo2ForCausalLM` and `Olmo3ForCausalLM` in Hugging Face Transformers.
"""

from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.llama import FINAL_NORM, projections
from jaxserve.models.layers import FamilyTraits
from jaxserve.models.weight_table import WeightName, embedding_weights, every_layer

DESIGN = FamilyTraits(norms="after", qk_norm="all", norm_rounds_last=True)


def build_olmo(config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> Decoder:
    """The shared decoder with norms after the blocks."""
    return Decoder(config, dtype, rngs, DESIGN)


def olmo_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    layer = [
        *projections(config),
        WeightName("self_attn.q_norm.weight", "(K G H) -> K G H", "attention.query_norm.scale"),
        WeightName("self_attn.k_norm.weight", "(K H) -> K H", "attention.key_norm.scale"),
        WeightName("post_attention_layernorm.weight", "D -> D", "attention_out_norm.scale"),
        WeightName("post_feedforward_layernorm.weight", "D -> D", "mlp_out_norm.scale"),
    ]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]
