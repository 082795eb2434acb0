"""Checkpoints into folders that restore without work: `jaxserve convert`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax

from jaxserve.config import EngineConfig
from jaxserve.engine.loading import placed_dtype
from jaxserve.engine.source import Source, find_source
from jaxserve.engine.text import Tokenizer
from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.execution.runner import OnProgress
from jaxserve.weights import GgufFile, gguf_fields, parameter_values, write_converted

COPIED = "config.json"


def convert(config: EngineConfig, to: Path, on_progress: OnProgress | None = None) -> None:
    """Write the model of `config`, placed and in its dtype, with everything that serving needs.

    Args:
        config: says which model, and its dtype.
        to: a folder that does not exist yet; it appears once it is whole and verified.
        on_progress: told how far the weights have come.

    Raises:
        CheckpointError, UnsupportedModel: the model cannot be read, or the folder not written.
    """
    if to.exists() or to.is_symlink():  # before the work
        raise CheckpointError(f"{to}: exists already")
    source = find_source(config, on_progress)
    if source.model_config.quantization is not None:
        raise UnsupportedModel(f"{source.path}: quantized checkpoints cannot be converted")
    platform = "cpu" if jax.default_backend() == "cpu" else "gpu"
    dtype = placed_dtype(config, source, platform)
    tokenizer = None if config.skip_tokenizer_init else source.tokenizer(config, on_progress)
    values = parameter_values(source.load(source.model_config, dtype, on_progress))
    write_converted(
        values,
        source.model_config,
        to,
        lambda folder: _write_extra(folder, source, tokenizer),
        str(dtype),
    )


def _write_extra(folder: Path, source: Source, tokenizer: Tokenizer | None) -> None:
    """Configuration and tokenizer, as Transformers' own files."""
    if isinstance(source.weights, GgufFile):
        _write_json(folder / COPIED, gguf_fields(source.weights))
    else:
        shutil.copyfile(source.path / COPIED, folder / COPIED)
    if source.generation_config:
        _write_json(folder / "generation_config.json", source.generation_config)
    if tokenizer is not None:
        tokenizer.save(folder)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
