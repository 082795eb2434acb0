"""OLMo 2 and 3 (Allen Institute for AI 2024, 2025): norms after attention and MLP, not before.

Queries and keys are normalized over all heads together. OLMo 3 has a window in three of four
layers, to which the scaling of the rotary embedding does not apply. An older `rope_theta` of its
config.json is also the base of layers with a window. OLMo Hybrid (2026) applies the gated delta
rule in three of four layers, with norms before it. OLMoE (2024) has experts, and norms before
attention and MLP. Reference implementations: `Olmo2ForCausalLM`, `Olmo3ForCausalLM`,
`OlmoHybridForCausalLM` and `OlmoeForCausalLM` in Hugging Face Transformers.
"""

from dataclasses import replace
from types import MappingProxyType

import numpy as np

from jaxserve.models.config.experts import Experts, expert_counts, expert_width
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import (
    ATTENTION,
    FULL,
    LINEAR,
    LayerTable,
    every,
    layer_kinds,
)
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.recurrent import MAX_HEADS, MAX_SIZE, GatedDeltaSizes, gated_delta
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import ROUTING, ConfigRules
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf import rules
from jaxserve.models.gguf.metadata import (
    WINDOW_KEYS,
    GgufMetadata,
    Raw,
    read_rope,
    read_windows,
)
from jaxserve.models.gguf.rules import (
    COMPUTED_AS_THEY_ARE,
    EXPERTS,
    ROUTER,
    TENSORS,
    WINDOW,
    GgufRules,
)
from jaxserve.models.weight_names import (
    FINAL_NORM,
    PRE_NORMS,
    WHOLE_NORMS,
    attention_projections,
    embedding_weights,
    every_layer,
    expert_weights,
    mlp_projections,
    model_weights,
    projections,
)
from jaxserve.models.weight_table import WeightName

DELTA = "delta"
POST_NORMS = (
    WeightName("post_attention_layernorm.weight", "D -> D", "attention_out_norm.scale"),
    WeightName("post_feedforward_layernorm.weight", "D -> D", "mlp_out_norm.scale"),
)
TRAITS = FamilyTraits(norms="after", qk_norm="all", norm_rounds_last=True)


def _weights(config: ModelConfig) -> list[WeightName]:
    layer = _attention_layer(config)
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def _attention_layer(config: ModelConfig) -> list[WeightName]:
    return [
        *projections(config),
        *WHOLE_NORMS,
        *POST_NORMS,
    ]


def moe_experts(fields: Fields, layers: int) -> Experts:
    """Read experts whose weights are as the router gives them, unless `norm_topk_prob` is true."""
    count, chosen = expert_counts(fields, ("num_experts", "num_local_experts"))
    return Experts(
        count,
        expert_width(fields, "intermediate_size"),
        chosen,
        (True,) * layers,
        normalize=fields.flag("norm_topk_prob", default=False),
    )


def _moe_weights(config: ModelConfig) -> list[WeightName]:
    layer = [*PRE_NORMS, *attention_projections(config), *WHOLE_NORMS]
    return model_weights(config, layer, expert_weights(config))


def _hybrid_layers(fields: Fields, layers: int) -> LayerTable:
    """Read `layer_types`, by default attention in every fourth layer.

    Layers rotate only if there is a base of the rotary embedding.
    """
    default = [LINEAR if (index + 1) % 4 else FULL for index in range(layers)]
    default[-1] = default[-1] if FULL in default else FULL
    kinds = layer_kinds(fields, layers, (FULL, LINEAR), default)
    parameters = fields.take("rope_parameters")
    has_base = isinstance(parameters, dict) and parameters.get("rope_theta") is not None
    rotates = fields.has("rope_theta") or has_base
    mixers = tuple((DELTA,) if kind == LINEAR else (ATTENTION,) for kind in kinds)
    return LayerTable((None,) * layers, (rotates,) * layers, mixers)


def _hybrid_delta(fields: Fields) -> GatedDeltaSizes:
    """Read the sizes of the gated delta rule, which follow from those of attention by default."""
    hidden = fields.integer("hidden_size", 1, 1 << 17)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    keys = fields.integer("linear_num_key_heads", 1, MAX_HEADS, default=heads)
    values = fields.integer("linear_num_value_heads", 1, MAX_HEADS, default=heads)
    size = max(int(0.75 * hidden / keys), 1)
    size = fields.integer("linear_key_head_dim", 1, MAX_SIZE, default=size)
    sizes = replace(gated_delta(fields), groups=keys, heads=values, inputs=size)
    return replace(
        sizes,
        outputs=fields.integer("linear_value_head_dim", 1, MAX_SIZE, default=2 * size),
        strength=2.0 if fields.flag("linear_allow_neg_eigval", default=True) else 1.0,
        norm_eps=1e-5,
    )


