"""OLMo 2 and 3 (Allen Institute for AI 2024, 2025): norms after attention and MLP, not before.

Queries and keys are normalized over all heads together. OLMo 3 has a window in three of four
layers, to which the scaling of the rotary embedding does not apply. An older `rope_theta` of its
config.json is also the base of layers with a window. Reference implementations: `Olmo2ForCausalLM`
and `Olmo3ForCausalLM` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.models.config.layers import every
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import ConfigRules
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import (
    WINDOW_KEYS,
    GgufMetadata,
    Raw,
    read_rope,
    read_windows,
)
from jaxserve.models.gguf.rules import POST_NORMS, TENSORS, WINDOW, GgufRules
from jaxserve.models.weight_names import FINAL_NORM, embedding_weights, every_layer, projections
from jaxserve.models.weight_table import WeightName

TRAITS = FamilyTraits(norms="after", qk_norm="all", norm_rounds_last=True)


def _weights(config: ModelConfig) -> list[WeightName]:
    layer = [
        *projections(config),
        WeightName("self_attn.q_norm.weight", "(K G H) -> K G H", "attention.query_norm.scale"),
        WeightName("self_attn.k_norm.weight", "(K H) -> K H", "attention.key_norm.scale"),
        WeightName("post_attention_layernorm.weight", "D -> D", "attention_out_norm.scale"),
        WeightName("post_feedforward_layernorm.weight", "D -> D", "mlp_out_norm.scale"),
    ]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    if not raw.get("sliding_window"):
        raw.pop("sliding_window", None)
        return
    raw["architectures"] = ["Olmo3ForCausalLM"]
    read_windows(gguf, raw)


OLMO = Family(
    architectures={
        "Olmo2ForCausalLM": Architecture(ConfigRules("olmo2"), _weights, TRAITS),
        "Olmo3ForCausalLM": Architecture(
            ConfigRules("olmo3", layers=every(4), rope=RopeRules(theta=5e5, by_layer_type=True)),
            _weights,
            TRAITS,
        ),
    },
    gguf={
        "olmo2": GgufRules(
            "Olmo2ForCausalLM",
            _finish_gguf,
            tensors=MappingProxyType({**TENSORS, **POST_NORMS}),
            fields=WINDOW,
            read=WINDOW_KEYS,
        )
    },
)
