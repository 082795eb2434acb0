"""Load the weights of checkpoints into the parameters of a model, placed on devices."""

from jaxserve.weights.checkpoint import Checkpoint, open_checkpoint
from jaxserve.weights.converted import (
    ConvertedModel,
    is_converted,
    load_converted,
    open_converted,
    write_converted,
)
from jaxserve.weights.gguf.file import GgufFile, read_gguf
from jaxserve.weights.gguf.names import gguf_config, gguf_fields
from jaxserve.weights.gguf.parts import open_gguf
from jaxserve.weights.model_weights import load_weights, parameter_values, random_weights

__all__ = [
    "Checkpoint",
    "ConvertedModel",
    "GgufFile",
    "gguf_config",
    "gguf_fields",
    "is_converted",
    "load_converted",
    "load_weights",
    "open_checkpoint",
    "open_converted",
    "open_gguf",
    "parameter_values",
    "random_weights",
    "read_gguf",
    "write_converted",
]
