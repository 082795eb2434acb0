"""FlexOlmo (Allen Institute for AI 2025): OLMo 2 with experts.

Reference implementation: `FlexOlmoForCausalLM` in Hugging Face Transformers.
"""

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import ROUTING, ConfigRules
from jaxserve.models.families.olmo import POST_NORMS, TRAITS, moe_experts
from jaxserve.models.family import Architecture, Family
from jaxserve.models.weight_names import (
    WHOLE_NORMS,
    attention_projections,
    expert_weights,
    model_weights,
)
from jaxserve.models.weight_table import WeightName


def _weights(config: ModelConfig) -> list[WeightName]:
    layer = [*POST_NORMS, *attention_projections(config), *WHOLE_NORMS]
    return model_weights(config, layer, expert_weights(config))


FLEX_OLMO = Family(
    architectures={
        "FlexOlmoForCausalLM": Architecture(
            ConfigRules(
                "flex_olmo", ignored=ROUTING, rope=RopeRules(theta=5e5), experts=moe_experts
            ),
            _weights,
            TRAITS,
        )
    }
)
