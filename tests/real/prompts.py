"""The prompts and the prose that models with real weights are tested with."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REFERENCES = HERE / "references"
# Of how many prompts the short run takes one.
SPREAD = 8


@cache
def _file() -> dict[str, Any]:
    return json.loads((HERE / "prompts.json").read_text("utf-8"))


def texts() -> list[str]:
    """Return the raw prompts."""
    return [entry["text"] for entry in _file()["texts"]]


def chats() -> list[list[dict[str, str]]]:
    """Return the conversations, each a list of messages."""
    return _file()["chats"]


def turns() -> list[str]:
    """Return the user's messages in one long conversation."""
    return _file()["conversation"]


def prose() -> str:
    """Return 57 kB of English prose, with its source in the file's first paragraph."""
    return (HERE / "opticks.txt").read_text("utf-8").partition("\n\n")[2]


def load_reference(name: str) -> dict[str, Any]:
    """Return the stored results of `tests.real.references` for a model."""
    return json.loads((REFERENCES / f"{name}.json").read_text())
