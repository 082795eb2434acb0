"""DeepSeek-V2 and V3 (2024, arXiv:2405.04434 and 2412.19437): latent attention, shared experts.

V2 chooses experts by softmax probability, V3 by sigmoid scores plus a correction. The first layers
are dense. Sarvam 105B (2026) is V3 with other names of fields. Reference implementations:
`DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM` in Hugging Face Transformers. The modules that
predict further tokens are not used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models.config.experts import (
    MAX_SCALE,
    Experts,
    expert_counts,
    expert_groups,
    expert_width,
)
from jaxserve.models.config.fields import Fields, shown
from jaxserve.models.config.latent import MAX_RANK, MAX_SIZE, Latent
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import ROUTING, ConfigRules
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import (
    FURTHER,
    GgufMetadata,
    Raw,
    has_tensor,
    read_rope_scaling,
    read_scored,
)
from jaxserve.models.gguf.rules import EXPERTS, SCORED, SCORED_FIELDS, GgufRules
from jaxserve.models.weight_names import (
    FINAL_NORM,
    GATE,
    PRE_NORMS,
    UP,
    embedding_weights,
    every_layer,
    expert_weights,
    mlp_projections,
)
from jaxserve.models.weight_table import WeightName

SOFTMAX, SIGMOID = 1, 2  # values of llama.cpp's expert_gating_func


def _v2_experts(fields: Fields, layers: int) -> Experts:
    method = fields.choice("topk_method", ("greedy", "group_limited_greedy"), default="greedy")
    if method == "greedy":
        fields.take("n_group")
        fields.take("topk_group")
    return read_experts(fields, layers, method != "greedy", normalize=False)


def _v3_experts(fields: Fields, layers: int) -> Experts:
    normalize = fields.flag("norm_topk_prob", default=True)
    return read_experts(fields, layers, True, normalize=normalize)


def read_experts(
    fields: Fields,
    layers: int,
    grouped: bool,
    normalize: bool,
    sparse: tuple[bool, ...] | None = None,
) -> Experts:
    """Read the mixture of experts of the fields of a config.json.

    Args:
        fields: the fields.
        layers: number of layers.
        grouped: whether experts are chosen from the best groups.
        normalize: whether the weights of the chosen experts are divided by their sum.
        sparse: for each layer whether it has experts, or None to read the number of dense layers.
    """
    count, chosen = expert_counts(fields, ("n_routed_experts",))
    width = expert_width(fields, "moe_intermediate_size")
    if sparse is None:
        first = fields.integer("first_k_dense_replace", 0, 1 << 20)
        sparse = tuple(index >= first for index in range(layers))
    groups = kept_groups = 1
    if grouped:
        groups, kept_groups = expert_groups(fields, count, chosen)
    return Experts(
        count,
        width,
        chosen,
        sparse,
        normalize=normalize,
        scaling=fields.number("routed_scaling_factor", 0.0, MAX_SCALE),
        groups=groups,
        kept_groups=kept_groups,
        shared=width * fields.integer("n_shared_experts", 1, 64),
    )


def _v2_latent(fields: Fields) -> Latent:
    return read_latent(fields, True)


def v3_latent(fields: Fields) -> Latent:
    """Read the sizes of DeepSeek-V3's latent attention from the fields of a config.json."""
    return read_latent(fields, fields.flag("rope_interleave", default=True))


def read_latent(
    fields: Fields, interleaved: bool, whole_head: bool = False, reads_head: bool = True
) -> Latent:
    """Read the sizes of latent attention from the fields of a config.json.

    Args:
        fields: the fields.
        interleaved: whether the checkpoint pairs neighbouring dimensions for the rotation.
        whole_head: whether `head_dim` is the size of a key, and not of its rotated part.
        reads_head: whether `head_dim` must have one of these sizes, if it is present.
    """
    if not fields.mentions("q_lora_rank"):
        fields.refuse("q_lora_rank", "a rank, or null for queries without one")
    rank = fields.take("q_lora_rank")
    latent = Latent(
        query_rank=None if rank is None else fields.integer("q_lora_rank", 1, MAX_RANK),
        rank=fields.integer("kv_lora_rank", 1, MAX_RANK),
        plain=fields.integer("qk_nope_head_dim", 1, MAX_SIZE),
        rotary=fields.integer("qk_rope_head_dim", 2, MAX_SIZE),
        value=fields.integer("v_head_dim", 1, MAX_SIZE),
        interleaved=interleaved,
    )
    # Both fields are derived. Most classes of Transformers store the rotated part as head_dim, and
    # files for vLLM the size of a cell of the cache.
    head = latent.key if whole_head else latent.rotary
    derived = {"head_dim": (head, latent.cell)} if reads_head else {}
    for name, sizes in (derived | {"qk_head_dim": (latent.key,)}).items():
        if fields.has(name) and fields.take(name) not in sizes:
            fields.refuse(name, f"{' or '.join(map(str, sizes))}, or nothing")
        fields.take(name)
    return latent


