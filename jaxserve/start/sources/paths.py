"""Paths that the settings `model` and `tokenizer` stand for."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.execution.runner import OnProgress
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.model_name import NO_MODEL, kind_of_model
from jaxserve.start.sources.hub_gguf import gguf_of_folder
from jaxserve.weights.checkpoint import check_text_files

_TEXT = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def local_path(
    name: str,
    config: EngineConfig,
    on_progress: OnProgress | None,
    *,
    text_only: bool = False,
    config_only: bool = False,
) -> Path:
    """Return the folder or the GGUF file of a model name, after a download from the hub if needed.

    For a folder without safetensors it is the folder's only GGUF model, if there is one.

    Args:
        name: folder, GGUF file or name on the hub.
        config: the settings, with revision and download_dir.
        on_progress: called with the bytes of a download.
        text_only: whether only the tokenizer is needed.
        config_only: whether to download only the configuration.

    Raises:
        CheckpointError: the model does not exist, a text file of the folder is unusable, or the
            folder has several GGUF models.
    """
    kind = kind_of_model(name)
    if kind == "folder":
        folder = Path(name)
        check_text_files(folder)
        needs_weights = config.load_format != "dummy" or not (folder / "config.json").exists()
        gguf = gguf_of_folder(folder) if needs_weights and not text_only else None
        return gguf or folder
    if kind == "gguf" and not text_only:
        return Path(name)
    if kind == "hub":
        fetch = imported("jaxserve.start.sources.hub").fetch
        only = {"text_only": text_only, "config_only": config_only}
        return fetch(name, config.revision, config.download_dir, on_progress, **only)
    raise CheckpointError(f"{'tokenizer' if text_only else 'model'}: {name!r} {NO_MODEL}")


def copy_text(folder: Path, to: Path) -> None:
    """Copy the tokenizer files and the chat template of `folder` to the folder `to`."""
    for name in _TEXT:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)


def imported(name: str) -> Any:
    """Import the module of a name and return it, at first use since its imports are large."""
    return importlib.import_module(name)
