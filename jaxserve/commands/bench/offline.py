"""An engine for benchmarks without a server, and the file of results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxserve.commands.options import CommandError, engine_settings
from jaxserve.engine.llm import LLM
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.start import load

PERCENTAGES = (10, 25, 50, 75, 90, 99)


@contextmanager
def open_engine(arguments: argparse.Namespace, **defaults: Any) -> Iterator[tuple[LLM, Loaded]]:
    """Yield an engine with the settings of the command line.

    Args:
        defaults: settings that the command line may replace.

    Raises:
        CommandError: a setting is wrong, or the model cannot be loaded.
    """
    try:
        loaded = load(EngineConfig(arguments.model, **defaults | engine_settings(arguments)))
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    with LLM(loaded) as llm:
        yield llm, loaded


def check_lengths(loaded: Loaded, prompt: int, output: int, options: str) -> None:
    """Check that a sequence of these lengths fits into the engine.

    Raises:
        CommandError: the sequence is too long. The message names `options`.
    """
    longest = loaded.limits.max_model_len
    if prompt + output > longest:
        raise CommandError(
            f"{options}: a prompt of {prompt} tokens and an answer of {output} are more than the "
            f"{longest} tokens of the longest sequence"
        )


def write_results(path: Path | None, results: dict[str, Any]) -> None:
    """Write results as JSON to a file, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(results, indent=4) + "\n")
