"""LFM2 (Liquid AI 2025): gated short convolutions, and attention in some layers.

Reference implementation: `Lfm2ForCausalLM` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import ATTENTION, FULL, LayerTable
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.recurrent import ShortConvSizes
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import MAX_MLP, ConfigRules
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, layers_with, read_rope
from jaxserve.models.gguf.rules import SIZES, Change, GgufRules
from jaxserve.models.gguf.rules import TENSORS as GGUF_TENSORS
from jaxserve.models.weight_names import (
    FINAL_NORM,
    PRE_NORMS,
    QK_NORMS,
    attention_projections,
    embedding_weights,
    every_layer,
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


TENSORS = (
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.q_layernorm\.", ".q_norm."),
    (r"\.k_layernorm\.", ".k_norm."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
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


def finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of LFM2 to the config.json `raw` of a GGUF file.

    Layers without key heads are convolutions. The width of the MLP is final.
    """
    read_rope(gguf, raw)
    heads = layers_with(gguf, "attention.head_count_kv", raw.get("num_hidden_layers"))
    raw["layer_types"] = [FULL if count else CONV for count in heads]
    raw["block_auto_adjust_ff_dim"] = False


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
LFM2 = Family(
    architectures={
        "Lfm2ForCausalLM": Architecture(
            RULES, _weights, FamilyTraits(qk_norm="head"), tensors=TENSORS
        )
    },
    gguf={"lfm2": GGUF},
)