def _delta(config: ModelConfig) -> list[WeightName]:
    assert config.recurrent is not None
    name, gates, layer = "linear_attn", "(Keys Per) D -> D Keys Per", list[WeightName]()
    assert isinstance(config.recurrent, GatedDeltaSizes)
    first = 0
    for letter, size in zip("qkv", config.recurrent.parts, strict=True):
        part, side = np.s_[..., first : first + size], "Vals" if letter == "v" else "Query"
        inputs, taps = f"{side} D -> D {side}", f"{side} One W -> W One {side}"
        layer += [
            WeightName(f"{name}.{letter}_proj.weight", inputs, "delta.mixed", part),
            WeightName(f"{name}.{letter}_conv1d.weight", taps, "delta.taps", part),
        ]
        first += size
    return [
        *PRE_NORMS,
        *layer,
        WeightName(f"{name}.g_proj.weight", "Vals D -> D Vals", "delta.gate"),
        WeightName(f"{name}.b_proj.weight", gates, "delta.gates", (slice(None), 0)),
        WeightName(f"{name}.a_proj.weight", gates, "delta.gates", (slice(None), 1)),
        WeightName(f"{name}.A_log", "Heads -> Heads", "delta.constants", (0,)),
        WeightName(f"{name}.dt_bias", "Heads -> Heads", "delta.constants", (1,)),
        WeightName(f"{name}.o_norm.weight", "Out -> Out", "delta.norm.scale"),
        WeightName(f"{name}.o_proj.weight", "D Vals -> Vals D", "delta.out"),
        *mlp_projections(config),
    ]


def _hybrid_weights(config: ModelConfig) -> list[WeightName]:
    return [
        *embedding_weights(config),
        *every_layer(_attention_layer(config), config, mixer=ATTENTION),
        *every_layer(_delta(config), config, mixer=DELTA),
        FINAL_NORM,
    ]


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    if not raw.get("sliding_window"):
        raw.pop("sliding_window", None)
        return
    raw["architectures"] = ["Olmo3ForCausalLM"]
    read_windows(gguf, raw)


def _finish_moe_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    raw["norm_topk_prob"] = False  # as in llama.cpp's code


OLMO = Family(
    architectures={
        "Olmo2ForCausalLM": Architecture(ConfigRules("olmo2"), _weights, TRAITS),
        "Olmo3ForCausalLM": Architecture(
            ConfigRules("olmo3", layers=every(4), rope=RopeRules(theta=5e5, by_layer_type=True)),
            _weights,
            TRAITS,
        ),
        "OlmoeForCausalLM": Architecture(
            ConfigRules(
                "olmoe",
                neutral=MappingProxyType({"clip_qkv": None, "sliding_window": None}),
                ignored=ROUTING,
                experts=moe_experts,
            ),
            _moe_weights,
            FamilyTraits(qk_norm="all"),
        ),
        "OlmoHybridForCausalLM": Architecture(
            ConfigRules(
                "olmo_hybrid",
                ignored=frozenset(
                    """
                    linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max
                    linear_dt_min
                    """.split()
                ),
                layers=_hybrid_layers,
                recurrent=_hybrid_delta,
            ),
            _hybrid_weights,
            replace(TRAITS, norms="by mixer"),
            tensors=(
                (r"\.attention_layer_norm\.", ".input_layernorm."),
                (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
            ),
        ),
    },
    gguf={
        "olmo2": GgufRules(
            "Olmo2ForCausalLM",
            _finish_gguf,
            tensors=MappingProxyType({**TENSORS, **rules.POST_NORMS}),
            fields=WINDOW,
            read=WINDOW_KEYS,
        ),
        "olmoe": GgufRules(
            "OlmoeForCausalLM",
            _finish_moe_gguf,
            tensors=MappingProxyType({**TENSORS, **ROUTER}),
            fields=MappingProxyType(
                {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
            ),
            experts=EXPERTS,
            computed=COMPUTED_AS_THEY_ARE,
        ),
    },
)
