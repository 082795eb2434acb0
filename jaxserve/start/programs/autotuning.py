# pyright: reportUnknownMemberType=false
"""Kernel choices of XLA for a GPU, measured on a card of its kind and shipped with the package.

XLA compiles a product or a fusion in several ways and measures them on the card. That is most of a
cold start. XLA writes each choice into a folder, one file per instruction,
``DEVICE/INSTRUCTION.pb``. A file is an `AutotuneEntry`, here of 90 to 145 bytes: the device, the
instruction, the versions of all code generators, the choice, and the version of the chosen
generator ("v1" for XLA's own, a commit for Triton, 13.0.0 for cuBLAS). The device is a hash of
compute capability, multiprocessors, clock, bandwidth and second-level cache. The instruction is a
hash of its text, which includes the operands' shapes. Therefore XLA never finds the file of another
device or of an instruction that is compiled differently now. It reads and ignores a file of another
version of the generator, and measures as it does without a file.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import user_cache_dir
from jaxserve.start.programs.private_files import make_private, replace_file
from pallas_kernels.devices import target_device

_log = logging.getLogger(__name__)
TUNED = "xla_gpu_per_fusion_autotune_cache_dir"
"""Folder of XLA's choices in JAX's cache folder."""
_TABLES = Path(__file__).parent / "autotuned"
_NAME = re.compile(r"[0-9a-f]{16}/[0-9a-f]{32}\.pb")

Choices = dict[str, bytes]
"""Contents of files by their paths below `TUNED`, "device/instruction.pb"."""


def cache_folder(config: EngineConfig) -> Path | None:
    """Return the folder of the compilation cache, or None if the settings disable the cache.

    It is compilation_cache_dir, or the user's cache folder if that is "auto".
    """
    cache = config.compilation_cache_dir
    cache = user_cache_dir() if cache == "auto" else cache
    return None if cache in (None, "none") else Path(cache)


def programs_folder(config: EngineConfig) -> Path | None:
    """Prepare the compilation cache (`prepare_cache`), and return its folder of compiled programs.

    Returns:
        None if the settings disable the cache, or if JAX's own cache stores programs.
    """
    cache = cache_folder(config)
    return None if cache is None else prepare_cache(cache)


def prepare_cache(directory: Path) -> Path | None:
    """Let JAX store XLA's kernel choices for a GPU, and return the folder for compiled programs.

    JAX couples XLA's choices to its own cache of programs, which stays empty here (see
    `ProgramStore`). If the user has configured JAX's cache, no setting is changed.

    Args:
        directory: folder of the compilation cache.

    Returns:
        The folder for compiled programs, or None if the user's cache of JAX stores them.
    """
    configured, autotuning = getattr(jax.config, "jax_compilation_cache_dir", None), "autotuning"
    if configured not in (None, str(directory / autotuning)):
        _log.info("compiled programs are left to JAX's own cache in %s", configured)
        return None
    device = target_device()
    if configured is None and device.is_gpu:
        keep_choices(device.kind, directory / autotuning)
    return directory / "programs"


def keep_choices(kind: str, autotuning: Path) -> None:
    """Let XLA keep its kernel choices in a private folder, and copy the shipped choices into it.

    Args:
        kind: name of the card, such as "NVIDIA H200".
        autotuning: the folder. If it cannot be private, a warning is logged and JAX is not
            configured.
    """
    try:
        make_private(autotuning)
    except OSError as error:
        _log.warning("autotuning results are not kept: %s", error)
        return
    lay_down(kind, autotuning)
    jax.config.update("jax_compilation_cache_dir", str(autotuning))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)


def is_choice(name: str) -> bool:
    """Return whether a relative path has the form of XLA's files of kernel choices.

    The form is DEVICE/INSTRUCTION.pb, both hexadecimal hashes.
    """
    return _NAME.fullmatch(name) is not None


def table_path(kind: str) -> Path:
    """Return the path of a card's shipped table: "NVIDIA H200" -> autotuned/nvidia-h200.json."""
    return _TABLES / (re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json")


def read_choices(kind: str) -> Choices:
    """Return XLA's shipped kernel choices for a kind of card, as contents of files by path.

    The result is {} if no choices were measured on this kind of card.
    """
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
    """Write the table of XLA's kernel choices for a kind of card, and return its path.

    Most files are equal except for their own name, which each contains. The table groups them.

    Args:
        kind: name of the card.
        choices: contents of XLA's files by path.
        about: JSON values that describe the measurement.

    Raises:
        ValueError: a file does not contain its name, or its path has another form.
    """
    groups: dict[tuple[str, bytes, bytes], list[str]] = {}
    for path, content in sorted(choices.items()):
        device, _, name = path.removesuffix(".pb").partition("/")
        before, inner_name, after = content.partition(name.encode())
        if not is_choice(path) or not inner_name:
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
    """Write the shipped kernel choices for a kind of card as files of XLA, and return their number.

    Present files are not replaced. If the files cannot be written, a warning is logged, and XLA
    measures anew.

    Args:
        kind: name of the card.
        cache: JAX's cache folder, which is private to the user.
    """
    written = 0
    try:
        choices = read_choices(kind)
        for device in sorted({name.partition("/")[0] for name in choices}):
            folder = cache / TUNED / device
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            present = {path.name for path in folder.iterdir()}
            for name, content in choices.items():
                if name.startswith(device) and name.partition("/")[2] not in present:
                    replace_file(cache / TUNED / name, content)
                    written += 1
    except OSError as error:
        _log.warning("choices that were measured on a %s are not used: %s", kind, error)
    return written
