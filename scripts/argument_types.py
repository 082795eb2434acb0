"""Types of the scripts' arguments. argparse says the argument's name, and these what is allowed."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Collection
from pathlib import Path

OBJECTIVES = ("ttft", "tpot", "e2el")


def positive_integer(text: str, least: int = 1) -> int:
    """An integer from 1 on.

    Raises:
        ArgumentTypeError: anything else, as with all types here.
    """
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {least}")
    return value


def integer_from_0(text: str) -> int:
    """An integer from 0 on."""
    return positive_integer(text, least=0)


def at_least(least: int) -> Callable[[str], int]:
    """The type of integers from `least` on."""
    return lambda text: positive_integer(text, least)


def integers(text: str) -> list[int]:
    """Integers from 1 on, with commas between them."""
    return [positive_integer(part) for part in text.split(",")]


def some_of(names: Collection[str]) -> Callable[[str], list[str]]:
    """The type of names out of `names`, with commas between them; each counts once."""

    def type_(text: str) -> list[str]:
        found = [part for part in text.split(",") if part]
        unknown = [part for part in found if part not in names]
        if unknown or not found:
            said = f"there is no {', '.join(unknown)}" if unknown else "none is named"
            raise argparse.ArgumentTypeError(f"{said}; there are {', '.join(names)}")
        return list(dict.fromkeys(found))

    return type_


def positive_or_inf(text: str) -> float:
    """A number above 0, which may be `inf`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def positive(text: str) -> float:
    """A number above 0."""
    value = positive_or_inf(text)
    if value == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, and finite")
    return value


def objective(text: str) -> tuple[str, float]:
    """`ttft:200`: milliseconds that a request must meet, of its TTFT, TPOT or latency."""
    name, _, limit = text.partition(":")
    if name not in OBJECTIVES:
        names = ", ".join(OBJECTIVES)
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME:MS, NAME of {names}")
    return name, positive(limit)


def writable_file(text: str) -> Path:
    """A file that can be written: what takes minutes must not fail at its end."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; it must be a file to write")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} must be where files can be written")
    return path