def latent_weights(
    config: ModelConfig, experts: Sequence[WeightName] | None = None
) -> list[WeightName]:
    """Return the tensors of a model with latent attention and shared experts.

    `experts` are the router and the experts of a layer, by default with a tensor for each matrix.
    """
    routed = expert_weights(config) if experts is None else experts
    return [
        *embedding_weights(config),
        *every_layer([*PRE_NORMS, *attention(config)], config),
        *every_layer(mlp_projections(config), config, sparse=False),
        *every_layer([*routed, *SHARED], config, sparse=True),
        FINAL_NORM,
    ]


def v3_weights(config: ModelConfig) -> list[WeightName]:
    """Return the tensors of DeepSeek-V3, whose router has a correction for each expert."""
    return [*latent_weights(config), *every_layer([CORRECTION], config, sparse=True)]


CORRECTION = WeightName("mlp.gate.e_score_correction_bias", "E -> E", "mlp.correction")
SHARED = (
    WeightName("mlp.shared_experts.gate_proj.weight", "S D -> D S", "mlp.shared.gate_up", GATE),
    WeightName("mlp.shared_experts.up_proj.weight", "S D -> D S", "mlp.shared.gate_up", UP),
    WeightName("mlp.shared_experts.down_proj.weight", "D S -> S D", "mlp.shared.down"),
)


def attention(config: ModelConfig) -> list[WeightName]:
    """Return the tensors of a layer's latent attention."""
    layer = [
        WeightName("self_attn.kv_a_proj_with_mqa.weight", "J D -> D J", "attention.down"),
        WeightName("self_attn.kv_a_layernorm.weight", "C -> C", "attention.norm.scale"),
        *_projections_of_heads(config),
        WeightName("self_attn.o_proj.weight", "D (K U) -> K U D", "attention.out"),
    ]
    if config.attention_bias:
        layer += [
            WeightName("self_attn.kv_a_proj_with_mqa.bias", "J -> J", "attention.down_bias"),
            WeightName("self_attn.o_proj.bias", "D -> D", "attention.out_bias"),
        ]
    if config.latent is None or config.latent.query_rank is None:
        return [
            *layer,
            WeightName("self_attn.q_proj.weight", "(K A) D -> D K A", "attention.query"),
        ]
    norm = WeightName("self_attn.q_a_layernorm.weight", "L -> L", "attention.query_norm.scale")
    down = WeightName("self_attn.q_a_proj.weight", "L D -> D L", "attention.query_down")
    up = WeightName("self_attn.q_b_proj.weight", "(K A) L -> L K A", "attention.query")
    if config.attention_bias:
        bias = WeightName("self_attn.q_a_proj.bias", "L -> L", "attention.query_down_bias")
        layer.append(bias)
    return [*layer, norm, down, up]


def _projections_of_heads(config: ModelConfig) -> list[WeightName]:
    # In the file the rows of each head are those of its keys, then those of its values.
    latent, heads = config.latent, config.num_attention_heads
    assert latent is not None
    keys, values, parts = "attention.key_up", "attention.value_up", list[WeightName]()
    name, each = "self_attn.kv_b_proj.weight", latent.plain + latent.value
    for head in range(heads):
        if latent.divided:
            apart = f"self_attn.k_b_proj.{head}.weight"
            parts.append(WeightName(apart, "C B -> B C", keys, (head,)))
            apart = f"self_attn.v_b_proj.{head}.weight"
            parts.append(WeightName(apart, "U C -> C U", values, (head,)))
            continue
        rows = head * each, heads * each
        parts.append(WeightName(name, "B C -> B C", keys, (head,), 2 * head, rows=rows))
        rows = head * each + latent.plain, heads * each
        parts.append(WeightName(name, "U C -> C U", values, (head,), 2 * head + 1, rows=rows))
    return parts


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    # The fields of DeepSeek-V2, or of V3 if the router uses sigmoids.
    finish_latent_gguf(gguf, raw)
    _finish_router(gguf, raw)


