"""Content, thoughts and tool calls of an answer, in parts as readers return them."""

from __future__ import annotations

from dataclasses import dataclass


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


Piece = Content | Thought | CallPart


class Growing:
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
        self._arguments = Growing()

    @property
    def arguments(self) -> str:
        """JSON text of the arguments object."""
        return str(self._arguments)

    def add(self, text: str) -> None:
        """Append `text` to the arguments."""
        self._arguments.add(text)


class Message:
    """Answer assembled from the parts that readers returned.

    Attributes:
        calls: the tool calls so far.
    """

    def __init__(self, content: str = "") -> None:
        self._content = Growing(content)
        self._reasoning = Growing()
        self.calls: list[Call] = []

    @property
    def content(self) -> str:
        """Answer text so far."""
        return str(self._content)

    @property
    def reasoning(self) -> str:
        """Reasoning text so far."""
        return str(self._reasoning)

    def add(self, piece: Piece) -> None:
        """Append a part of the answer to the content, the reasoning or a call."""
        if isinstance(piece, Content):
            self._content.add(piece.text)
        elif isinstance(piece, Thought):
            self._reasoning.add(piece.text)
        else:
            if piece.id is not None and piece.name is not None:
                self.calls.append(Call(piece.id, piece.name))
            self.calls[piece.index].add(piece.arguments)
