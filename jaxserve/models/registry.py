"""Every family in one table, and what is looked up in it."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.errors import UnsupportedModel
from jaxserve.models.config.fields import shown
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.quantization import MODELOPT_FILE, modelopt_fields
from jaxserve.models.config.stored_quantization import FIELD as QUANTIZATION
from jaxserve.models.config.strict_json import read_object
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.cohere import COHERE
from jaxserve.models.families.deepseek import DEEPSEEK
from jaxserve.models.families.gemma import GEMMA
from jaxserve.models.families.gpt_oss import GPT_OSS
from jaxserve.models.families.granite import GRANITE
from jaxserve.models.families.llama import LLAMA
from jaxserve.models.families.mistral import MISTRAL
from jaxserve.models.families.mixtral import MIXTRAL
from jaxserve.models.families.olmo import OLMO
from jaxserve.models.families.phi3 import PHI3
from jaxserve.models.families.qwen import QWEN
from jaxserve.models.families.smollm3 import SMOLLM3
from jaxserve.models.family import Architecture
from jaxserve.models.gguf.rules import GgufRules
from jaxserve.models.weight_table import WeightName

MAX_CONFIG_BYTES = 1 << 20

FAMILIES = (
    *(LLAMA, MISTRAL, MIXTRAL, QWEN, GPT_OSS, DEEPSEEK, PHI3, SMOLLM3, OLMO, GRANITE, COHERE),
    GEMMA,
)
# Architectures by their names in config.json.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {name: rules for family in FAMILIES for name, rules in family.architectures.items()}
)
# Rules for GGUF files by llama.cpp's name of the architecture.
GGUF_RULES: Mapping[str, GgufRules] = MappingProxyType(
    {name: rules for family in FAMILIES for name, rules in family.gguf.items()}
)


def read_model_config(directory: str | Path) -> ModelConfig:
    """Read `config.json` in a checkpoint's folder, and what modelopt wrote beside it.

    Raises:
        CheckpointError: a file is absent or not a JSON object.
        UnsupportedModel: see `parse_model_config`.
    """
    path = Path(directory) / "config.json"
    raw, beside = read_object(path, MAX_CONFIG_BYTES), path.with_name(MODELOPT_FILE)
    if raw.get(QUANTIZATION) is None and beside.exists():
        raw = raw | {QUANTIZATION: modelopt_fields(read_object(beside, MAX_CONFIG_BYTES))}
    return parse_model_config(raw, str(path))


def parse_model_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read the contents of a config.json.

    Args:
        raw: the parsed object.
        where: names the source in errors.

    Raises:
        UnsupportedModel: an unknown architecture, or else one error that lists every field that is
            malformed, out of bounds, unknown, or not computed by jaxserve.
    """
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if isinstance(name, str) and name in ARCHITECTURES:
        return ModelConfig.from_fields(raw, name, ARCHITECTURES[name].config, where)
    got = f"is {shown(names)}" if "architectures" in raw else "is missing"
    supported = ", ".join(ARCHITECTURES)
    raise UnsupportedModel(f"{where}: architectures {got}; allowed: a list of one of {supported}")


def overflows_float16(config: ModelConfig) -> bool:
    """Return whether a model's activations leave float16's range."""
    return ARCHITECTURES[config.architecture].traits.overflows_float16


def build_model(
    config: ModelConfig, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs | None = None
) -> Decoder:
    """Build a model with random weights."""
    traits = ARCHITECTURES[config.architecture].traits_of(config)
    return Decoder(config, dtype, nnx.Rngs(0) if rngs is None else rngs, traits)


def abstract_model(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Decoder:
    """Build a model's structure, with shapes and dtypes in place of arrays."""
    traits = ARCHITECTURES[config.architecture].traits_of(config)
    # Without random numbers: tracing them takes longer than all the rest.
    return nnx.eval_shape(lambda: Decoder(config, dtype, None, traits))


def checkpoint_weights(config: ModelConfig) -> list[WeightName]:
    """List every tensor that a checkpoint of this model holds."""
    return ARCHITECTURES[config.architecture].weights(config)
