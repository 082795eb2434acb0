"""The tensors of a checkpoint, matched with the parameters of a model by their headers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxserve.errors import CheckpointError
from jaxserve.models import ModelConfig, abstract_model, checkpoint_weights
from jaxserve.models.registry import tensor_names
from jaxserve.models.weight_table import WeightName, dimensions
from jaxserve.settings.model_name import INDEX
from jaxserve.weights.checkpoint import Checkpoint, listed, open_checkpoint
from jaxserve.weights.gguf.file import GgufFile
from jaxserve.weights.gguf.names import named_tensors, rules_of
from jaxserve.weights.memory import checkpoint_of, parameters_of_state
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
    if isinstance(source, GgufFile):
        table = rules_of(source).weights or checkpoint_weights
        return _matched(named_tensors(source, config), config, table)
    return _matched(_open(source, config), config)


def open_arrays(
    params: Any, config: ModelConfig, is_part: bool = False, traced: bool = False
) -> StoredTensors:
    """Return arrays in memory as the tensors of a checkpoint, checked against the configuration.

    Args:
        params: a mapping of names in checkpoint files to arrays, an `nnx.State` of the model, or an
            opened checkpoint, which is read in place of arrays.
        config: the configuration.
        is_part: whether arrays may be missing. The result has only the given ones.
        traced: whether JAX may trace the arrays.

    Raises:
        CheckpointError: an array is unusable (see `checkpoint_of`), or there are other arrays than
            `config` implies.
    """
    opened = checkpoint_of(params, is_part, traced)
    if isinstance(params, nnx.State):
        table, dims = _table_of_state(config)
        stored = SplitCheckpoint(opened, table, [], {}, {})
        return _divided(stored, opened, config, dims, is_part)
    if config.wrapper is not None:
        opened = text_tensors(opened, config.parts)
    return _matched(renamed(opened, tensor_names(config)), config, is_part=is_part)


def _matched(
    opened: Checkpoint,
    config: ModelConfig,
    table_of: Callable[[ModelConfig], Iterable[WeightName]] = checkpoint_weights,
    is_part: bool = False,
) -> StoredTensors:
    """Match the tensors of a checkpoint with the tensors of a model.

    Args:
        opened: the checkpoint, with the names of the model's table.
        config: configuration of the model.
        table_of: returns the model's table.
        is_part: see `open_arrays`.
    """
    experts, dims = config.experts, dimensions(config)
    stacked = sorted(filter(_is_stacked, opened.tensors))
    if experts is not None and experts.stacked and not stacked:
        # Transformers stacks experts in memory, and writes a tensor for each.
        config = replace(config, experts=replace(experts, stacked=False))
    latent = config.latent
    if latent is not None and any(map(_is_of_head, opened.tensors)):
        config = replace(config, latent=replace(latent, divided=True))
    table = [*table_of(config)]
    if stacked and stacked[0] not in {weight.name for weight in table}:
        raise CheckpointError(
            f"{opened.directory}: {stacked[0]!r} holds the experts of a layer together, as "
            "Transformers does in memory; allowed: a tensor for each matrix of each expert, as "
            "save_pretrained writes them"
        )
    split = sort_packed(opened, config.quantization, as_stored(table, opened, dims), dims)
    return _divided(split, opened, config, dims, is_part)


def _divided(
    split: SplitCheckpoint,
    opened: Checkpoint,
    config: ModelConfig,
    dims: Mapping[str, int],
    is_part: bool,
) -> StoredTensors:
    if is_part:
        present = [weight for weight in split.table if weight.name in opened.tensors]
        split = replace(split, table=present)
    entries = match_names(split.checkpoint, config, split.table, dims)
    return StoredTensors(opened, split, entries, dims)


def _table_of_state(config: ModelConfig) -> tuple[list[WeightName], dict[str, int]]:
    """Return a table in which each parameter is a tensor of its own, and the sizes that it names.

    The name of a tensor is the path of its parameter.
    """
    table: list[WeightName] = []
    dims = {"One": 1}
    _, state = nnx.split(abstract_model(config, jnp.float32))
    for path, parameter in parameters_of_state(state).items():
        sizes = {f"Axis{axis}Of{size}": size for axis, size in enumerate(parameter.shape)}
        dims |= sizes
        side = " ".join(sizes)
        table.append(WeightName(path, f"{side} -> {side}", path))
    return table, dims


def _is_stacked(name: str) -> bool:
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def _is_of_head(name: str) -> bool:
    return name.endswith(".self_attn.k_b_proj.0.weight")


def _open(directory: str | Path | Checkpoint, config: ModelConfig) -> Checkpoint:
    """Return a checkpoint, perhaps of a folder, with its tensors under the model's names.

    Tensors that the checkpoint's index does not list, and parts of a multimodal model other than
    its text model, are left out with a warning.
    """
    opened = directory if isinstance(directory, Checkpoint) else open_checkpoint(directory)
    if opened.ignored:
        _log.warning(
            "%s: %d tensor(s) or files beside those of %s are ignored: %s",
            directory,
            len(opened.ignored),
            INDEX,
            listed(opened.ignored),
        )
    if config.wrapper is not None:
        opened = text_tensors(opened, config.parts)
    return renamed(opened, tensor_names(config))
