"""Types of command-line arguments. Their errors state the allowed values."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

OBJECTIVES = ("ttft", "tpot", "e2el")


def positive_integer(text: str, least: int = 1, most: int | None = None) -> int:
    """Parse an integer from `least` to `most`.

    Raises:
        ArgumentTypeError: the text is invalid. All functions of this module raise it.
    """
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {least}")
    if most is not None and value > most:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at most {most:,}")
    return value


def integer_from_0(text: str) -> int:
    """Parse an integer of at least 0."""
    return positive_integer(text, least=0)


def some_of(names: Collection[str]) -> Callable[[str], list[str]]:
    """Return a function that parses a comma-separated list of `names` without repetitions."""

    def type_(text: str) -> list[str]:
        parts = [part for part in text.split(",") if part]
        unknown = [part for part in parts if part not in names]
        if unknown or not parts:
            said = f"there is no {', '.join(unknown)}" if unknown else "none is named"
            raise argparse.ArgumentTypeError(f"{said}; there are {', '.join(names)}")
        return list(dict.fromkeys(parts))

    return type_


def number_in(least: float, most: float, below: bool = False) -> Callable[[str], float]:
    """Return a function that parses a number from `least` to `most`, or below `most`."""

    def type_(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most) or (below and value == most):
            end = "below" if below else "to"
            raise argparse.ArgumentTypeError(
                f"{text!r} must be a number from {least:g} {end} {most:g}"
            )
        return value

    return type_


def positive_or_inf(text: str) -> float:
    """Parse a number above 0 or `inf`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def positive(text: str) -> float:
    """Parse a number above 0."""
    value = positive_or_inf(text)
    if value == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, and finite")
    return value


def objective(text: str) -> tuple[str, float]:
    """Parse a goal like `ttft:200`, in milliseconds, for TTFT, TPOT or the latency of a request."""
    name, _, limit = text.partition(":")
    if name not in OBJECTIVES:
        names = ", ".join(OBJECTIVES)
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME:MS, NAME of {names}")
    return name, positive(limit)


def writable_file(text: str) -> Path:
    """Return the path of a file after a check that it can be written.

    A command that takes minutes must not fail at its end.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; it must be a file to write")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} must be where files can be written")
    return path


def existing_file(text: str) -> Path:
    """Return the path of an existing file."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file that exists")
    return Path(text)


def writable_folder(text: str) -> Path:
    """Return the path of an existing folder in which files can be written."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a folder that exists")
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} must be where files can be written")
    return path


def http_url(text: str) -> str:
    """Return a URL like `http://HOST:PORT` without a slash at its end."""
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a number
        is_url = False
    if not is_url:
        raise argparse.ArgumentTypeError(f"{text!r} must be a URL, like http://10.0.0.7:8000")
    return text.rstrip("/")


def name_value(text: str) -> tuple[str, str]:
    """Parse `NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    return name, value


def header(text: str) -> tuple[str, str]:
    """Parse `NAME=VALUE` for a valid HTTP header."""
    name, value = name_value(text)
    if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII) or re.search(r"[\r\n\0]", value):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be NAME=VALUE of a header: letters, digits and dashes, and one line"
        )
    return name, value


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be an object, like '{{\"top_k\": 5}}'")
    return value
