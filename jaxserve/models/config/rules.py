"""Rules by which an architecture's config.json is read: how it differs from the common one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.models.config.experts import ReadExperts, no_experts
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.latent import ReadLatent, no_latent
from jaxserve.models.config.layers import ReadLayers, full_attention
from jaxserve.models.config.rope import RopeRules

KV_HEADS = frozenset({"num_key_value_heads"})
HEADS = KV_HEADS | {"head_dim"}
# Fields of training: losses that balance the load of experts, and noise.
ROUTING = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})


@dataclass(frozen=True)
class Scales:
    """Numbers that multiply or bound what flows through a model.

    Attributes:
        attention: multiplies the scores; None for head_dim ** -0.5.
        attention_cap, logit_cap: bound scores and logits: cap * tanh(x / cap).
        embedding: multiplies the embeddings.
        residual: multiplies what each block adds to the residual stream.
        logit_divisor, logit_factor: divides, multiplies the logits. (Two, since a quotient is not
            the product with a rounded reciprocal.)
    """

    attention: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    embedding: float = 1.0
    residual: float = 1.0
    logit_divisor: float = 1.0
    logit_factor: float = 1.0


def no_scales(fields: Fields, hidden_size: int) -> Scales:
    """Return the scales of a model without multipliers and caps."""
    return Scales()


@dataclass(frozen=True)
class ConfigRules:
    """Rules for the fields of one architecture's config.json.

    Attributes:
        model_type: its value of the field of this name.
        aliases: further values of it, of models that compute the same.
        renamed: fields with names of their own, to what all others call them.
        neutral: fields that change what is computed, with the value that jaxserve computes; a
            tuple holds several.
        ignored: fields that change nothing.
        explicit: fields that must be there, because Transformers would fill them in with the
            value of one particular model.
        norm_eps: the field that holds what norms add to the mean square.
        qk_norm: the field that turns the family's norms of queries and keys on, where there is one.
        length: the field that holds the number of positions served, in place of
            `max_position_embeddings`.
        layers: reads windows and rotation, layer by layer.
        rope: rules for the fields of the rotary embedding.
        scales: reads multipliers and caps.
        experts: reads the mixture of experts.
        latent: reads the sizes of latent attention.
        extra_layers: the field that counts layers which the checkpoint holds after the model's own,
            to predict further tokens; they are not read.
        tied: the default of `tie_word_embeddings`.
        qkv_bias, output_bias, mlp_bias: fixed for the family, or None to read `attention_bias`
            (the first two) or `mlp_bias`.
        biased: the default of `attention_bias`.
    """

    model_type: str
    aliases: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    explicit: frozenset[str] = frozenset()
    norm_eps: str = "rms_norm_eps"
    qk_norm: str | None = None
    length: str | None = None
    layers: ReadLayers = full_attention
    rope: RopeRules = field(default_factory=RopeRules)
    scales: Callable[[Fields, int], Scales] = no_scales
    experts: ReadExperts = no_experts
    latent: ReadLatent = no_latent
    extra_layers: str | None = None
    tied: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    biased: bool = False

    @property
    def model_types(self) -> tuple[str, ...]:
        """The values of `model_type` that are read."""
        return (self.model_type, *sorted(self.aliases))
