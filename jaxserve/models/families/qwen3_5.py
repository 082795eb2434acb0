"""Qwen3-Next (2025), Qwen3.5, 3.6 and 3.8 (Qwen team 2026), dense and with experts.

Three layers of four apply the gated delta rule, the others gated attention. Multimodal checkpoints
are served as text: the three positions of a text token are equal. Reference implementations:
`Qwen3NextForCausalLM`, `Qwen3_5ForCausalLM` and `Qwen3_5MoeForCausalLM` in Hugging Face
Transformers.
"""

from dataclasses import replace
from types import MappingProxyType

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.config.experts import MAX_EXPERT, Experts, expert_counts, expert_width
from jaxserve.models.config.fields import Fields, shown
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
from jaxserve.models.families.qwen import SHARED_EXPERT, STACKED_EXPERTS, sparse_layers
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import (
    FURTHER,
    VISION_KEYS,
    GgufMetadata,
    Raw,
    quotient,
    read_rope_scaling,
    skip_further,
)
from jaxserve.models.gguf.rules import (
    EXPERTS,
    LESS_ONE,
    ROUTER,
    SIZES,
    TENSORS,
    Change,
    GgufRules,
    log_of_negated,
)
from jaxserve.models.weight_names import (
    FINAL_NORM,
    PRE_NORMS,
    QK_NORMS,
    embedding_weights,
    every_layer,
    expert_weights,
    mlp_projections,
)
from jaxserve.models.weight_table import WeightName

DELTA = "delta"
SPLIT = "split_projections"
NEXT = "Qwen3NextForCausalLM"


def _layers(fields: Fields, layers: int) -> LayerTable:
    """Read `layer_types`. By default every n-th layer has attention (`full_attention_interval`)."""
    interval = fields.integer("full_attention_interval", 1, MAX_LAYERS, default=4)
    default = [LINEAR if (index + 1) % interval else FULL for index in range(layers)]
    kinds = layer_kinds(fields, layers, (FULL, LINEAR), default)
    mixers = tuple((DELTA,) if kind == LINEAR else (ATTENTION,) for kind in kinds)
    return LayerTable((None,) * layers, (True,) * layers, mixers)


def _fused_delta(fields: Fields) -> GatedDeltaSizes:
    """Read the sizes of Qwen3-Next. `split_projections` is jaxserve's field for GGUF files."""
    fused = not fields.flag(SPLIT, default=False)
    return replace(gated_delta(fields), fused=fused)


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
            WeightName(f"{name}.in_proj_qkvz.weight", "Fused D -> D Fused", "delta.fused")
        ]
    else:
        projections = [
            WeightName(f"{name}.in_proj_qkv.weight", "Qkv D -> D Qkv", "delta.mixed"),
            WeightName(f"{name}.in_proj_z.weight", "Vals D -> D Vals", "delta.gate"),
        ]
    if config.architecture == NEXT:
        pair = "(Keys P Per) D -> D P Keys Per"
        projections.append(WeightName(f"{name}.in_proj_ba.weight", pair, "delta.gates"))
    else:
        projections += [
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
    experts = [*experts, *SHARED_EXPERT]
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


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of Qwen3.5 to the config.json `raw` of a GGUF file.

    Raises:
        CheckpointError: the layers' kinds or the sizes of heads are malformed (see also
            `read_rope_scaling`).
    """
    skip_further(gguf, raw)
    raw["linear_value_head_dim"] = quotient(gguf, "ssm.inner_size", "ssm.time_step_rank")
    raw["partial_rotary_factor"] = gguf.get("rope.dimension_count", 0) / (raw["head_dim"] or 1)
    read_rope_scaling(gguf, raw)
    layers, recurrent = raw.get("num_hidden_layers"), gguf.get(RECURRENT)
    if recurrent is not None and type(layers) is int:
        blocks = gguf.get("block_count")
        if not isinstance(recurrent, np.ndarray) or len(recurrent) != blocks:
            raise CheckpointError(
                f"{gguf.path}: {gguf.key(RECURRENT)} is {shown(recurrent)}; allowed: true or false "
                f"for each of {blocks} blocks"
            )
        raw["layer_types"] = [LINEAR if flag else FULL for flag in recurrent[:layers]]


def _finish_next_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    _finish_gguf(gguf, raw)
    # Older files have one tensor of all projections, as the checkpoint.
    raw[SPLIT] = not any(name.endswith(".ssm_in.weight") for name in gguf.tensors)
    # Fixed in llama.cpp's code: the weights of the chosen experts are divided by their sum.
    raw["norm_topk_prob"] = True


def _change_next(config: ModelConfig, name: str) -> Change | None:
    """Return how a GGUF file's tensor differs from the checkpoint's, given the latter's name."""
    sizes = config.recurrent
    assert isinstance(sizes, GatedDeltaSizes)
    if name.endswith(".A_log"):
        return Change(restore=log_of_negated)
    if name.endswith(".conv1d.weight"):
        return Change((sum(sizes.parts), 1, sizes.width))
    if name.endswith(".shared_expert_gate.weight"):
        return Change((1, config.hidden_size))
    is_offset = name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight")
    return LESS_ONE if is_offset else None


