"""nanochat (Karpathy 2025): norms without a scale, squared ReLUs without a gate.

Embeddings are normalized too, and queries and keys after the rotation, which turns backwards.
Reference implementation: `NanoChatForCausalLM` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.models.config.fields import Fields
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import KV_HEADS, ConfigRules, Scales
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.weight_names import (
    attention_projections,
    embedding_weights,
    every_layer,
    squared_mlp,
)
from jaxserve.models.weight_table import WeightName


def _scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales(logit_cap=fields.optional("final_logit_softcapping", 0.0, 1e6))


def _weights(config: ModelConfig) -> list[WeightName]:
    layer = [*attention_projections(config), *squared_mlp(config)]
    return [*embedding_weights(config), *every_layer(layer, config)]


NANOCHAT = Family(
    architectures={
        "NanoChatForCausalLM": Architecture(
            ConfigRules(
                "nanochat",
                neutral=MappingProxyType({"hidden_act": "relu2"}),
                explicit=KV_HEADS,
                rope=RopeRules(backwards=True),
                scales=_scales,
            ),
            _weights,
            FamilyTraits(
                qk_norm="unscaled",
                norm_after_rotation=True,
                norm_scales=False,
                norm_embedding=True,
                norm_rounds_last=True,
                activation="relu2",
            ),
            tensors=((r"\.mlp\.fc1\.", ".mlp.up_proj."), (r"\.mlp\.fc2\.", ".mlp.down_proj.")),
        )
    }
)
