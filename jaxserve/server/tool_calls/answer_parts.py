"""Content, thoughts and tool calls of an answer, in parts as readers return them."""

from __future__ import annotations

import enum
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.server.tool_calls.literals import read_json, write_json
from jaxserve.server.tool_calls.text_feed import UncallableCall

_ALPHABET = string.ascii_letters + string.digits


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


class AnswerBuffer:
    """Pending parts of an answer, which are certain and not fetched yet.

    Args:
        parallel: True if several calls are allowed. Otherwise all calls after the first are
            dropped.
        id_length: length of generated call ids, None for OpenAI's form.
        is_silent: True if content is dropped. It may be changed later.
    """

    def __init__(self, parallel: bool, id_length: int | None, is_silent: bool = False) -> None:
        self.is_silent = is_silent
        self._parallel = parallel
        self._id_length = id_length
        self._pieces: list[AnswerPart] = []
        self._num_calls = 0
        self._has_calls = False
        self._spaces: list[str] = []  # becomes content if more content follows
        self._has_content = False

    def fetch(self, final: bool) -> list[AnswerPart]:
        """Return the collected parts, and clear them."""
        if final and not self._has_calls and self._spaces:
            self._pieces.append(Content("".join(self._spaces)))
            self._spaces.clear()
        pieces, self._pieces = self._pieces, []
        return pieces

    def say(self, text: str) -> None:
        """Add content.

        White space at its end is held back, since a call would make it disappear.
        """
        if self.is_silent:
            return
        content = text.rstrip()
        if content:
            spaced = "".join(self._spaces) + content
            is_first = self._has_calls and not self._has_content
            self._pieces.append(Content(spaced.lstrip() if is_first else spaced))
            self._has_content = True
            self._spaces.clear()
        if len(content) < len(text):
            self._spaces.append(text[len(content) :])

    def leave_out_space(self) -> None:
        """Drop the white space held back, and mark the answer as having calls."""
        self._has_calls = True
        self._spaces.clear()

    def call(self, call: WrittenCall) -> None:
        """Add a call, or its beginning."""
        self._num_calls += 1
        self.leave_out_space()
        if self._parallel or self._num_calls == 1:
            number = call.id or self._new_id()
            index = self._num_calls - 1
            self._pieces.append(CallPart(index, call.arguments, number, call.name))

    def more(self, arguments: str) -> None:
        """Append to the arguments of the newest call."""
        if self._parallel or self._num_calls == 1:
            self._pieces.append(CallPart(self._num_calls - 1, arguments))

    def _new_id(self) -> str:
        if self._id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ALPHABET) for _ in range(self._id_length))
