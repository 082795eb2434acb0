"""Mamba 2 (Dao and Gu 2024) and Mamba-Codestral: Mamba-2 in each layer, without attention or MLP.

The sequence has no positions, and the model no cache pages. Reference implementation:
`Mamba2ForCausalLM` in Hugging Face Transformers.
"""

from dataclasses import replace
from types import MappingProxyType

from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import LayerTable
from jaxserve.models.config.recurrent import MAX_TAPS, Mamba2Sizes, step_limits
from jaxserve.models.config.rules import ConfigRules, no_mlp
from jaxserve.models.families.nemotron_h import (
    MAMBA,
    TENSORS,
    change_of_mamba,
    mamba_sizes,
    mamba_tensors,
    nemotron_weights,
)
from jaxserve.models.family import Architecture, Family
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, has_tensor, quotient
from jaxserve.models.gguf.rules import SIZES, GgufRules
from jaxserve.models.gguf.rules import TENSORS as GGUF_TENSORS

# The length that llama.cpp's converter writes. config.json has none.
POSITIONS = 1 << 20


def _layers(fields: Fields, layers: int) -> LayerTable:
    nowhere = (False,) * layers
    return LayerTable((None,) * layers, nowhere, ((MAMBA,),) * layers, nowhere)


def _mamba(fields: Fields) -> Mamba2Sizes:
    sizes = mamba_sizes(fields)
    expand = fields.integer("expand", 1, MAX_TAPS, default=2)
    if sizes.parts[0] != expand * fields.integer("hidden_size", 1, 1 << 17):
        fields.refuse("expand", f"num_heads * head_dim ({sizes.parts[0]}) over hidden_size")
    least, most = step_limits(fields)
    return replace(sizes, least=least, most=most)


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of Mamba 2 to the config.json `raw` of a GGUF file."""
    raw["head_dim"] = quotient(gguf, "ssm.inner_size", "ssm.time_step_rank")
    raw["expand"] = quotient(gguf, "ssm.inner_size", "embedding_length")
    raw["layer_norm_epsilon"] = raw.pop("rms_norm_eps", None)
    raw["use_conv_bias"] = has_tensor(gguf, ".ssm_conv1d.bias")
    if not raw["num_attention_heads"]:  # as llama.cpp's converter writes
        del raw["num_attention_heads"]


FIELDS = MappingProxyType(
    {
        "ssm.conv_kernel": "conv_kernel",
        "ssm.group_count": "n_groups",
        "ssm.state_size": "state_size",
        "ssm.time_step_rank": "num_heads",
    }
)
GGUF = GgufRules(
    "Mamba2ForCausalLM",
    _finish_gguf,
    tensors=MappingProxyType(
        {
            **GGUF_TENSORS,
            **mamba_tensors("mixer"),
            "blk.{}.attn_norm": "model.layers.{}.norm",
        }
    ),
    fields=FIELDS,
    read=frozenset({"ssm.inner_size"}),
    change=change_of_mamba,
    required=SIZES | FIELDS.keys() | {"attention.layer_norm_rms_epsilon", "ssm.inner_size"},
)
MAMBA2 = Family(
    architectures={
        "Mamba2ForCausalLM": Architecture(
            ConfigRules(
                "mamba2",
                renamed=MappingProxyType(
                    {
                        "head_dim": "mamba_head_dim",
                        "num_heads": "mamba_num_heads",
                        "state_size": "ssm_state_size",
                    }
                ),
                # Sizes of attention, of which the model has none.
                defaults=MappingProxyType(
                    {"head_dim": 2, "max_position_embeddings": POSITIONS, "num_attention_heads": 1}
                ),
                neutral=MappingProxyType({"num_attention_heads": 1, "num_key_value_heads": None}),
                # The residual stream has the dtype of activations, also with residual_in_fp32. The
                # norm of the result follows its gate, also with norm_before_gate, as in
                # Transformers.
                ignored=frozenset(
                    """
                    chunk_size intermediate_size norm_before_gate rescale_prenorm_residual
                    residual_in_fp32 rms_norm time_step_floor time_step_init_scheme time_step_max
                    time_step_min time_step_rank time_step_scale
                    """.split()
                ),
                norm_eps="layer_norm_epsilon",
                layers=_layers,
                recurrent=_mamba,
                mlp_size=no_mlp,
                qkv_bias=False,
                output_bias=False,
            ),
            nemotron_weights,
            tensors=TENSORS,
        )
    },
    gguf={"mamba2": GGUF},
)
