"""LFM2 (2025) and LFM3 (2026) by Liquid AI: short convolutions, and attention in some layers.

LFM2-MoE has experts after its first layers. LFM3 adds windows, a rotation for each kind of
attention, a gate for each query head, and norms of the results of mixers and MLPs. Reference
implementations: `Lfm2ForCausalLM`, `Lfm2MoeForCausalLM` and `Lfm3ForCausalLM` in Hugging Face
Transformers.
"""

from dataclasses import replace
from types import MappingProxyType

from jaxserve.models.config.experts import MAX_SCALE, Experts, expert_counts, expert_width
from jaxserve.models.config.fields import MAX_POSITIONS, Fields
from jaxserve.models.config.layers import ATTENTION, FULL, SLIDING, LayerTable, layer_kinds
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.recurrent import ShortConvSizes
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, MAX_MLP, ROUTING, ConfigRules, plain_mlp
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, layers_with, read_rope
from jaxserve.models.gguf.rules import EXPERTS, ROUTER, SIZES, Change, GgufRules
from jaxserve.models.gguf.rules import TENSORS as GGUF_TENSORS
from jaxserve.models.weight_names import (
    FINAL_NORM,
    PRE_NORMS,
    QK_NORMS,
    attention_projections,
    embedding_weights,
    every_layer,
    expert_weights,
    mlp_projections,
)
from jaxserve.models.weight_table import WeightName

CONV = "conv"
MAX_TAPS = 64


def layers_by_kind(fields: Fields, layers: int) -> LayerTable:
    """Read `layer_types`, or the attention layers in `full_attn_idxs`, by default all layers."""
    kinds, listed = fields.take("layer_types"), fields.take("full_attn_idxs")
    if kinds is None:
        indices = range(layers) if listed is None else listed
        if not isinstance(indices, list | range) or any(
            type(index) is not int or not 0 <= index < layers for index in indices
        ):
            fields.refuse("full_attn_idxs", f"a list of layers, 0 to {layers - 1}")
            indices = []
        kinds = [FULL if index in indices else CONV for index in range(layers)]
    elif (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in (FULL, CONV) for kind in kinds)
    ):
        fields.refuse("layer_types", f"{FULL!r} or {CONV!r} for each of {layers} layers")
        kinds = [FULL] * layers
    mixers = tuple((CONV,) if kind == CONV else (ATTENTION,) for kind in kinds)
    return LayerTable((None,) * layers, (True,) * layers, mixers)


def layers_with_windows(fields: Fields, layers: int) -> LayerTable:
    """Read `layer_types`, and the window of the layers with `sliding_attention`.

    By default every second layer is a convolution, and the others have attention in turn, without
    a window first, except for the first layer.
    """
    period = (SLIDING, CONV, FULL, CONV)
    default = [period[index % 4] if index else CONV for index in range(layers)]
    kinds = layer_kinds(fields, layers, (FULL, SLIDING, CONV), default)
    window = None
    if SLIDING in kinds:
        window = fields.integer("sliding_window", 1, MAX_POSITIONS)
    else:
        fields.take("sliding_window")
    return LayerTable(
        tuple(window if kind == SLIDING else None for kind in kinds),
        (True,) * layers,
        tuple((CONV,) if kind == CONV else (ATTENTION,) for kind in kinds),
    )


def _experts(fields: Fields, layers: int) -> Experts:
    count, chosen = expert_counts(fields, ("num_experts",))
    dense = fields.integer("num_dense_layers", 0, layers, default=2)
    return Experts(
        count,
        expert_width(fields, "moe_intermediate_size"),
        chosen,
        tuple(index >= dense for index in range(layers)),
        normalize=fields.flag("norm_topk_prob", default=True),
        scaling=fields.number("routed_scaling_factor", 0.0, MAX_SCALE, default=1.0),
        sum_eps=1e-6,
        corrected=fields.flag("use_expert_bias", default=True),
    )


