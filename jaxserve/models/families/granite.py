"""Granite 3 (IBM 2024): Llama with additional factors.

Reference implementation: `GraniteForCausalLM` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.rules import ConfigRules, Scales
from jaxserve.models.families.llama import llama_weights
from jaxserve.models.family import Architecture, Family
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, read_biases, read_rope
from jaxserve.models.gguf.rules import GgufRules


def _scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales(
        attention=fields.number("attention_multiplier", 0.0, 1e4, default=1.0),
        embedding=fields.number("embedding_multiplier", 0.0, 1e4, default=1.0),
        residual=fields.number("residual_multiplier", 0.0, 1e4, default=1.0),
        logit_divisor=fields.number("logits_scaling", 0.0, 1e4, default=1.0),
    )


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    read_biases(gguf, raw)
    if not gguf.get("rope.scaling.finetuned", True):  # llama.cpp's switch of Granite's rotation
        raise UnsupportedModel(f"{gguf.path}: queries and keys are not rotated")
    for name in ("attention.scale", "logit_scale"):  # defaults of config.json and llama.cpp differ
        if not gguf.get(name):
            raise CheckpointError(f"{gguf.path}: {gguf.key(name)} is missing")


GRANITE = Family(
    architectures={
        "GraniteForCausalLM": Architecture(
            ConfigRules("granite", scales=_scales, mlp_bias=None), llama_weights
        )
    },
    gguf={
        "granite": GgufRules(
            "GraniteForCausalLM",
            _finish_gguf,
            fields=MappingProxyType(
                {
                    "attention.scale": "attention_multiplier",
                    "embedding_scale": "embedding_multiplier",
                    "residual_scale": "residual_multiplier",
                    "logit_scale": "logits_scaling",
                }
            ),
            paired=True,
        )
    },
)
