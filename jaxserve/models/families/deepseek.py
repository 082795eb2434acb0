"""DeepSeek-V2 and V3 (2024, arXiv:2405.04434 and 2412.19437): latent attention, shared experts.

V2 chooses experts by probability, V3 by scores of their own and a correction; the first layers are
dense. Reference implementations: `DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM` in Hugging
Face Transformers. The modules that predict further tokens are not used.
"""

from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.llama import FINAL_NORM, GATE, PRE_NORMS, UP, mlp_projections
from jaxserve.models.families.mixtral import expert_weights
from jaxserve.models.layers import FamilyTraits
from jaxserve.models.weight_table import WeightName, embedding_weights, every_layer


def build_deepseek_v3(config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> Decoder:
    """The shared decoder with V3's router."""
    return Decoder(config, dtype, rngs, FamilyTraits(router="sigmoid"))


def deepseek_v2_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    return [
        *embedding_weights(config),
        *every_layer([*PRE_NORMS, *_attention(config)], config),
        *every_layer(mlp_projections(config), config, sparse=False),
        *every_layer([*expert_weights(config), *SHARED], config, sparse=True),
        FINAL_NORM,
    ]


def deepseek_v3_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    return [*deepseek_v2_weights(config), *every_layer([CORRECTION], config, sparse=True)]


CORRECTION = WeightName("mlp.gate.e_score_correction_bias", "E -> E", "mlp.correction")
SHARED = (
    WeightName("mlp.shared_experts.gate_proj.weight", "S D -> D S", "mlp.shared.gate_up", GATE),
    WeightName("mlp.shared_experts.up_proj.weight", "S D -> D S", "mlp.shared.gate_up", UP),
    WeightName("mlp.shared_experts.down_proj.weight", "D S -> S D", "mlp.shared.down"),
)


def _attention(config: ModelConfig) -> list[WeightName]:
    layer = [
        WeightName("self_attn.kv_a_proj_with_mqa.weight", "J D -> D J", "attention.down"),
        WeightName("self_attn.kv_a_layernorm.weight", "C -> C", "attention.norm.scale"),
        WeightName("self_attn.kv_b_proj.weight", "(K B) C -> C K B", "attention.up"),
        WeightName("self_attn.o_proj.weight", "D (K U) -> K U D", "attention.out"),
    ]
    if config.attention_bias:
        layer += [
            WeightName("self_attn.kv_a_proj_with_mqa.bias", "J -> J", "attention.down_bias"),
            WeightName("self_attn.o_proj.bias", "D -> D", "attention.out_bias"),
        ]
    if config.latent is None or config.latent.query_rank is None:
        return [
            *layer,
            WeightName("self_attn.q_proj.weight", "(K A) D -> D K A", "attention.query"),
        ]
    norm = WeightName("self_attn.q_a_layernorm.weight", "L -> L", "attention.query_norm.scale")
    down = WeightName("self_attn.q_a_proj.weight", "L D -> D L", "attention.query_down")
    up = WeightName("self_attn.q_b_proj.weight", "(K A) L -> L K A", "attention.query")
    if config.attention_bias:
        bias = WeightName("self_attn.q_a_proj.bias", "L -> L", "attention.query_down_bias")
        layer.append(bias)
    return [*layer, norm, down, up]