def finish_latent_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add fields of latent attention, its rotary embedding and experts to the config.json `raw`.

    Errors are those of `read_latent_sizes`.
    """
    read_latent_sizes(gguf, raw)
    read_scored(gguf, raw)
    read_rope_scaling(gguf, raw)
    scaling = raw.get("rope_scaling", {})
    if scaling.get("rope_type") == "yarn":
        growth = gguf.get("rope.scaling.yarn_log_multiplier")
        if type(growth) is not float or not growth > 0:
            key = gguf.key("rope.scaling.yarn_log_multiplier")
            raise UnsupportedModel(f"{gguf.path}: {key} is {shown(growth)}; allowed: above 0")
        # The file stores a tenth of the value. Equal values scale the scores, but not cosines and
        # sines.
        scale = round(10 * growth, 6)
        scaling |= {"mscale": scale, "mscale_all_dim": scale}


def read_latent_sizes(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the sizes of latent attention to the config.json `raw`.

    Older files have the sizes of a head under the usual metadata keys. In newer files the keys with
    `_mla` have these sizes, and the usual keys describe the single head that latent attention is
    equivalent to when the upward projection is absorbed into the queries.

    Raises:
        CheckpointError: the sizes of a head do not fit each other.
    """
    size = gguf.get("attention.key_length_mla") or raw.get("head_dim")
    raw["v_head_dim"] = gguf.get("attention.value_length_mla") or raw.get("v_head_dim")
    rotary = raw.get("qk_rope_head_dim")
    if type(size) is not int or type(rotary) is not int or size <= rotary:
        raise CheckpointError(f"{gguf.path}: heads of {shown(size)}, {shown(rotary)} of it rotated")
    raw["qk_nope_head_dim"] = size - rotary
    raw.pop("head_dim", None)
    raw["num_key_value_heads"] = raw.get("num_attention_heads")
    raw.setdefault("q_lora_rank", None)


def _finish_router(gguf: GgufMetadata, raw: Raw) -> None:
    corrected = has_tensor(gguf, ".exp_probs_b.bias")
    gating = gguf.get("expert_gating_func") or (SIGMOID if corrected else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise UnsupportedModel(
            f"{gguf.path}: {gguf.key('expert_gating_func')} is {shown(gating)}; allowed: "
            f"{SOFTMAX} (softmax), {SIGMOID} (sigmoid)"
        )
    if gating == SIGMOID:
        raw["architectures"] = ["DeepseekV3ForCausalLM"]
    else:
        grouped = raw["n_group"] != 1
        raw["topk_method"] = "group_limited_greedy" if grouped else "greedy"


NEUTRAL: Mapping[str, Any] = MappingProxyType({"mlp_bias": False, "moe_layer_freq": 1})
IGNORED = ROUTING | {"aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"}
GGUF = GgufRules(
    "DeepseekV2ForCausalLM",
    _finish_gguf,
    tensors=MappingProxyType(
        {
            **SCORED,
            "blk.{}.attn_q_a": "model.layers.{}.self_attn.q_a_proj",
            "blk.{}.attn_q_b": "model.layers.{}.self_attn.q_b_proj",
            "blk.{}.attn_q_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
            "blk.{}.attn_kv_a_mqa": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
            "blk.{}.attn_kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm",
            "blk.{}.attn_kv_b": "model.layers.{}.self_attn.kv_b_proj",
        }
    ),
    fields=MappingProxyType(
        {
            **SCORED_FIELDS,
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
            "rope.dimension_count": "qk_rope_head_dim",
            "attention.value_length": "v_head_dim",
        }
    ),
    read=frozenset({
        "attention.key_length_mla", "attention.value_length_mla", "expert_gating_func",
        "rope.scaling.yarn_log_multiplier", FURTHER,
    }),
    experts=EXPERTS,
    heads=MappingProxyType(
        {
            "attn_k_b": "model.layers.{}.self_attn.k_b_proj.{}.weight",
            "attn_v_b": "model.layers.{}.self_attn.v_b_proj.{}.weight",
        }
    ),
)  # fmt: skip
_V3_RULES = ConfigRules(
    "deepseek_v3",
    aliases=frozenset({"kimi_k2"}),
    neutral=MappingProxyType({**NEUTRAL, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
    ignored=IGNORED | {"num_nextn_predict_layers"},
    extra_layers="num_nextn_predict_layers",
    experts=_v3_experts,
    latent=v3_latent,
)
DEEPSEEK = Family(
    architectures={
        "DeepseekV2ForCausalLM": Architecture(
            ConfigRules(
                "deepseek_v2",
                neutral=MappingProxyType(
                    {**NEUTRAL, "norm_topk_prob": False, "scoring_func": "softmax"}
                ),
                ignored=IGNORED,
                experts=_v2_experts,
                latent=_v2_latent,
            ),
            latent_weights,
        ),
        "DeepseekV3ForCausalLM": Architecture(
            _V3_RULES,
            v3_weights,
            FamilyTraits(router="sigmoid"),
        ),
        "SarvamMLAForCausalLM": Architecture(
            replace(
                _V3_RULES,
                model_type="sarvam_mla",
                aliases=frozenset(),
                renamed=MappingProxyType(
                    {
                        "num_experts": "n_routed_experts",
                        "num_mtp_layers": "num_nextn_predict_layers",
                        "num_shared_experts": "n_shared_experts",
                        "q_head_dim": "qk_head_dim",
                    }
                ),
                defaults=MappingProxyType({"n_group": 1, "q_lora_rank": None, "topk_group": 1}),
                rope=RopeRules(kinds=(*RopeRules.kinds, "deepseek_yarn")),
            ),
            v3_weights,
            FamilyTraits(router="sigmoid"),
            computed_by="DeepseekV3ForCausalLM",
        ),
    },
    gguf={"deepseek2": GGUF},
)
