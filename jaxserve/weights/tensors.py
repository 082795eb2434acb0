"""The tensors of a checkpoint, matched with the parameters of a model by their headers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve.models import ModelConfig, checkpoint_weights
from jaxserve.models.registry import tensor_names
from jaxserve.models.weight_table import WeightName, dimensions
from jaxserve.settings.model_name import INDEX
from jaxserve.weights.checkpoint import Checkpoint, listed, open_checkpoint
from jaxserve.weights.gguf.file import GgufFile
from jaxserve.weights.gguf.names import named_tensors, rules_of
from jaxserve.weights.names import as_stored, match_names, renamed
from jaxserve.weights.quantized_tensors import SplitCheckpoint, sort_packed
from jaxserve.weights.safetensors import TensorEntry
from jaxserve.weights.wrapped import text_tensors

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of one model in a Hugging Face checkpoint or a GGUF file.

    Attributes:
        opened: every tensor of the files.
        split: the same tensors divided into plain tensors and quantized matrices.
        entries: the tensors that are not quantized, by their names in the model's table.
        dims: sizes of the dimensions that the table names.
    """

    opened: Checkpoint
    split: SplitCheckpoint
    entries: Mapping[str, TensorEntry]
    dims: Mapping[str, int]

    @property
    def table(self) -> list[WeightName]:
        """The tensors that are not quantized, each with the parameter that it belongs to."""
        return self.split.table


def open_tensors(source: str | Path | GgufFile | Checkpoint, config: ModelConfig) -> StoredTensors:
    """Return the tensors of a checkpoint, checked by their headers against the configuration.

    Args:
        source: a folder, a GGUF file, or tensors under the names of a checkpoint's files.
        config: configuration that the tensors must match.

    Raises:
        CheckpointError: files are missing, malformed or unsafe, or hold other tensors than `config`
            implies.
    """
    opened, dims = _open(source, config), dimensions(config)
    experts = config.experts
    if experts is not None and experts.stacked and not any(map(_is_stacked, opened.tensors)):
        # Transformers stacks experts in memory, and writes a tensor for each.
        config = replace(config, experts=replace(experts, stacked=False))
    latent = config.latent
    if latent is not None and any(map(_is_of_head, opened.tensors)):
        config = replace(config, latent=replace(latent, divided=True))
    table = rules_of(source).weights if isinstance(source, GgufFile) else None
    stored = as_stored((table or checkpoint_weights)(config), opened, dims)
    split = sort_packed(opened, config.quantization, stored, dims)
    return StoredTensors(opened, split, match_names(split.checkpoint, config, split.table), dims)


def _is_stacked(name: str) -> bool:
    return name.endswith(".experts.gate_up_proj")


def _is_of_head(name: str) -> bool:
    return name.endswith(".self_attn.k_b_proj.0.weight")


def _open(source: str | Path | GgufFile | Checkpoint, config: ModelConfig) -> Checkpoint:
    """Return the checkpoint with its tensors under the names of the model's table.

    Tensors that the checkpoint's index does not list, and parts of a multimodal model other than
    its text model, are left out with a warning.
    """
    if isinstance(source, GgufFile):
        return named_tensors(source, config)
    opened = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if opened.ignored:
        _log.warning(
            "%s: %d tensor(s) or files beside those of %s are ignored: %s",
            source,
            len(opened.ignored),
            INDEX,
            listed(opened.ignored),
        )
    if config.wrapper is not None:
        opened = text_tensors(opened, config.parts)
    return renamed(opened, tensor_names(config))
