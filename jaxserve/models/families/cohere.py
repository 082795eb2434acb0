"""Command R, Command R+ and Aya (Cohere 2024), and Command R7B and A (2024, 2025; "Cohere 2").

Attention and MLP run in parallel on the result of one norm. Norms subtract the mean, the rotary
embedding pairs neighbouring dimensions, and the logits have a factor. Command R+ normalizes each
query and key head, with a separate scale for each. Cohere 2 has a window in three of four layers,
and rotates only in these layers. Reference implementations: `CohereForCausalLM` and
`Cohere2ForCausalLM` in Hugging Face Transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import rotated_windows
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import ConfigRules, Scales
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import (
    WINDOW_KEYS,
    GgufMetadata,
    Raw,
    read_rope,
    read_windows,
)
from jaxserve.models.gguf.rules import WINDOW, GgufRules, Names
from jaxserve.models.weight_names import FINAL_NORM, embedding_weights, every_layer, projections
from jaxserve.models.weight_table import WeightName

TRAITS = FamilyTraits(
    parallel=True, qk_norm="own", interleaved=True, norm_centered=True, norm_rounds_last=True
)


def _scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales(logit_factor=fields.number("logit_scale", 0.0, 1e4))


def _weights(config: ModelConfig) -> list[WeightName]:
    layer = [NORM, *projections(config), *(HEAD_NORMS if config.use_qk_norm else ())]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


NORM = WeightName("input_layernorm.weight", "D -> D", "attention_norm.scale")
HEAD_NORMS = (
    WeightName("self_attn.q_norm.weight", "(K G) H -> K G H", "attention.query_norm.scale"),
    WeightName("self_attn.k_norm.weight", "K H -> K H", "attention.key_norm.scale"),
)


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    raw["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    raw["use_qk_norm"] = "blk.0.attn_q_norm.weight" in gguf.tensors


def _finish_gguf2(gguf: GgufMetadata, raw: Raw) -> None:
    _finish_gguf(gguf, raw)
    read_windows(gguf, raw)


# Transformers ignores these fields and computes as with these values.
_NEUTRAL2: Mapping[str, Any] = MappingProxyType(
    {
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": (1.0, 1),
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_qk_norm": False,
    }
)
_GGUF_FIELDS: Names = MappingProxyType(
    {**WINDOW, "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
)
COHERE = Family(
    architectures={
        "CohereForCausalLM": Architecture(
            ConfigRules(
                "cohere",
                norm_eps="layer_norm_eps",
                qk_norm="use_qk_norm",
                length="model_max_length",
                rope=RopeRules(theta=5e5),
                scales=_scales,
                tied=True,
            ),
            _weights,
            TRAITS,
        ),
        "Cohere2ForCausalLM": Architecture(
            ConfigRules(
                "cohere2",
                neutral=_NEUTRAL2,
                # The first is a period that another field repeats. The next two describe how
                # Cohere's own programs split the embedding.
                ignored=frozenset({
                    "_sliding_window_pattern", "layer_switch", "use_parallel_embedding",
                    "cache_implementation",
                }),
                norm_eps="layer_norm_eps",
                length="model_max_length",
                layers=rotated_windows,
                scales=_scales,
                tied=True,
            ),
            _weights,
            replace(TRAITS, qk_norm=None),
        ),
    },
    gguf={
        "command-r": GgufRules(
            "CohereForCausalLM", _finish_gguf, fields=_GGUF_FIELDS, parallel=True
        ),
        "cohere2": GgufRules(
            "Cohere2ForCausalLM",
            _finish_gguf2,
            fields=_GGUF_FIELDS,
            read=WINDOW_KEYS,
            parallel=True,
        ),
    },
)  # fmt: skip
