"""Gemma and Gemma 2 (Google 2024) and the text model of Gemma 3 (2025).

Embeddings are multiplied by the square root of their size, norms scale by 1 + weight, and GELU
gates the MLP. From Gemma 2 on there are norms before and after both attention and MLP. Gemma 2 caps
scores and logits. Gemma 3 normalizes query and key heads instead, and has a separate rotary base in
layers with a window. Reference implementations: `GemmaForCausalLM`, `Gemma2ForCausalLM` and
`Gemma3ForCausalLM` in Hugging Face Transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import every
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, ConfigRules, Scales
from jaxserve.models.families.llama import llama_weights
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import PATTERN, GgufMetadata, Raw, read_pattern, read_rope
from jaxserve.models.gguf.rules import (
    POST_NORMS,
    TENSORS,
    WINDOW,
    GgufRules,
    Names,
    norms_less_one,
)
from jaxserve.models.weight_names import (
    FINAL_NORM,
    QK_NORMS,
    embedding_weights,
    every_layer,
    projections,
)
from jaxserve.models.weight_table import WeightName

TRAITS = FamilyTraits(
    norms="around",
    norm_offset=1.0,
    norm_rounds_last=True,
    activation="gelu_tanh",
    overflows_float16=True,
)


def _first_scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales(embedding=hidden_size**0.5)


def _scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales(
        attention=fields.number("query_pre_attn_scalar", 0.0, 1e6) ** -0.5,
        attention_cap=fields.optional("attn_logit_softcapping", 0.0, 1e6),
        logit_cap=fields.optional("final_logit_softcapping", 0.0, 1e6),
        embedding=hidden_size**0.5,
    )


def _gemma2_weights(config: ModelConfig) -> list[WeightName]:
    layer = [*NORMS, *projections(config)]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def _gemma3_weights(config: ModelConfig) -> list[WeightName]:
    return [*_gemma2_weights(config), *every_layer(QK_NORMS, config)]


NORMS = (
    WeightName("input_layernorm.weight", "D -> D", "attention_norm.scale"),
    WeightName("post_attention_layernorm.weight", "D -> D", "attention_out_norm.scale"),
    WeightName("pre_feedforward_layernorm.weight", "D -> D", "mlp_norm.scale"),
    WeightName("post_feedforward_layernorm.weight", "D -> D", "mlp_out_norm.scale"),
)


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    read_pattern(gguf, raw)
    # Fixed in llama.cpp's code: the scale of attention scores, which differs in the 27B models.
    raw["query_pre_attn_scalar"] = raw.get("head_dim")
    if raw.get("num_hidden_layers") == LAYERS_OF_27B[gguf.architecture]:
        heads = raw.get("num_attention_heads") or 1
        raw["query_pre_attn_scalar"] = (raw.get("hidden_size") or 0) // heads


LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_GGUF_TENSORS: Names = MappingProxyType(
    {**TENSORS, **POST_NORMS, "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm"}
)
_GGUF_FIELDS: Names = MappingProxyType(
    {
        **WINDOW,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
)
_GGUF_LOCAL: Names = MappingProxyType({"rope.freq_base_swa": "rope_local_base_freq"})
_NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "gelu_pytorch_tanh",  # Transformers reads `hidden_activation` instead
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": (None, False),
    }
)
GEMMA = Family(
    architectures={
        "GemmaForCausalLM": Architecture(
            ConfigRules(
                "gemma",
                # The first files say "gelu", but Transformers computes gelu_pytorch_tanh for them
                # too. `hidden_activation`, which was added to declare it, is unused.
                neutral=MappingProxyType(
                    {
                        **_NEUTRAL,
                        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
                        "hidden_activation": ("gelu_pytorch_tanh", None),
                    }
                ),
                explicit=HEADS,
                scales=_first_scales,
                tied=True,
            ),
            llama_weights,
            replace(TRAITS, norms="before"),
        ),
        "Gemma2ForCausalLM": Architecture(
            ConfigRules(
                "gemma2",
                neutral=_NEUTRAL,
                # The 9B and 27B repeat sliding_window as sliding_window_size, which is not read.
                ignored=frozenset({"cache_implementation", "sliding_window_size"}),
                explicit=HEADS,
                layers=every(2),
                scales=_scales,
                tied=True,
            ),
            _gemma2_weights,
            TRAITS,
        ),
        "Gemma3ForCausalLM": Architecture(
            ConfigRules(
                "gemma3_text",
                # Transformers ignores a cap of the scores in Gemma 3.
                neutral=MappingProxyType({**_NEUTRAL, "attn_logit_softcapping": None}),
                ignored=frozenset({"_sliding_window_pattern", "cache_implementation"}),
                explicit=HEADS,
                layers=every(6, field="sliding_window_pattern"),
                rope=RopeRules(theta=1e6, by_layer_type=True, local_theta=1e4),
                scales=_scales,
                tied=True,
            ),
            _gemma3_weights,
            replace(TRAITS, qk_norm="head"),
        ),
    },
    gguf={
        "gemma": GgufRules("GemmaForCausalLM", read_rope, change=norms_less_one),
    }
    | {
        name: GgufRules(
            architecture,
            _finish_gguf,
            tensors=_GGUF_TENSORS,
            fields=fields,
            read=frozenset({PATTERN}),
            change=norms_less_one,
        )
        for name, architecture, fields in (
            ("gemma2", "Gemma2ForCausalLM", _GGUF_FIELDS),
            ("gemma3", "Gemma3ForCausalLM", {**_GGUF_FIELDS, **_GGUF_LOCAL}),
        )
    },
)
