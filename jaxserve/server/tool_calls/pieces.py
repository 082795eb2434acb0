"""Pieces of a text that has been read: content, thoughts and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Continuation of the answer itself."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Continuation of the thoughts before the answer."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """Continuation of a call; the first part of each has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Piece = Content | Thought | CallPart


class Growing:
    """A text that grows at its end, at the cost of what is added."""

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
        """Text of a JSON object."""
        return str(self._arguments)

    def add(self, text: str) -> None:
        """Add to the arguments."""
        self._arguments.add(text)


class Message:
    """An answer as the sum of its pieces so far.

    Attributes:
        calls: the calls in it.
    """

    def __init__(self, content: str = "") -> None:
        self._content = Growing(content)
        self._reasoning = Growing()
        self.calls: list[Call] = []

    @property
    def content(self) -> str:
        """Text of the answer itself."""
        return str(self._content)

    @property
    def reasoning(self) -> str:
        """Text of the thoughts."""
        return str(self._reasoning)

    def add(self, piece: Piece) -> None:
        """Add what was read."""
        if isinstance(piece, Content):
            self._content.add(piece.text)
        elif isinstance(piece, Thought):
            self._reasoning.add(piece.text)
        else:
            if piece.id is not None and piece.name is not None:
                self.calls.append(Call(piece.id, piece.name))
            self.calls[piece.index].add(piece.arguments)
