"""Model families as pure Flax modules over ragged tokens and a paged cache."""

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import Llama3Scaling, Rope
from jaxserve.models.decoder import Decoder
from jaxserve.models.paged import KVPages, PagedStep, logical_axes
from jaxserve.models.registry import (
    abstract_model,
    build_model,
    checkpoint_weights,
    config_fields,
    parse_model_config,
    read_config_fields,
    read_model_config,
)

__all__ = [
    "Decoder",
    "KVPages",
    "Llama3Scaling",
    "ModelConfig",
    "PagedStep",
    "Rope",
    "abstract_model",
    "build_model",
    "checkpoint_weights",
    "config_fields",
    "logical_axes",
    "parse_model_config",
    "read_config_fields",
    "read_model_config",
]
