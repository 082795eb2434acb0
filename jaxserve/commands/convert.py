"""`jaxserve convert`: write a checkpoint as a folder whose weights need no conversion."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from jaxserve.commands.options import CommandError, add_fields, given
from jaxserve.settings.config import EngineConfig

FIELDS = ("dtype", "quantization", "tokenizer", "skip_tokenizer_init", "revision", "download_dir")


def add_convert(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command `jaxserve convert` and its options, with argparse's `add_parser`."""
    parser = add_parser(
        "convert",
        help="write a checkpoint that loads without work",
        description="Read a checkpoint and write its weights as they will be placed, with all that "
        "serving needs, as an Orbax checkpoint. It is read back and compared bit for bit, and the "
        "folder appears once it is whole.",
    )
    parser.add_argument("source", metavar="SRC", help="a folder, a .gguf file or a name on the hub")
    parser.add_argument("target", metavar="DST", type=Path, help="a folder that does not exist yet")
    add_fields(parser.add_argument_group("engine"), EngineConfig, FIELDS)
    parser.set_defaults(run=convert)


def convert(arguments: argparse.Namespace) -> int:
    """Run `jaxserve convert`: write a checkpoint as a folder that loads without conversion.

    Returns:
        The exit status 0.

    Raises:
        CommandError: the target exists, a setting is invalid, or the checkpoint cannot be
            converted.
    """
    if os.path.lexists(arguments.target):
        raise CommandError(f"DST: {arguments.target} exists already; name a new folder")
    module = importlib.import_module("jaxserve.start.conversion")  # imports JAX
    try:
        config = EngineConfig(model=arguments.source, **given(arguments, FIELDS))
        module.convert(config, arguments.target)
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    print(f"jaxserve: {arguments.target} is whole and verified", file=sys.stderr)
    return 0
