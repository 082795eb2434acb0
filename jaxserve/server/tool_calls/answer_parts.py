"""Content, thoughts and tool calls of an answer, in parts as readers return them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.server.tool_calls.literals import read_json, write_json
from jaxserve.server.tool_calls.text_feed import UncallableCall


@dataclass(frozen=True)
class Content:
    """Next part of the answer text."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Next part of the reasoning text before the answer."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """Next part of a tool call. The first part of each call has its `id` and `name`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


AnswerPart = Content | Thought | CallPart


class TextBuilder:
    """String builder: appending costs time proportional to the added text."""

    def __init__(self, text: str = "") -> None:
        self._parts = [text]

    def __str__(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0]

    def add(self, text: str) -> None:
        self._parts.append(text)


class Call:
    """A tool call."""

    def __init__(self, number: str, name: str) -> None:
        self.id = number
        self.name = name
        self._arguments = TextBuilder()

    @property
    def arguments(self) -> str:
        """JSON text of the arguments object."""
        return str(self._arguments)

    def add(self, text: str) -> None:
        """Append `text` to the arguments."""
        self._arguments.add(text)


class Message:
    """Answer assembled from the parts that readers returned."""

    def __init__(self, content: str = "") -> None:
        self._content = TextBuilder(content)
        self._reasoning = TextBuilder()
        self.calls: list[Call] = []

    @property
    def content(self) -> str:
        """Answer text so far."""
        return str(self._content)

    @property
    def reasoning(self) -> str:
        """Reasoning text so far."""
        return str(self._reasoning)

    def add(self, piece: AnswerPart) -> None:
        """Append a part of the answer to the content, the reasoning or a call."""
        if isinstance(piece, Content):
            self._content.add(piece.text)
        elif isinstance(piece, Thought):
            self._reasoning.add(piece.text)
        else:
            if piece.id is not None and piece.name is not None:
                self.calls.append(Call(piece.id, piece.name))
            self.calls[piece.index].add(piece.arguments)


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
    """Call that a model wrote, or its beginning if a grammar forms it."""

    name: str
    arguments: str  # JSON text of an object, or its beginning
    # Id as the model wrote it, None if the format has no ids that chat templates need.
    id: str | None = None


def make_call(name: str, arguments: Any, number: str | None = None) -> WrittenCall:
    """Return a call with its arguments as JSON text.

    Args:
        arguments: object, JSON text of an object, or None for no arguments.

    Raises:
        UncallableCall: the arguments are not an object, or not valid JSON.
    """
    try:
        if isinstance(arguments, str):
            arguments = read_json(arguments) if arguments.strip() else None
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise UncallableCall
        return WrittenCall(name, write_json(arguments), number)
    except ValueError:
        raise UncallableCall from None
