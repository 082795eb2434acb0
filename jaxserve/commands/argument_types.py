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
    """Return the integer from `least` to `most` that the text of an argument represents.

    `most=None` is no upper limit.

    Raises:
        ArgumentTypeError: the text is not an integer of this range.
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
    """Return the integer of at least 0 that a text represents, or raise ArgumentTypeError."""
    return positive_integer(text, least=0)


def some_of(names: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse type that converts a comma-separated list of `names` to a list of strings.

    Repetitions are removed. The type raises ArgumentTypeError for an unknown name or an empty list.
    """

    def type_(text: str) -> list[str]:
        parts = [part for part in text.split(",") if part]
        unknown = [part for part in parts if part not in names]
        if unknown or not parts:
            said = f"there is no {', '.join(unknown)}" if unknown else "none is named"
            raise argparse.ArgumentTypeError(f"{said}; there are {', '.join(names)}")
        return list(dict.fromkeys(parts))

    return type_


def number_in(least: float, most: float, below: bool = False) -> Callable[[str], float]:
    """Return an argparse type that converts text to a float from `least` to `most`.

    The type raises ArgumentTypeError for any other text. `below=True` excludes `most`.
    """

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
    """Return the number above 0 (or `inf`) that a text represents, or raise ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def positive(text: str) -> float:
    """Return the finite number above 0 that a text represents, or raise ArgumentTypeError."""
    value = positive_or_inf(text)
    if value == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, and finite")
    return value


def objective(text: str) -> tuple[str, float]:
    """Convert a goal of a benchmark like `ttft:200` to a pair (name of the latency, milliseconds).

    The names are ttft (time to first token), tpot (time per output token) and e2el (end-to-end
    latency).

    Raises:
        ArgumentTypeError: the name is unknown, or the limit is not a number above 0.
    """
    name, _, limit = text.partition(":")
    if name not in OBJECTIVES:
        names = ", ".join(OBJECTIVES)
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME:MS, NAME of {names}")
    return name, positive(limit)


def writable_file(text: str) -> Path:
    """Return the path of a file, after a check that the file can be created or overwritten.

    The check is made before a command that takes minutes. It does not create the file.

    Raises:
        ArgumentTypeError: the path is a folder, its folder does not exist, or it cannot be written.
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
    """Return a text as the path of an existing file, or raise ArgumentTypeError."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file that exists")
    return Path(text)


def writable_folder(text: str) -> Path:
    """Return a text as the path of an existing, writable folder, or raise ArgumentTypeError."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a folder that exists")
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} must be where files can be written")
    return path


def http_url(text: str) -> str:
    """Return a URL like `http://HOST:PORT` without trailing slashes, or raise ArgumentTypeError."""
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a number
        is_url = False
    if not is_url:
        raise argparse.ArgumentTypeError(f"{text!r} must be a URL, like http://10.0.0.7:8000")
    return text.rstrip("/")


def name_value(text: str) -> tuple[str, str]:
    """Split the text `NAME=VALUE` into a pair (name, value), or raise ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    return name, value


def header(text: str) -> tuple[str, str]:
    """Split the text `NAME=VALUE` of an HTTP header into a pair (name, value).

    Raises:
        ArgumentTypeError: there is no value, or a character is not allowed in a header.
    """
    name, value = name_value(text)
    if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII) or re.search(r"[\r\n\0]", value):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be NAME=VALUE of a header: letters, digits and dashes, and one line"
        )
    return name, value


def json_object(text: str) -> dict[str, Any]:
    """Return the dict of a JSON object in a text, or raise ArgumentTypeError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be an object, like '{{\"top_k\": 5}}'")
    return value
