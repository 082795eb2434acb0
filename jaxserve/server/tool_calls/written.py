"""Tool calls as a model wrote them, and the text that a grammar allows beside them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.server.tool_calls.literals import read_json, write_json
from jaxserve.server.tool_calls.source import Uncallable

# Names of the tools that may be called, with the schemas of their arguments.
Tools = Mapping[str, dict[str, Any]]
NAME = r"[A-Za-z0-9_.-]{1,128}"


class Beside(enum.Enum):
    """Text that a grammar of calls allows in addition to calls."""

    NOTHING = "nothing"
    FORM = "form"  # structured output instead of calls
    TEXT = "text"


@dataclass(frozen=True)
class WrittenCall:
    """Call that a model wrote, or its beginning if a grammar forms it.

    Attributes:
        name: name of the tool.
        arguments: JSON text of an object, or its beginning.
        id: id as the model wrote it, None if the format has no ids that chat templates need.
    """

    name: str
    arguments: str
    id: str | None = None


def written(name: str, arguments: Any, number: str | None = None) -> WrittenCall:
    """Return a call with its arguments as JSON text.

    Args:
        name: name of the tool.
        arguments: object, JSON text of an object, or None for no arguments.
        number: id of the call, if the model wrote one.

    Raises:
        Uncallable: the arguments are not an object, or not valid JSON.
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
