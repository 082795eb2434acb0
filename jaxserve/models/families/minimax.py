"""MiniMax M2 to M2.7 (2025, 2026): experts chosen by sigmoids, norms over all heads of a token.

The first half of each head is rotated. Reference implementation: `MiniMaxM2ForCausalLM` in Hugging
Face Transformers.
"""

from types import MappingProxyType

from jaxserve.models.config.experts import Experts, expert_counts, expert_width
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import LayerTable, full_attention
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, ROUTING, ConfigRules
from jaxserve.models.families.mixtral import GGUF_EXPERTS, GGUF_FIELDS, GGUF_TENSORS
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, read_rope_scaling
from jaxserve.models.gguf.rules import COMPUTED_BY_SCORES, GgufRules
from jaxserve.models.weight_names import (
    PRE_NORMS,
    WHOLE_NORMS,
    attention_projections,
    expert_weights,
    model_weights,
)
from jaxserve.models.weight_table import WeightName

BLOCK = "block_sparse_moe"


def _layers(fields: Fields, layers: int) -> LayerTable:
    kinds = fields.take("attn_type_list")  # 0 is linear attention, as in MiniMax-Text-01
    if kinds is not None and kinds != [1] * layers:
        fields.refuse("attn_type_list", f"1 for each of {layers} layers")
    return full_attention(fields, layers)


def _experts(fields: Fields, layers: int) -> Experts:
    count, chosen = expert_counts(fields, ("num_local_experts", "num_experts"))
    width = expert_width(fields, "intermediate_size")
    return Experts(count, width, chosen, (True,) * layers, sum_eps=0.0)


def _weights(config: ModelConfig) -> list[WeightName]:
    experts = [
        *expert_weights(config, BLOCK, ("w1", "w3", "w2")),
        WeightName(f"{BLOCK}.e_score_correction_bias", "E -> E", "mlp.correction"),
    ]
    layer = [*PRE_NORMS, *attention_projections(config), *WHOLE_NORMS]
    return model_weights(config, layer, experts)


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope_scaling(gguf, raw)
    raw["intermediate_size"] = raw.pop("moe_intermediate_size")


MINIMAX = Family(
    architectures={
        "MiniMaxM2ForCausalLM": Architecture(
            ConfigRules(
                "minimax_m2",
                neutral=MappingProxyType(
                    {
                        "layernorm_full_attention_beta": 1.0,
                        "layernorm_linear_attention_beta": 1.0,
                        "layernorm_mlp_beta": 1.0,
                        "qk_norm_type": "per_layer",
                        "scoring_func": "sigmoid",
                        "shared_intermediate_size": 0,
                        "sliding_window": None,
                        "use_qk_norm": True,
                        "use_routing_bias": True,
                    }
                ),
                # The width of a shared MLP that no layer has, and modules for further tokens.
                ignored=ROUTING
                | {
                    "mlp_intermediate_size",
                    "mtp_transformer_layers",
                    "num_mtp_modules",
                    "shared_moe_mode",
                    "use_mtp",
                },
                explicit=HEADS,
                layers=_layers,
                rope=RopeRules(theta=5e6, partial=1.0, size="rotary_dim"),
                experts=_experts,
                qkv_bias=False,
                output_bias=False,
            ),
            _weights,
            FamilyTraits(qk_norm="all", router="sigmoid"),
        )
    },
    gguf={
        "minimax-m2": GgufRules(
            "MiniMaxM2ForCausalLM",
            _finish_gguf,
            tensors=MappingProxyType(
                {
                    **GGUF_TENSORS,
                    "blk.{}.exp_probs_b.bias": f"model.layers.{{}}.{BLOCK}.e_score_correction_bias",
                }
            ),
            fields=MappingProxyType(
                {
                    **GGUF_FIELDS,
                    "expert_feed_forward_length": "moe_intermediate_size",
                    "rope.dimension_count": "rotary_dim",
                }
            ),
            experts=GGUF_EXPERTS,
            computed=COMPUTED_BY_SCORES,
            required=frozenset({"expert_feed_forward_length"}),
        )
    },
)
