"""Types of the scripts' arguments. Their errors state the allowed values."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.commands.argument_types import positive_integer, writable_file, writable_folder


def script_parser(name: str, doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Make the parser of `python -m NAME`. Its --help prints the docstring of the module."""
    return argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def bench_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Make the parser of a benchmark, as `script_parser` does, with the option --json."""
    parser = script_parser(name, doc)
    parser.add_argument(
        "--json", type=results_file, help="write the numbers here, beside those there"
    )
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """Make the type of integers from `least` on."""
    return lambda text: positive_integer(text, least)


def at_most(most: int) -> Callable[[str], int]:
    """Make the type of integers from 1 to `most`."""
    return lambda text: positive_integer(text, most=most)


def integers(text: str) -> list[int]:
    """Parse integers from 1 on, with commas between them."""
    return [positive_integer(part) for part in text.split(",")]


def results_file(text: str) -> Path:
    """Check a file that `run_record.keep` can add results to."""
    path = writable_file(text)
    try:
        kept = path.read_text() if path.is_file() else ""
        found = json.loads(kept) if kept.strip() else {}
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("runs", {}), dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a file of this script's results, or a new one; it holds others"
        )
    return path


def new_folder(text: str) -> Path:
    """Check a folder that files can be written to, or that can be made."""
    path = Path(text)
    if path.exists():
        return writable_folder(text)
    above = path.absolute().parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} must be in a folder that files can be put in")
    return path


def checkpoint(text: str) -> str:
    """Check an engine's `model`: a folder, a GGUF file, or a name on the hub."""
    # Imported here and below: some scripts run where jaxserve is not installed.
    from jaxserve.settings.model_name import kind_of_model

    kind = kind_of_model(text)
    if kind is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a folder with a checkpoint, a .gguf file, or a name on the hub"
        )
    if kind == "folder" and not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must hold a checkpoint; it has no config.json")
    return text


def check_room(
    parser: argparse.ArgumentParser,
    model: str | None,
    prompt: int,
    tokens: int,
    option: str = "--tokens",
) -> None:
    """End the process with an argument error if `model` is missing or has too few positions.

    Args:
        model: as `checkpoint` takes it. None means the bundled one.
        prompt, tokens: of the longest sequence, the latter as `--tokens` says.
    """
    # Imported here: it imports JAX, and some scripts run where jaxserve is not installed.
    from jaxserve.errors import JaxserveError
    from jaxserve.settings.config import EngineConfig
    from jaxserve.start.sources.find import find_source

    try:
        longest = find_source(EngineConfig(model=model)).model_config.max_position_embeddings
    except JaxserveError as error:
        parser.error(f"--model: {error}")
    if prompt + tokens > longest:
        parser.error(
            f"{option} {tokens}: must be at most {longest - prompt}; with a prompt of {prompt} "
            f"the model has {longest} positions"
        )


def pattern(text: str) -> str:
    """Parse a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a regular expression: {error}"
        ) from None
    return text
