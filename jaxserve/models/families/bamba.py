"""Bamba (IBM 2024) and Falcon-H1 (TII 2025): Mamba-2 and attention, with an MLP in each layer.

A layer of Bamba has Mamba-2 or attention. A layer of Falcon-H1 has both, on the same input, and
factors for most of its parts. Reference implementations: `BambaForCausalLM` and
`FalconH1ForCausalLM` in Hugging Face Transformers.
"""

from dataclasses import replace
from types import MappingProxyType

from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import ATTENTION, LayerTable
from jaxserve.models.config.model_config import MAX_HEAD_DIM, ModelConfig
from jaxserve.models.config.recurrent import Mamba2Sizes, expanded_mamba2, mamba2_of_width
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import KV_HEADS, MAX_MLP, ConfigRules, Scales
from jaxserve.models.families.nemotron_h import (
    MAMBA,
    change_of_mamba,
    mamba_tensors,
    mamba_weights,
)
from jaxserve.models.family import Architecture, Family
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, has_tensor, read_rope
from jaxserve.models.gguf.rules import SIZES, GgufRules
from jaxserve.models.gguf.rules import TENSORS as GGUF_TENSORS
from jaxserve.models.weight_names import (
    FINAL_NORM,
    PRE_NORMS,
    attention_projections,
    embedding_weights,
    every_layer,
    mlp_projections,
)
from jaxserve.models.weight_table import WeightName

MAX_FACTOR = 1e4


def _layers(fields: Fields, layers: int) -> LayerTable:
    """Read `attn_layer_indices`, the layers with attention. All others have Mamba-2."""
    listed = fields.take("attn_layer_indices")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or any(
        type(index) is not int or not 0 <= index < layers for index in listed
    ):
        fields.refuse("attn_layer_indices", f"indices from 0 to {layers - 1}, or null")
        listed = []
    mixers = tuple((ATTENTION,) if index in listed else (MAMBA,) for index in range(layers))
    return LayerTable((None,) * layers, (True,) * layers, mixers)


def _both(fields: Fields, layers: int) -> LayerTable:
    return LayerTable((None,) * layers, (True,) * layers, ((MAMBA, ATTENTION),) * layers)


def _factor(fields: Fields, name: str) -> float:
    return fields.number(name, 0.0, MAX_FACTOR, default=1.0)


