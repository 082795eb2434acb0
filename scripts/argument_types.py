"""Types of the scripts' arguments. argparse says the argument's name, and these what is allowed."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path


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
