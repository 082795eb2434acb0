"""Kimi-Linear (Moonshot AI 2025, arXiv:2510.26692): Kimi's delta rule, and latent attention.

Latent attention, in one layer of four, has no rotation. Reference implementation:
`KimiLinearForCausalLM` in Hugging Face Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.models.config.experts import Experts
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.latent import Latent
from jaxserve.models.config.layers import FULL, LATENT, LINEAR, LayerTable, layer_kinds
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.recurrent import MAX_HEADS, MAX_SIZE, MAX_TAPS, ChannelDeltaSizes
from jaxserve.models.config.rules import ROUTING, ConfigRules
from jaxserve.models.families.deepseek import (
    CORRECTION,
    SHARED,
    attention,
    read_latent,
    read_latent_sizes,
)
from jaxserve.models.families.deepseek import GGUF as DEEPSEEK_GGUF
from jaxserve.models.families.glm4_moe_lite import listed_experts
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, layers_with, read_scored
from jaxserve.models.gguf.rules import SIZES, Change, log_of_negated
from jaxserve.models.weight_names import (
    FINAL_NORM,
    PRE_NORMS,
    embedding_weights,
    every_layer,
    expert_weights,
    mlp_projections,
)
from jaxserve.models.weight_table import WeightName

DELTA = "channel_delta"
LINEAR_CONFIG = "linear_attn_config"
EXPERT_PARTS = "w1", "w3", "w2"
PROJECTED = "f_a", "f_b", "g_a", "g_b"  # projections of decays and gates, of low rank
# Names of fields in Moonshot's files by their names in DeepSeek's.
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
)
NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "mla_use_nope": True,
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
    }
)


def _linear(fields: Fields) -> Fields:
    """Return the fields of `linear_attn_config`, or no fields if it is absent."""
    raw = fields.take(LINEAR_CONFIG)
    if raw is not None and not isinstance(raw, dict):
        fields.refuse(LINEAR_CONFIG, "an object, or nothing")
    return Fields(raw if isinstance(raw, dict) else {}, fields.problems, f"{LINEAR_CONFIG}.")


def _layers(fields: Fields, layers: int) -> LayerTable:
    """Read the kinds of layers: `layer_types`, or the lists of layers, which count from 1."""
    linear = _linear(fields)
    kinds = [FULL if index and index % 4 == 0 else LINEAR for index in range(layers)]
    lists = [linear.take(name) for name in ("full_attn_layers", "kda_layers")]
    if any(part is not None for part in lists):
        full, delta = (part if isinstance(part, list) else [] for part in lists)
        if [*range(1, layers + 1)] == sorted(map(_number, [*full, *delta])):
            kinds = [FULL if index + 1 in full else LINEAR for index in range(layers)]
        else:
            allowed = f"with kda_layers each number from 1 to {layers} once"
            linear.refuse("full_attn_layers", allowed)
    for name in ("head_dim", "num_heads", "short_conv_kernel_size"):
        linear.take(name)
    linear.finish(frozenset())
    return delta_layers(layer_kinds(fields, layers, (FULL, LINEAR), kinds), rotates=False)


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def delta_layers(kinds: list[str], rotates: bool) -> LayerTable:
    """Return the LayerTable of layers with latent attention (FULL) or Kimi's delta rule."""
    mixers = tuple((LATENT,) if kind == FULL else (DELTA,) for kind in kinds)
    return LayerTable((None,) * len(kinds), (rotates,) * len(kinds), mixers)


def _sizes(fields: Fields) -> ChannelDeltaSizes:
    linear = _linear(fields)

    def read(name: str, other: str, low: int, high: int, default: int) -> int:
        if linear.has(name):
            fields.take(other)
            return linear.integer(name, low, high)
        return fields.integer(other, low, high, default=default)

    heads = read("num_heads", "linear_num_heads", 1, MAX_HEADS, 32)
    size = read("head_dim", "linear_head_dim", 1, MAX_SIZE, 128)
    width = read("short_conv_kernel_size", "linear_conv_kernel_dim", 2, MAX_TAPS, 4)
    return ChannelDeltaSizes(width, heads, heads, size, size, rank=size)


