"""gpt-oss (OpenAI 2025): experts with biases, attention with sinks, windows in every other layer.

The model card is arXiv:2508.10925. Reference implementation: `GptOssForCausalLM` in Hugging Face
Transformers. Experts come stacked, gates and upward projections taking turns; where they are MXFP4,
`jaxserve.weights` unpacks them, which leaves the inputs last and not first.
"""

from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.llama import FINAL_NORM, PRE_NORMS, attention_projections
from jaxserve.models.layers import FamilyTraits
from jaxserve.models.weight_table import WeightName, embedding_weights, every_layer

DESIGN = FamilyTraits(router="chosen", sinks=True, norm_rounds_last=True)


def build_gpt_oss(config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> Decoder:
    """The shared decoder with sinks, and experts with biases."""
    return Decoder(config, dtype, rngs, DESIGN)


def gpt_oss_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    packed = config.experts is not None and config.experts.packed
    gate_up = "E (M P) D -> E D P M" if packed else "E D (M P) -> E D P M"
    down = "E D M -> E M D" if packed else "E M D -> E M D"
    end = "_blocks" if packed else ""
    layer = [
        *PRE_NORMS,
        *attention_projections(config),
        WeightName("self_attn.sinks", "(K G) -> K G", "attention.sinks"),
        WeightName("mlp.router.weight", "E D -> D E", "mlp.router"),
        WeightName("mlp.router.bias", "E -> E", "mlp.router_bias"),
        WeightName(f"mlp.experts.gate_up_proj{end}", gate_up, "mlp.gate_up"),
        WeightName("mlp.experts.gate_up_proj_bias", "E (M P) -> E P M", "mlp.gate_up_bias"),
        WeightName(f"mlp.experts.down_proj{end}", down, "mlp.down"),
        WeightName("mlp.experts.down_proj_bias", "E D -> E D", "mlp.down_bias"),
    ]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]
