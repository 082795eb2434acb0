"""Strict parsing of JSON objects in untrusted files.

The standard parser accepts three things that a checkpoint must not hold: duplicate keys (the last
one silently wins), NaN and Infinity, and files of any size or depth.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its file descriptor.

    Raises:
        CheckpointError: the file is absent, unreadable, or a directory, pipe, socket or device
            (which could block or never end).
    """
    try:
        # Non-blocking, because opening a pipe would otherwise wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be opened ({error})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a regular file")
    return descriptor


def read_object(path: Path, max_bytes: int, infinity: bool = False) -> dict[str, Any]:
    """Return the parsed JSON object in a file of at most `max_bytes` bytes.

    `infinity` accepts the constant Infinity.

    Raises:
        CheckpointError: the file is unreadable, too large, or not a strict JSON object (see
            `parse_object`).
    """
    with os.fdopen(open_regular(path), "rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise CheckpointError(f"{path}: larger than the {max_bytes} bytes allowed for this file")
    return parse_object(text, str(path), infinity)


def parse_object(text: bytes, where: str, infinity: bool = False) -> dict[str, Any]:
    """Return the JSON object in UTF-8 text, without duplicate keys, NaN and Infinity.

    Args:
        text: the bytes of the object.
        where: the source of `text`, for errors.
        infinity: whether the constant Infinity is accepted.

    Raises:
        CheckpointError: `text` is not such an object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise CheckpointError(f"{where}: the key {twice[:200]!r} appears twice")
        return result

    def number(constant: str) -> float:
        if infinity and constant == "Infinity":
            return float("inf")
        raise CheckpointError(f"{where}: {constant} is not a JSON number")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=number)
    except CheckpointError:
        raise
    # Deep nesting: RecursionError. Bad UTF-8, bad JSON, 5000-digit integers: ValueError.
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({str(error)[:200]})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds {type(value).__name__}, not a JSON object")
    return value
