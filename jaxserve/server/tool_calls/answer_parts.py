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
    """Next part of an answer's text, outside thoughts and tool calls."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Next part of the thoughts (reasoning text) in an answer."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """Next part of tool call number `index` in an answer, with a piece of the JSON text of its
    arguments.

    The first part of each call also has the call's `id` and the tool's `name`. Later parts have
    None.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


AnswerPart = Content | Thought | CallPart


class TextBuilder:
    """String builder. Appending a text takes time proportional to the length of that text alone."""

    def __init__(self, text: str = "") -> None:
        self._parts = [text]

    def __str__(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0]

    def add(self, text: str) -> None:
        self._parts.append(text)


class Call:
    """Tool call of an answer, assembled from its parts: its id, tool name and arguments."""

    def __init__(self, number: str, name: str) -> None:
        self.id = number
        self.name = name
        self._arguments = TextBuilder()

    @property
    def arguments(self) -> str:
        """JSON text of the tool call's arguments received so far."""
        return str(self._arguments)

    def add(self, text: str) -> None:
        """Append `text` to the JSON text of the tool call's arguments."""
        self._arguments.add(text)


class Message:
    """Answer of a model, assembled from parts of content, thoughts and tool calls."""

    def __init__(self, content: str = "") -> None:
        self._content = TextBuilder(content)
        self._reasoning = TextBuilder()
        self.calls: list[Call] = []

    @property
    def content(self) -> str:
        """Text of the answer received so far, without thoughts and tool calls."""
        return str(self._content)

    @property
    def reasoning(self) -> str:
        """Text of the thoughts received so far."""
        return str(self._reasoning)

    def add(self, piece: AnswerPart) -> None:
        """Append a part of the answer to the content, the thoughts or the tool call that it belongs
        to.
        """
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
    """Text that a grammar of tool calls allows an answer to contain in addition to the calls."""

    NOTHING = "nothing"
    FORM = "form"  # structured output instead of calls
    TEXT = "text"


@dataclass(frozen=True)
class WrittenCall:
    """Tool call that was read from an answer: tool name, JSON text of the arguments, and id.

    If a grammar enforces the call, the arguments may be only the beginning of the JSON text.
    """

    name: str
    arguments: str  # JSON text of an object, or its beginning
    # Id as the model wrote it, None if the format has no ids that chat templates need.
    id: str | None = None


def make_call(name: str, arguments: Any, number: str | None = None) -> WrittenCall:
    """Return a tool call with its arguments as JSON text.

    Args:
        name: name of the tool.
        arguments: object, JSON text of an object, or None or "" for no arguments.
        number: id of the call as the model wrote it, or None.

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
    """Buffer of content and tool calls that a reader has found, until they are fetched.

    Args:
        parallel: False to drop all calls after the first.
        id_length: length of generated call ids of letters and digits, None for OpenAI's form
            "call_...".
        is_silent: True to drop content. The attribute may be changed later.
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
        """Return the buffered parts of the answer in order, and empty the buffer.

        Args:
            final: True if the answer ends here. White space held back then becomes content, unless
                the answer has calls.
        """
        if final and not self._has_calls and self._spaces:
            self._pieces.append(Content("".join(self._spaces)))
            self._spaces.clear()
        pieces, self._pieces = self._pieces, []
        return pieces

    def say(self, text: str) -> None:
        """Add content to the buffer, unless content is dropped.

        White space at the end of `text` is held back until more content follows: next to tool calls
        it is dropped.
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
        """Drop the white space held back, and record that the answer has tool calls."""
        self._has_calls = True
        self._spaces.clear()

    def call(self, call: WrittenCall) -> None:
        """Add a tool call, or its beginning, to the buffer, with a new id if the call has none.

        The white space held back is dropped, and so is the call itself if only one call is allowed
        and it is not the first.
        """
        self._num_calls += 1
        self.leave_out_space()
        if self._parallel or self._num_calls == 1:
            number = call.id or self._new_id()
            index = self._num_calls - 1
            self._pieces.append(CallPart(index, call.arguments, number, call.name))

    def more(self, arguments: str) -> None:
        """Append JSON text to the arguments of the newest tool call, unless that call was
        dropped.
        """
        if self._parallel or self._num_calls == 1:
            self._pieces.append(CallPart(self._num_calls - 1, arguments))

    def _new_id(self) -> str:
        if self._id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ALPHABET) for _ in range(self._id_length))