def _latent(fields: Fields) -> Latent:
    latent = read_latent(fields, interleaved=False, reads_head=False)
    hidden, heads = (fields.take(name) for name in ("hidden_size", "num_attention_heads"))
    # Published files have the quotient of both, which has no effect.
    if type(hidden) is int and type(heads) is int and heads > 0:
        check_head(fields, latent.rotary, hidden // heads)
    return latent


def check_head(fields: Fields, *allowed: int) -> None:
    """Refuse a `head_dim` that is present and has none of the allowed values."""
    value = fields.take("head_dim")
    if value is not None and value not in allowed:
        fields.refuse("head_dim", f"{' or '.join(map(str, dict.fromkeys(allowed)))}, or nothing")


def _experts(fields: Fields, layers: int) -> Experts:
    return listed_experts(fields, layers, first=1)


def delta_weights(config: ModelConfig) -> list[WeightName]:
    """Return the tensors of a layer's delta rule, without the projections of decays and gates."""
    assert isinstance(config.recurrent, ChannelDeltaSizes)
    first, layer = 0, list[WeightName]()
    for letter, size in zip("qkv", config.recurrent.parts, strict=True):
        part, side = np.s_[..., first : first + size], "Vals" if letter == "v" else "Query"
        inputs, taps = f"{side} D -> D {side}", f"{side} One W -> W One {side}"
        layer += [
            WeightName(f"self_attn.{letter}_proj.weight", inputs, "delta.mixed", part),
            WeightName(f"self_attn.{letter}_conv1d.weight", taps, "delta.taps", part),
        ]
        first += size
    biases = np.s_[0, :, 1:]
    return [
        *layer,
        WeightName("self_attn.b_proj.weight", "Heads D -> D Heads", "delta.write"),
        WeightName(
            "self_attn.dt_bias", "(Heads Inputs) -> Heads Inputs", "delta.constants", biases
        ),
        WeightName("self_attn.o_norm.weight", "Out -> Out", "delta.norm.scale"),
        WeightName("self_attn.o_proj.weight", "D Vals -> Vals D", "delta.out"),
    ]


def _delta(config: ModelConfig) -> list[WeightName]:
    rates = "One Unit Heads Single -> Unit Heads Single"
    return [
        *delta_weights(config),
        WeightName("self_attn.A_log", rates, "delta.constants", np.s_[..., :1]),
        WeightName("self_attn.f_a_proj.weight", "Rank D -> D Rank", "delta.decay_down"),
        WeightName("self_attn.f_b_proj.weight", "Query Rank -> Rank Query", "delta.decay"),
        WeightName("self_attn.g_a_proj.weight", "Rank D -> D Rank", "delta.gate_down"),
        WeightName("self_attn.g_b_proj.weight", "Vals Rank -> Rank Vals", "delta.gate"),
    ]


def hybrid_weights(
    config: ModelConfig,
    delta: list[WeightName],
    latent: list[WeightName],
    experts: list[WeightName],
) -> list[WeightName]:
    """Return the tensors of a model with the tensors of each of its parts of a layer."""
    return [
        *embedding_weights(config),
        *every_layer(PRE_NORMS, config),
        *every_layer(latent, config, mixer=LATENT),
        *every_layer(delta, config, mixer=DELTA),
        *every_layer(mlp_projections(config), config, sparse=False),
        *every_layer([*experts, *SHARED, CORRECTION], config, sparse=True),
        FINAL_NORM,
    ]


def _weights(config: ModelConfig) -> list[WeightName]:
    experts = expert_weights(config, names=EXPERT_PARTS)
    return hybrid_weights(config, _delta(config), attention(config), experts)


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of Kimi-Linear to the config.json `raw`.

    Layers of the delta rule have no heads of keys and values. Errors are those of
    `read_latent_sizes`.
    """
    attends = layers_with(gguf, "attention.head_count_kv", raw.get("num_hidden_layers"))
    read_latent_sizes(gguf, raw)
    raw["layer_types"] = [FULL if flag else LINEAR for flag in attends]
    raw["linear_num_heads"] = raw.get("num_attention_heads")
    raw.setdefault("norm_topk_prob", True)
    read_scored(gguf, raw)


def _change(config: ModelConfig, name: str) -> Change | None:
    """Return how a GGUF file's tensor differs from the checkpoint's, given the latter's name."""
    sizes = config.recurrent
    if not isinstance(sizes, ChannelDeltaSizes):
        return None
    if name.endswith(".A_log"):
        return Change((1, 1, sizes.heads, 1), log_of_negated)
    if name.endswith("_conv1d.weight"):
        return Change((sizes.heads * sizes.inputs, 1, sizes.width))
    return None


_LAYER = "model.layers.{}.self_attn"
_GGUF_FIELDS = {
    "kda.head_dim": "linear_head_dim",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
}
GGUF = replace(
    DEEPSEEK_GGUF,
    name="KimiLinearForCausalLM",
    finish=_finish_gguf,
    tensors=MappingProxyType(
        {
            **DEEPSEEK_GGUF.tensors,
            **{f"blk.{{}}.ssm_conv1d_{part}": f"{_LAYER}.{part}_conv1d" for part in "qkv"},
            **{f"blk.{{}}.ssm_{part}": f"{_LAYER}.{part}_proj" for part in PROJECTED},
            "blk.{}.ssm_beta": f"{_LAYER}.b_proj",
            "blk.{}.ssm_a": f"{_LAYER}.A_log",
            "blk.{}.ssm_dt.bias": f"{_LAYER}.dt_bias",
            "blk.{}.ssm_norm": f"{_LAYER}.o_norm",
        }
    ),
    fields=MappingProxyType({**DEEPSEEK_GGUF.fields, **_GGUF_FIELDS}),
    read=frozenset({"attention.key_length_mla", "attention.value_length_mla"}),
    experts=MappingProxyType(
        {
            f"ffn_{name}": f"model.layers.{{}}.mlp.experts.{{}}.{part}.weight"
            for name, part in zip(("gate", "up", "down"), EXPERT_PARTS, strict=True)
        }
    ),
    change=_change,
    required=SIZES
    | _GGUF_FIELDS.keys()
    | {
        "attention.head_count_kv",
        "attention.key_length_mla",
        "attention.kv_lora_rank",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length_mla",
        "expert_feed_forward_length",
        "rope.dimension_count",
    },
    # The chosen weights are normalized in llama.cpp's code, and a sigmoid is the default.
    computed=MappingProxyType({"expert_gating_func": (0, 2), "expert_weights_norm": (True,)}),
    absent=frozenset({"attention.head_count_kv"}),
)
KIMI_LINEAR = Family(
    architectures={
        "KimiLinearForCausalLM": Architecture(
            ConfigRules(
                "kimi_linear",
                renamed=RENAMED,
                neutral=NEUTRAL,
                ignored=ROUTING | {"pretraining_tp"},
                layers=_layers,
                experts=_experts,
                latent=_latent,
                recurrent=_sizes,
            ),
            _weights,
            FamilyTraits(router="sigmoid"),
            tensors=((r"\.block_sparse_moe\.", ".mlp."),),
        ),
    },
    gguf={"kimi-linear": GGUF},
)
