"""Muse Glimmer (Meta 2026): windows in three of four layers, and no rotation in the others.

The sigmoid of a projection multiplies the result of attention. Embeddings, queries and keys are
normalized without a scale, and a factor multiplies the scores. Norms before and after attention and
MLP scale by 1 + weight, the last norm by its weight. Reference implementation: the text model of
`MuseGlimmerForConditionalGeneration` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import LayerTable, by_type
from jaxserve.models.config.model_config import MAX_HEAD_DIM, ModelConfig
from jaxserve.models.config.rules import HEADS, ConfigRules, Scales
from jaxserve.models.families.gemma import NORMS
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.weight_names import gated_projections, model_weights
from jaxserve.models.weight_table import WeightName

BASES = "layer_rope_theta"


def _layers(fields: Fields, layers: int) -> LayerTable:
    """Read the window of each layer, and whether it rotates: its base in `layer_rope_theta`."""
    windows, bases = by_type(fields, layers).windows, fields.take(BASES)
    parameters = fields.take("rope_parameters")
    theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    theta = fields.take("rope_theta") if theta is None else theta
    if (
        not isinstance(bases, list)
        or len(bases) != layers
        or any(base not in (0, theta) for base in bases)
    ):
        fields.refuse(BASES, f"0 or the model's rope_theta for each of {layers} layers")
        return LayerTable(windows, (True,) * layers)
    return LayerTable(windows, tuple(base != 0 for base in bases))


def _scales(fields: Fields, hidden_size: int) -> Scales:
    size = fields.integer("head_dim", 2, MAX_HEAD_DIM)
    return Scales(
        attention=fields.number("qk_scale_factor", 0.0, 1e4, default=3.87) * size**-0.5,
        logit_cap=fields.number("final_logit_softcapping", 0.0, 1e6),
        logit_factor=fields.number("output_multiplier", 0.0, 1e4),
    )


def _weights(config: ModelConfig) -> list[WeightName]:
    return model_weights(config, [*NORMS, *gated_projections()])


MUSE_GLIMMER = Family(
    architectures={
        "MuseGlimmerForCausalLM": Architecture(
            ConfigRules(
                "muse_glimmer_text",
                neutral=MappingProxyType({"attention_bias": False, "hidden_activation": "silu"}),
                explicit=HEADS | {"layer_types", BASES, "qk_scale_factor"},
                out_norm_eps="post_norm_eps",
                layers=_layers,
                scales=_scales,
                qkv_bias=False,
                output_bias=False,
            ),
            _weights,
            FamilyTraits(
                norms="around",
                qk_norm="unscaled",
                norm_offset=1.0,
                norm_embedding=True,
                final_offset=False,
                norm_rounds_last=True,
                gated="numbers",
            ),
        )
    }
)