def _factors(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    if not fields.has(name):
        fields.take(name)
        return (1.0,) * count
    return fields.numbers(name, count, 0.0, MAX_FACTOR)


def _scales(fields: Fields, hidden_size: int) -> Scales:
    """Read the factors. That of keys is a factor of the scores."""
    heads = fields.integer("num_attention_heads", 1, hidden_size)
    size = fields.integer("head_dim", 1, MAX_HEAD_DIM, default=max(hidden_size // heads, 1))
    gate, mlp = _factors(fields, "mlp_multipliers", 2)
    return Scales(
        attention=_factor(fields, "key_multiplier") * size**-0.5,
        embedding=_factor(fields, "embedding_multiplier"),
        mlp=mlp,
        gate=gate,
        mixers=(
            (_factor(fields, "ssm_in_multiplier"), _factor(fields, "ssm_out_multiplier")),
            (
                _factor(fields, "attention_in_multiplier"),
                _factor(fields, "attention_out_multiplier"),
            ),
        ),
        logit_factor=_factor(fields, "lm_head_multiplier"),
    )


def _mamba(fields: Fields) -> Mamba2Sizes:
    """Read the sizes of Mamba-2, whose width is `mamba_d_ssm`, or a multiple of the model's."""
    if fields.mentions("mamba_d_ssm") and not fields.has("mamba_d_ssm"):
        fields.take("mamba_d_ssm")
        sizes = expanded_mamba2(fields)
    else:
        fields.take("mamba_expand")
        width = fields.integer("mamba_d_ssm", 1, MAX_MLP, default=1024)
        sizes = mamba2_of_width(fields, width)
    if fields.flag("projectors_bias", default=False) != sizes.bias:
        fields.refuse("projectors_bias", f"the same as mamba_proj_bias ({sizes.bias})")
    is_before = fields.flag("mamba_norm_before_gate", default=True)
    norm = None
    if fields.flag("mamba_rms_norm", default=False):
        norm = "before" if is_before else "after"
    factors = _factors(fields, "ssm_multipliers", 5)
    return replace(sizes, norm=norm, factors=() if set(factors) == {1.0} else factors)


def _weights(config: ModelConfig) -> list[WeightName]:
    return [
        *embedding_weights(config),
        *every_layer([*PRE_NORMS, *mlp_projections(config)], config),
        *every_layer(attention_projections(config), config, mixer=ATTENTION),
        *every_layer(mamba_weights(config, "mamba"), config, mixer=MAMBA),
        FINAL_NORM,
    ]


def read_mamba(gguf: GgufMetadata, raw: Raw) -> None:
    """Add fields that tensors decide to the config.json `raw` of a GGUF file with Mamba-2.

    They are the biases of attention and convolution. A tensor of any layer counts.
    """
    raw["attention_bias"] = has_tensor(gguf, ".attn_q.bias")
    raw["mamba_conv_bias"] = has_tensor(gguf, ".ssm_conv1d.bias")


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of Falcon-H1 to the config.json `raw` of a GGUF file.

    The matrices in the file have been multiplied by the model's factors, which it does not name.
    llama.cpp's norm of Mamba-2 follows the gate.
    """
    read_rope(gguf, raw)
    read_mamba(gguf, raw)
    raw["mamba_rms_norm"] = has_tensor(gguf, ".ssm_norm.weight")
    raw["mamba_norm_before_gate"] = False
    raw["mlp_bias"] = has_tensor(gguf, ".ffn_up.bias")


MAMBA_FIELDS = MappingProxyType(
    {
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.group_count": "mamba_n_groups",
        "ssm.state_size": "mamba_d_state",
        "ssm.time_step_rank": "mamba_n_heads",
    }
)
FALCON_GGUF = GgufRules(
    "FalconH1ForCausalLM",
    _finish_gguf,
    tensors=MappingProxyType(
        {
            **GGUF_TENSORS,
            **mamba_tensors("mamba"),
            "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
        }
    ),
    fields=MappingProxyType({**MAMBA_FIELDS, "ssm.inner_size": "mamba_d_ssm"}),
    change=change_of_mamba,
    required=SIZES
    | MAMBA_FIELDS.keys()
    | {
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "feed_forward_length",
        "rope.freq_base",
        "ssm.inner_size",
    },
)
TENSORS = (
    (r"^model\.final_layernorm\.", "model.norm."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.", ".mlp."),
)
RULES = ConfigRules(
    "bamba",
    ignored=frozenset(
        {"attn_rotary_emb", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"}
    ),
    explicit=KV_HEADS,
    layers=_layers,
    rope=RopeRules(partial=0.5),
    recurrent=expanded_mamba2,
    mlp_bias=None,
)
BAMBA = Family(
    architectures={
        "BambaForCausalLM": Architecture(RULES, _weights, tensors=TENSORS),
        "FalconH1ForCausalLM": Architecture(
            replace(
                RULES,
                model_type="falcon_h1",
                neutral=MappingProxyType({"attn_layer_indices": None, "mamba_use_mlp": True}),
                ignored=RULES.ignored
                | {
                    "mlp_expansion_factor",
                    "time_step_floor",
                    "time_step_max",
                    "time_step_min",
                    "time_step_rank",
                },
                layers=_both,
                rope=RopeRules(),
                scales=_scales,
                recurrent=_mamba,
            ),
            _weights,
            tensors=TENSORS,
        ),
    },
    gguf={"falcon-h1": FALCON_GGUF},
)
