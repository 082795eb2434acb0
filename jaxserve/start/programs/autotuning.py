"""Choices of XLA's for a GPU that were measured on a card of its kind, and come with the package.

XLA compiles a product or a fusion in several ways and times them on the card: that is most of a
cold start. What it chose it keeps in a folder, one file for each instruction,
``DEVICE/INSTRUCTION.pb``. A file is an `AutotuneEntry`, here of 90 to 145 bytes: the device, the
instruction, the versions of all code generators together, then the choice and the version of the
one that was chosen ("v1" of XLA's own, a commit of Triton's, 13.0.0 of cuBLAS). The device is a
hash of compute capability, multiprocessors, clock, bandwidth and second-level cache; the
instruction a hash of its text, operands' shapes among them. So a file of another device or of an
instruction that is compiled differently now is never found, and one of another version of its
generator is read and passed over: XLA then measures, as it does where there is none.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
TUNED = "xla_gpu_per_fusion_autotune_cache_dir"
"""Folder within JAX's cache in which XLA keeps what it found."""
_TABLES = Path(__file__).parent / "autotuned"
_NAME = re.compile(r"[0-9a-f]{16}/[0-9a-f]{32}\.pb")

Choices = dict[str, bytes]
"""Contents of files by their paths below `TUNED`, "device/instruction.pb"."""


def is_choice(name: str) -> bool:
    """Return whether a path below `TUNED` is one of a file of XLA's choices."""
    return _NAME.fullmatch(name) is not None


def table_path(kind: str) -> Path:
    """Return where a card's choices are: "NVIDIA H200" -> autotuned/nvidia-h200.json."""
    return _TABLES / (re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json")


def read_choices(kind: str) -> Choices:
    """Read the choices that were measured on cards of this kind; empty where there are none."""
    path = table_path(kind)
    if not path.is_file():
        return {}
    table = json.loads(path.read_text())
    choices: Choices = {}
    for row in table["choices"]:
        before, after = base64.b64decode(row["before"]), base64.b64decode(row["after"])
        for name in row["instructions"]:
            choices[f"{row['device']}/{name}.pb"] = before + name.encode() + after
    return choices


def write_choices(kind: str, choices: Choices, about: Mapping[str, Any]) -> Path:
    """Write a card's choices, and what is to be said of them; return the file.

    A file says its own name within; most say the same but for that.

    Raises:
        ValueError: a file does not have its name in it, or no such name.
    """
    groups: dict[tuple[str, bytes, bytes], list[str]] = {}
    for path, content in sorted(choices.items()):
        device, _, name = path.removesuffix(".pb").partition("/")
        before, found, after = content.partition(name.encode())
        if not is_choice(path) or not found:
            raise ValueError(f"{path} is not a file of XLA's choices")
        groups.setdefault((device, before, after), []).append(name)
    rows = [
        {
            "device": device,
            "before": base64.b64encode(before).decode(),
            "after": base64.b64encode(after).decode(),
            "instructions": names,
        }
        for (device, before, after), names in groups.items()
    ]
    path = table_path(kind)
    path.parent.mkdir(exist_ok=True)
    text = json.dumps({"device_kind": kind, **about, "choices": rows}, indent=0)
    path.write_text(text + "\n")
    return path


def lay_down(kind: str, cache: Path) -> int:
    """Put the choices for this kind of card where XLA looks for its own, but over no other.

    Args:
        kind: of the card.
        cache: JAX's folder, the user's own.

    Returns:
        How many there were not yet. Where they cannot be written, XLA measures anew.
    """
    written = 0
    try:
        choices = read_choices(kind)
        for device in sorted({name.partition("/")[0] for name in choices}):
            folder = cache / TUNED / device
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            there = {path.name for path in folder.iterdir()}
            for name, content in choices.items():
                if name.startswith(device) and name.partition("/")[2] not in there:
                    _write(cache / TUNED / name, content)
                    written += 1
    except OSError as error:
        _log.warning("choices that were measured on a %s are not used: %s", kind, error)
    return written


def _write(path: Path, content: bytes) -> None:
    """Write a file as a whole: what a killed process leaves must not be taken for a choice."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    os.replace(new, path)
