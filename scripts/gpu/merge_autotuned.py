"""Choices that XLA measured on a card, put into the file of them that comes with the package.

    python -m scripts.gpu.merge_autotuned out3    a folder of scripts.gpu.half_hour

Takes autotuned.tar.gz, and from report.json beside it the card's name, versions and date. Choices
that the file has and the archive does not stay.
"""

from __future__ import annotations

import pathlib
import tarfile
from typing import Any

from jaxserve.start.programs.autotuning import (
    TUNED,
    Choices,
    is_choice,
    read_choices,
    write_choices,
)
from scripts.gpu.progress import ReportError, read_report
from scripts.lib.argument_types import script_parser
from scripts.lib.run_main import run_main

MOST_BYTES = 1 << 16
"""Bytes of a file; one of XLA's has 90 to 145."""


def read_archive(path: pathlib.Path) -> Choices:
    """Read only the choices in an archive, without unpacking it.

    Raises:
        ValueError: it is no archive of a command on a GPU.
    """
    try:
        with tarfile.open(path) as archive:
            choices: Choices = {}
            for member in archive:
                name = member.name.removeprefix(f"{TUNED}/")
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None and is_choice(name) and member.size <= MOST_BYTES:
                    choices[name] = file.read()
    except (OSError, tarfile.TarError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not choices:
        raise ValueError(f"{path} has no choices of XLA's below {TUNED}")
    return choices


def merge(folder: pathlib.Path) -> str:
    """Put a folder's choices into the card's file. Return a sentence about it.

    Raises:
        ValueError: the folder is not one of a command on a GPU.
    """
    try:
        about: dict[str, Any] = read_report(folder / "report.json")["about"]
    except (OSError, ReportError) as error:
        raise ValueError(f"{folder / 'report.json'}: {error}") from error
    if about.get("dry_run", True):
        raise ValueError(f"{folder} is of a dry run")
    kind = about["device"]
    old, new = read_choices(kind), read_archive(folder / "autotuned.tar.gz")
    said = {"jax": about["jax"], "measured": about["date"]}
    path = write_choices(kind, old | new, said)
    same = sum(old.get(name) == content for name, content in new.items())
    return f"wrote {path}: {len(old | new)} choices, {len(new) - same} of them new or changed"


def main() -> int:
    parser = script_parser("scripts.gpu.merge_autotuned", __doc__)
    parser.add_argument("folder", type=pathlib.Path, help="where a command left its results")
    arguments = parser.parse_args()
    try:
        print(merge(arguments.folder))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    run_main(main)
