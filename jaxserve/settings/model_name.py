"""Names of models: a folder, a GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from jaxserve.errors import CheckpointError

# org/name, org/name:FORM (Q4_K_M, or part of a file's name), or org/name/FILE.gguf.
HUB_NAME = re.compile(
    r"(?P<repo>{0}/{0})(?::(?P<form>[\w.-]+)|/(?P<file>(?:[\w.+-]+/)*[\w.+-]+\.gguf))?".format(
        r"[A-Za-z0-9][\w.-]{0,95}"
    )
)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAGIC = b"GGUF"  # first bytes of a GGUF file
NO_MODEL = (
    "is not a folder with a checkpoint, nor a .gguf file, nor a name on the Hugging Face hub "
    "(org/name)"
)


def kind_of_model(name: str) -> Literal["folder", "gguf", "hub"] | None:
    """Return the kind of model that a value of the setting `model` names, or None if it is invalid.

    "folder" is an existing folder, "gguf" a GGUF file, and "hub" a name in the form of the Hugging
    Face hub. The name is not looked up there.
    """
    path = Path(name)
    if path.is_dir():
        return "folder"
    if path.is_file() and (path.suffix == ".gguf" or is_gguf(path)):
        return "gguf"
    return "hub" if not path.exists() and is_hub_name(name) else None


def is_gguf(path: Path) -> bool:
    """Return whether a regular file begins with GGUF's four magic bytes, under any name."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def gguf_files(folder: Path) -> list[str]:
    """Return the sorted names of a folder's GGUF files, or [] if it has safetensors files."""
    names = os.listdir(folder)
    if SINGLE in names or INDEX in names:
        return []
    return sorted(name for name in names if is_gguf(folder / name))


def check_model(model: str | Path | None) -> None:
    """Check that the setting `model` names an existing checkpoint, or may be a name on the hub.

    None, the demo model, is valid.

    Raises:
        CheckpointError: the folder has no checkpoint, or the name is not valid.
    """
    if model is None:
        return
    name = str(model)
    kind = kind_of_model(name)
    if kind is None:
        raise CheckpointError(f"model: {name!r} {NO_MODEL}")
    if (
        kind == "folder"
        and not (Path(name) / "config.json").exists()
        and not gguf_files(Path(name))
    ):
        raise CheckpointError(f"model: the folder {name!r} has no config.json and no GGUF file")


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form of a name on the Hugging Face hub (see `HUB_NAME`)."""
    return HUB_NAME.fullmatch(text) is not None and ".." not in text and "--" not in text