def _change(config: ModelConfig, name: str) -> Change | None:
    """Return how a GGUF file's tensor differs from the checkpoint's, given the latter's name.

    The file has the value heads of all keys in turn: the first head of each key, then the second
    head of each. In the checkpoint the heads of a key are neighbours.
    """
    change, sizes = _change_next(config, name) or Change(), config.recurrent
    assert isinstance(sizes, GatedDeltaSizes)
    _, layer, ending = name.rpartition(".linear_attn.")
    if not layer or sizes.groups == sizes.heads:
        return change
    heads = np.arange(sizes.heads).reshape(-1, sizes.groups).T.reshape(-1)
    values = (heads[:, None] * sizes.outputs + np.arange(sizes.outputs)).reshape(-1)
    keys = 2 * sizes.groups * sizes.inputs
    if ending in ("in_proj_qkv.weight", "conv1d.weight"):
        return replace(change, rows=np.concatenate([np.arange(keys), keys + values]))
    if ending == "in_proj_z.weight":
        return replace(change, rows=values)
    if ending in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        return replace(change, rows=heads)
    return replace(change, columns=values) if ending == "out_proj.weight" else change


RECURRENT = "attention.recurrent_layers"
_DELTA = "model.layers.{}.linear_attn"
_GGUF_TENSORS = MappingProxyType(
    {
        **TENSORS,
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.attn_qkv": f"{_DELTA}.in_proj_qkv",
        "blk.{}.attn_gate": f"{_DELTA}.in_proj_z",
        "blk.{}.ssm_alpha": f"{_DELTA}.in_proj_a",
        "blk.{}.ssm_beta": f"{_DELTA}.in_proj_b",
        "blk.{}.ssm_conv1d": f"{_DELTA}.conv1d",
        "blk.{}.ssm_a": f"{_DELTA}.A_log",
        "blk.{}.ssm_dt.bias": f"{_DELTA}.dt_bias",
        "blk.{}.ssm_norm": f"{_DELTA}.norm",
        "blk.{}.ssm_out": f"{_DELTA}.out_proj",
    }
)
_GGUF_EXPERTS = MappingProxyType(
    {
        **_GGUF_TENSORS,
        **ROUTER,
        "blk.{}.ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
        "blk.{}.ffn_gate_shexp": "model.layers.{}.mlp.shared_expert.gate_proj",
        "blk.{}.ffn_up_shexp": "model.layers.{}.mlp.shared_expert.up_proj",
        "blk.{}.ffn_down_shexp": "model.layers.{}.mlp.shared_expert.down_proj",
    }
)
_GGUF_FIELDS = MappingProxyType(
    {
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
        "full_attention_interval": "full_attention_interval",
    }
)
_GGUF_EXPERT_FIELDS = MappingProxyType(
    {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
)
_GGUF_SIZES = SIZES | frozenset(
    {
        *(_GGUF_FIELDS.keys() - {"full_attention_interval"}),
        "ssm.inner_size",
        "rope.dimension_count",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
    }
)
QWEN35_GGUF = GgufRules(
    "Qwen3_5ForCausalLM",
    _finish_gguf,
    tensors=_GGUF_TENSORS,
    fields=_GGUF_FIELDS,
    read=VISION_KEYS | {FURTHER, "ssm.inner_size"},
    change=_change,
    required=_GGUF_SIZES,
    lists=frozenset({RECURRENT}),
)
QWEN35_MOE_GGUF = replace(
    QWEN35_GGUF,
    name="Qwen3_5MoeForCausalLM",
    tensors=_GGUF_EXPERTS,
    fields=MappingProxyType({**_GGUF_FIELDS, **_GGUF_EXPERT_FIELDS}),
    experts=EXPERTS,
    required=_GGUF_SIZES | _GGUF_EXPERT_FIELDS.keys(),
)
QWEN3_5 = Family(
    architectures={
        "Qwen3_5ForCausalLM": Architecture(RULES, _weights, TRAITS),
        "Qwen3_5MoeForCausalLM": Architecture(MOE_RULES, _weights, TRAITS),
        NEXT: Architecture(
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
    },
    gguf={
        "qwen35": QWEN35_GGUF,
        "qwen35moe": QWEN35_MOE_GGUF,
        "qwen3next": replace(
            QWEN35_MOE_GGUF,
            name=NEXT,
            finish=_finish_next_gguf,
            tensors=MappingProxyType(
                {
                    **_GGUF_EXPERTS,
                    "blk.{}.ssm_in": f"{_DELTA}.in_proj_qkvz",
                    "blk.{}.ssm_ba": f"{_DELTA}.in_proj_ba",
                }
            ),
            change=_change_next,
        ),
    },
)
