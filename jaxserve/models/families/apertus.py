"""Apertus (Swiss AI 2025): an MLP without gate, with an activation that is learned (xIELU).

Reference implementation: `ApertusForCausalLM` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import KV_HEADS, ConfigRules
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.weight_names import (
    FINAL_NORM,
    QK_NORMS,
    attention_projections,
    embedding_weights,
    every_layer,
    squared_mlp,
)
from jaxserve.models.weight_table import WeightName

LAYER = (
    WeightName("attention_layernorm.weight", "D -> D", "attention_norm.scale"),
    WeightName("feedforward_layernorm.weight", "D -> D", "mlp_norm.scale"),
    WeightName("mlp.act_fn.alpha_p", "One -> One", "mlp.curves", (slice(0, 1),)),
    WeightName("mlp.act_fn.alpha_n", "One -> One", "mlp.curves", (slice(1, 2),)),
)


def _weights(config: ModelConfig) -> list[WeightName]:
    layer = [*LAYER, *attention_projections(config), *QK_NORMS, *squared_mlp(config)]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


APERTUS = Family(
    architectures={
        "ApertusForCausalLM": Architecture(
            ConfigRules(
                "apertus",
                neutral=MappingProxyType(
                    {"hidden_act": "xielu", "mlp_bias": False, "post_norm": False, "qk_norm": True}
                ),
                explicit=KV_HEADS,
                rope=RopeRules(theta=1.2e7),
            ),
            _weights,
            FamilyTraits(qk_norm="head", activation="xielu"),
        )
    }
)
