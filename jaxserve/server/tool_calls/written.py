"""WrittenCall: a call that was read; Tools: the ones that may be called."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.server.tool_calls.literals import read_json, write_json
from jaxserve.server.tool_calls.source import Uncallable

# The schema of the arguments of each tool that may be called, by its name.
Tools = Mapping[str, dict[str, Any]]
NAME = r"[A-Za-z0-9_.-]{1,128}"


class Beside(enum.Enum):
    """The text that a grammar of calls allows beside them."""

    NOTHING = "nothing"
    FORM = "form"  # an answer of a form in place of the calls
    TEXT = "text"


@dataclass(frozen=True)
class WrittenCall:
    """A call, or the beginning of one that a grammar forms.

    Attributes:
        name: of the tool.
        arguments: JSON text of an object, or its beginning.
        id: as the model wrote it; None where it writes none that templates need.
    """

    name: str
    arguments: str
    id: str | None = None


def written(name: str, arguments: Any, number: str | None = None) -> WrittenCall:
    """Return a call with its arguments: an object, the JSON text of it, or None for no arguments.

    Raises:
        Uncallable: they are anything else.
    """
    try:
        if isinstance(arguments, str):
            arguments = read_json(arguments) if arguments.strip() else None
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise Uncallable
        return WrittenCall(name, write_json(arguments), number)
    except ValueError:
        raise Uncallable from None