def short_conv(fields: Fields) -> ShortConvSizes:
    """Read the sizes of the convolutions."""
    return ShortConvSizes(
        fields.integer("hidden_size", 1, 1 << 17),
        fields.integer("conv_L_cache", 2, MAX_TAPS, default=3),
        fields.flag("conv_bias", default=False),
    )


def _mlp_size(fields: Fields) -> int:
    """Read the width of the MLP, from which LFM2 derives another width unless told otherwise."""
    size = fields.integer("intermediate_size", 1, MAX_MLP)
    multiple = fields.integer("block_multiple_of", 1, MAX_MLP, default=256)
    factor = fields.number("block_ffn_dim_multiplier", 0.0, 64.0, default=1.0)
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    return multiple * -(-int(factor * int(2 * size / 3)) // multiple)


def conv_weights(config: ModelConfig) -> list[WeightName]:
    """Return the tensors of one convolution."""
    tensors = [
        WeightName("conv.in_proj.weight", "(X Y) D -> D X Y", "conv.into"),
        WeightName("conv.conv.weight", "Y One W -> W One Y", "conv.taps"),
        WeightName("conv.out_proj.weight", "D Y -> Y D", "conv.out"),
    ]
    if isinstance(config.recurrent, ShortConvSizes) and config.recurrent.bias:
        tensors += [
            WeightName("conv.in_proj.bias", "(X Y) -> X Y", "conv.into_bias"),
            WeightName("conv.conv.bias", "(One Y) -> One Y", "conv.taps_bias"),
            WeightName("conv.out_proj.bias", "D -> D", "conv.out_bias"),
        ]
    return tensors


def _weights(config: ModelConfig) -> list[WeightName]:
    attention = [*attention_projections(config), *QK_NORMS]
    return [
        *embedding_weights(config),
        *every_layer([*PRE_NORMS, *mlp_projections(config)], config),
        *every_layer(attention, config, mixer=ATTENTION),
        *every_layer(conv_weights(config), config, mixer=CONV),
        FINAL_NORM,
    ]


def _moe_weights(config: ModelConfig) -> list[WeightName]:
    experts = config.experts
    assert experts is not None
    sparse = expert_weights(config)
    if experts.corrected:
        sparse.append(WeightName("mlp.expert_bias", "E -> E", "mlp.correction"))
    mixers = [weight for weight in _weights(config) if ".mlp." not in weight.name]
    dense = every_layer(mlp_projections(config), config, sparse=False)
    return [*mixers, *dense, *every_layer(sparse, config, sparse=True)]


def _weights_with_gates(config: ModelConfig) -> list[WeightName]:
    gates = WeightName("self_attn.g_proj.weight", "(K G) D -> D K G", "attention.head_gate")
    norms = [
        WeightName("post_operator_norm.weight", "D -> D", "attention_out_norm.scale"),
        WeightName("post_ffn_norm.weight", "D -> D", "mlp_out_norm.scale"),
    ]
    return [
        *_weights(config),
        *every_layer([gates], config, mixer=ATTENTION),
        *every_layer(norms, config),
    ]


TENSORS = (
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.q_layernorm\.", ".q_norm."),
    (r"\.k_layernorm\.", ".k_norm."),
    (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),
    (r"\.feed_forward\.", ".mlp."),
    (r"(\.mlp\..*)w1\.", r"\1gate_proj."),
    (r"(\.mlp\..*)w3\.", r"\1up_proj."),
    (r"(\.mlp\..*)w2\.", r"\1down_proj."),
)
RULES = ConfigRules(
    "lfm2",
    renamed=MappingProxyType(
        {
            "tie_embedding": "tie_word_embeddings",
            "block_ff_dim": "intermediate_size",
        }
    ),
    norm_eps="norm_eps",
    rope=RopeRules(theta=1e6),
    layers=layers_by_kind,
    recurrent=short_conv,
    mlp_size=_mlp_size,
    tied=True,
)


def _kinds_of_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the rotation and `layer_types`. Layers without key heads are convolutions."""
    read_rope(gguf, raw)
    heads = layers_with(gguf, "attention.head_count_kv", raw.get("num_hidden_layers"))
    raw["layer_types"] = [FULL if count else CONV for count in heads]


def finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of LFM2 to the config.json `raw` of a GGUF file.

    Layers without key heads are convolutions. The width of the MLP is final.
    """
    _kinds_of_gguf(gguf, raw)
    raw["block_auto_adjust_ff_dim"] = False


def finish_moe_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of LFM2-MoE to the config.json `raw` of a GGUF file.

    Layers without key heads are convolutions. By default every layer has experts.
    """
    _kinds_of_gguf(gguf, raw)
    raw.setdefault("num_dense_layers", 0)


def change_of_taps(config: ModelConfig, name: str) -> Change | None:
    """Return the change of a convolution's taps, which a GGUF file has as [channels, taps]."""
    if not name.endswith(".conv.conv.weight") or config.recurrent is None:
        return None
    return Change((config.hidden_size, 1, config.recurrent.width))


GGUF = GgufRules(
    "Lfm2ForCausalLM",
    finish_gguf,
    tensors=MappingProxyType(
        {
            **GGUF_TENSORS,
            "token_embd_norm": "model.norm",
            "blk.{}.shortconv.in_proj": "model.layers.{}.conv.in_proj",
            "blk.{}.shortconv.conv": "model.layers.{}.conv.conv",
            "blk.{}.shortconv.out_proj": "model.layers.{}.conv.out_proj",
        }
    ),
    fields=MappingProxyType(
        {
            "shortconv.l_cache": "conv_L_cache",
            "attention.layer_norm_rms_epsilon": "norm_eps",
        }
    ),
    change=change_of_taps,
    required=SIZES
    | frozenset(
        {
            "shortconv.l_cache",
            "attention.head_count_kv",
            "attention.layer_norm_rms_epsilon",
            "feed_forward_length",
        }
    ),
    absent=frozenset({"attention.head_count_kv"}),
)
EXPERT_KEYS = MappingProxyType(
    {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }
)
MOE_GGUF = replace(
    GGUF,
    name="Lfm2MoeForCausalLM",
    finish=finish_moe_gguf,
    tensors=MappingProxyType(
        {
            **GGUF.tensors,
            **ROUTER,
            "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.expert_bias",
        }
    ),
    fields=MappingProxyType(
        {**GGUF.fields, **EXPERT_KEYS, "leading_dense_block_count": "num_dense_layers"}
    ),
    experts=EXPERTS,
    required=GGUF.required | EXPERT_KEYS.keys() | {"expert_gating_func"},
    computed=MappingProxyType({"expert_gating_func": (2,)}),  # a sigmoid
)
TRAITS = FamilyTraits(qk_norm="head")
LFM2 = Family(
    architectures={
        "Lfm2ForCausalLM": Architecture(RULES, _weights, TRAITS, tensors=TENSORS),
        "Lfm2MoeForCausalLM": Architecture(
            replace(
                RULES,
                model_type="lfm2_moe",
                renamed=MappingProxyType({"tie_embedding": "tie_word_embeddings"}),
                ignored=ROUTING,
                explicit=frozenset({"layer_types"}),
                experts=_experts,
                mlp_size=plain_mlp,
            ),
            _moe_weights,
            replace(TRAITS, router="sigmoid"),
            tensors=TENSORS,
        ),
        "Lfm3ForCausalLM": Architecture(
            replace(
                RULES,
                model_type="lfm3",
                renamed=MappingProxyType({"rms_norm_eps": "norm_eps"}),
                neutral=MappingProxyType({"use_sandwich_norm": True, "use_attention_gate": True}),
                explicit=HEADS | {"rope_parameters"},
                layers=layers_with_windows,
                rope=RopeRules(
                    theta=1e6, kinds=(*RopeRules.kinds, "proportional"), by_layer_type=True
                ),
                mlp_size=plain_mlp,
            ),
            _weights_with_gates,
            replace(TRAITS, norms="around", gated="heads"),
            tensors=TENSORS,
        ),
    },
    gguf={"lfm2": GGUF, "lfm2moe": MOE_GGUF},
)
