"""Qwen3-Next (2025), Qwen3.5, 3.6 and 3.8 (Qwen team 2026), dense and with experts.

Three layers of four apply the gated delta rule, the others gated attention. Multimodal checkpoints
are served as text: the three positions of a text token are equal. Reference implementations:
`Qwen3NextForCausalLM`, `Qwen3_5ForCausalLM` and `Qwen3_5MoeForCausalLM` in Hugging Face
Transformers.
"""

from dataclasses import replace
from types import MappingProxyType

from jaxserve.models.config.experts import MAX_EXPERT, Experts, expert_counts, expert_width
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import (
    ATTENTION,
    FULL,
    LINEAR,
    MAX_LAYERS,
    LayerTable,
    layer_kinds,
)
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.quantization import FIELD as QUANTIZATION
from jaxserve.models.config.recurrent import GatedDeltaSizes, gated_delta
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, ROUTING, ConfigRules, no_mlp
from jaxserve.models.families.qwen import STACKED_EXPERTS, sparse_layers
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.weight_names import (
    FINAL_NORM,
    GATE,
    PRE_NORMS,
    QK_NORMS,
    UP,
    embedding_weights,
    every_layer,
    expert_weights,
    mlp_projections,
)
from jaxserve.models.weight_table import WeightName

DELTA = "delta"


def _layers(fields: Fields, layers: int) -> LayerTable:
    """Read `layer_types`. By default every n-th layer has attention (`full_attention_interval`)."""
    interval = fields.integer("full_attention_interval", 1, MAX_LAYERS, default=4)
    default = [LINEAR if (index + 1) % interval else FULL for index in range(layers)]
    kinds = layer_kinds(fields, layers, (FULL, LINEAR), default)
    mixers = tuple((DELTA,) if kind == LINEAR else (ATTENTION,) for kind in kinds)
    return LayerTable((None,) * layers, (True,) * layers, mixers)


def _fused_delta(fields: Fields) -> GatedDeltaSizes:
    return replace(gated_delta(fields), fused=True)


def _experts(fields: Fields, layers: int) -> Experts:
    """Read experts whose chosen weights are normalized, and a shared expert with a gate."""
    count, chosen = expert_counts(fields, ("num_experts",))
    return Experts(
        count,
        expert_width(fields, "moe_intermediate_size"),
        chosen,
        (True,) * layers,
        shared=fields.integer("shared_expert_intermediate_size", 1, MAX_EXPERT, default=512),
        shared_gate=True,
        stacked=not fields.has(QUANTIZATION),
    )


def _next_experts(fields: Fields, layers: int) -> Experts:
    experts = _experts(fields, layers)
    return replace(
        experts,
        layers=sparse_layers(fields, layers),
        normalize=fields.flag("norm_topk_prob", default=True),
        stacked=False,
    )


def _mixers(config: ModelConfig) -> list[WeightName]:
    """Return the tensors of attention with gates, and of the gated delta rule."""
    pair = "attention.key_value"
    attention = [
        WeightName("self_attn.q_proj.weight", "(K G P H) D -> D K G P H", "attention.query_gate"),
        WeightName("self_attn.k_proj.weight", "(K H) D -> D K H", pair, (..., 0, slice(None))),
        WeightName("self_attn.v_proj.weight", "(K H) D -> D K H", pair, (..., 1, slice(None))),
        WeightName("self_attn.o_proj.weight", "D (K G H) -> K G H D", "attention.out"),
        *QK_NORMS,
    ]
    return [
        *every_layer(attention, config, mixer=ATTENTION),
        *every_layer(_delta(config), config, mixer=DELTA),
    ]


def _delta(config: ModelConfig) -> list[WeightName]:
    name, gates = "linear_attn", "(Keys Per) D -> D Keys Per"
    first, second = (slice(None), 0), (slice(None), 1)
    if isinstance(config.recurrent, GatedDeltaSizes) and config.recurrent.fused:
        projections = [
            WeightName(f"{name}.in_proj_qkvz.weight", "Fused D -> D Fused", "delta.fused"),
            WeightName(
                f"{name}.in_proj_ba.weight", "(Keys P Per) D -> D P Keys Per", "delta.gates"
            ),
        ]
    else:
        projections = [
            WeightName(f"{name}.in_proj_qkv.weight", "Qkv D -> D Qkv", "delta.mixed"),
            WeightName(f"{name}.in_proj_z.weight", "Vals D -> D Vals", "delta.gate"),
            WeightName(f"{name}.in_proj_b.weight", gates, "delta.gates", first),
            WeightName(f"{name}.in_proj_a.weight", gates, "delta.gates", second),
        ]
    return [
        *projections,
        WeightName(f"{name}.conv1d.weight", "Qkv One W -> W One Qkv", "delta.taps"),
        WeightName(f"{name}.A_log", "Heads -> Heads", "delta.constants", (0,)),
        WeightName(f"{name}.dt_bias", "Heads -> Heads", "delta.constants", (1,)),
        WeightName(f"{name}.norm.weight", "Out -> Out", "delta.norm.scale"),
        WeightName(f"{name}.out_proj.weight", "D Vals -> Vals D", "delta.out"),
    ]


def _weights(config: ModelConfig) -> list[WeightName]:
    tensors = [*embedding_weights(config), *every_layer(PRE_NORMS, config), *_mixers(config)]
    if config.experts is None:
        return [*tensors, *every_layer(mlp_projections(config), config), FINAL_NORM]
    experts = STACKED_EXPERTS if config.experts.stacked else expert_weights(config)
    shared = "mlp.shared_expert"
    experts = [
        *experts,
        WeightName("mlp.shared_expert_gate.weight", "One D -> D One", "mlp.shared_gate"),
        WeightName(f"{shared}.gate_proj.weight", "S D -> D S", "mlp.shared.gate_up", GATE),
        WeightName(f"{shared}.up_proj.weight", "S D -> D S", "mlp.shared.gate_up", UP),
        WeightName(f"{shared}.down_proj.weight", "D S -> S D", "mlp.shared.down"),
    ]
    return [
        *tensors,
        *every_layer(mlp_projections(config), config, sparse=False),
        *every_layer(experts, config, sparse=True),
        FINAL_NORM,
    ]


TRAITS = FamilyTraits(qk_norm="head", norm_offset=1.0, norm_rounds_last=True, gated="numbers")
RULES = ConfigRules(
    "qwen3_5_text",
    explicit=HEADS,
    neutral=MappingProxyType({"attention_bias": False, "attn_output_gate": True}),
    ignored=frozenset(
        {
            "mamba_ssm_dtype",
            "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
            "mlp_only_layers",
        }
    ),
    rope=RopeRules(theta=1e7, partial=0.25, sections=True),
    layers=_layers,
    recurrent=gated_delta,
    qkv_bias=False,
    output_bias=False,
)
MOE_RULES = replace(
    RULES,
    model_type="qwen3_5_moe_text",
    ignored=RULES.ignored | ROUTING | {"intermediate_size"},
    experts=_experts,
    mlp_size=no_mlp,
)
QWEN3_5 = Family(
    architectures={
        "Qwen3_5ForCausalLM": Architecture(RULES, _weights, TRAITS),
        "Qwen3_5MoeForCausalLM": Architecture(MOE_RULES, _weights, TRAITS),
        "Qwen3NextForCausalLM": Architecture(
            replace(
                RULES,
                model_type="qwen3_next",
                ignored=RULES.ignored | ROUTING,
                recurrent=_fused_delta,
                experts=_next_experts,
            ),
            _weights,
            TRAITS,
        ),
    }
)
