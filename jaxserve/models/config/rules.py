"""Rules for reading the config.json of an architecture: its differences from the common form."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.models.config.experts import ReadExperts, no_experts
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.latent import ReadLatent, no_latent
from jaxserve.models.config.layers import MAX_LAYERS, ReadLayers, full_attention
from jaxserve.models.config.recurrent import ReadRecurrent, no_states
from jaxserve.models.config.rope import RopeRules

MAX_MLP = 1 << 20
KV_HEADS = frozenset({"num_key_value_heads"})
HEADS = KV_HEADS | {"head_dim"}
# Fields of training: losses that balance the load of experts, and noise.
ROUTING = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})


@dataclass(frozen=True)
class Scales:
    """Factors and bounds of the scores, embeddings, residual stream and logits of a model.

    Attributes:
        attention: factor of the scores, or None for head_dim ** -0.5.
        attention_cap, logit_cap: bounds of scores and of logits: cap * tanh(x / cap). None for no
            bound.
        embedding: factor of the embeddings.
        residual: factor of each attention or MLP result that is added to the residual stream.
        mlp: factor of each MLP result beside `residual`.
        gate: factor of an MLP's gate before its activation.
        value: factor of the values of attention.
        mixers: factors of the input and of the result of each mixer of a layer. Empty: all are 1.
        logit_divisor, logit_factor: divisor and factor of the logits. (Both exist because a
            quotient differs from the product with a rounded reciprocal.)
    """

    attention: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    embedding: float = 1.0
    residual: float = 1.0
    mlp: float = 1.0
    gate: float = 1.0
    value: float = 1.0
    mixers: tuple[tuple[float, float], ...] = ()
    logit_divisor: float = 1.0
    logit_factor: float = 1.0


def plain_depth(fields: Fields) -> int:
    """Return the number of layers, `num_hidden_layers`."""
    return fields.integer("num_hidden_layers", 1, MAX_LAYERS)


def plain_mlp(fields: Fields) -> int:
    """Return the width of the MLP, `intermediate_size`."""
    return fields.integer("intermediate_size", 1, MAX_MLP)


def no_inputs(fields: Fields) -> int:
    """Return 0, for models whose layers have no inputs of their own."""
    return 0


def no_mlp(fields: Fields) -> int:
    """Return a width of 1, for a model whose layers all have experts."""
    return 1


def no_scales(fields: Fields, hidden_size: int) -> Scales:
    """Return the default `Scales`, for families without multipliers and caps in config.json."""
    return Scales()


@dataclass(frozen=True)
class ConfigRules:
    """Rules for reading the fields of one architecture's config.json.

    Attributes:
        model_type: the value of the field `model_type`.
        aliases: other accepted values, of models with the same computation.
        renamed: maps the family's names of fields to the common names.
        defaults: values of fields, under common names, that config.json lacks or has as null.
        neutral: fields that would change the computation, with the value that jaxserve supports, or
            a tuple of such values.
        ignored: fields without effect.
        explicit: fields that must be present, because Transformers would fill them in with the
            value of one particular model.
        norm_eps: the field with the epsilon of the norms.
        out_norm_eps: the field with the epsilon of norms of the results of attention and MLP, if it
            differs.
        value_dim: the field with the size of a value head, if it differs from `head_dim`.
        layer_inputs: reads the size of an input that each layer has, or 0 without one.
        qk_norm: the field that enables the family's norms of queries and keys, if it has one.
        length: the field with the number of positions to serve, instead of
            `max_position_embeddings`.
        layers: reads the window and rotation of each layer.
        rope: rules for the fields of the rotary embedding.
        scales: reads factors and caps.
        experts: reads the mixture of experts.
        latent: reads the sizes of latent attention.
        recurrent: reads the sizes of layers with states.
        depth: reads the number of layers.
        mlp_size: reads the width of the MLP.
        extra_layers: the field that counts additional layers at the end of the checkpoint. They
            predict further tokens and are not read.
        tied: the default of `tie_word_embeddings`.
        qkv_bias, output_bias, mlp_bias: fixed for the family, or the name of a field, or None to
            read `attention_bias` (the first two) or `mlp_bias`.
        biased: the default of `attention_bias`.
    """

    model_type: str
    aliases: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    explicit: frozenset[str] = frozenset()
    norm_eps: str = "rms_norm_eps"
    out_norm_eps: str | None = None
    value_dim: str | None = None
    layer_inputs: Callable[[Fields], int] = no_inputs
    qk_norm: str | None = None
    length: str | None = None
    layers: ReadLayers = full_attention
    rope: RopeRules = field(default_factory=RopeRules)
    scales: Callable[[Fields, int], Scales] = no_scales
    experts: ReadExperts = no_experts
    latent: ReadLatent = no_latent
    recurrent: ReadRecurrent = no_states
    depth: Callable[[Fields], int] = plain_depth
    mlp_size: Callable[[Fields], int] = plain_mlp
    extra_layers: str | None = None
    tied: bool = False
    qkv_bias: bool | str | None = None
    output_bias: bool | str | None = None
    mlp_bias: bool | str | None = False
    biased: bool = False

    @property
    def model_types(self) -> tuple[str, ...]:
        """The values of `model_type` in config.json that the architecture accepts."""
        return (self.model_type, *sorted(self.aliases))
