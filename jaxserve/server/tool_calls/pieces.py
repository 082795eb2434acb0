"""Pieces of a text that has been read: content, thoughts and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass
class Call:
    """A tool call; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """An answer as the sum of its pieces so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        if isinstance(piece, Content):
            self.content += piece.text
        elif isinstance(piece, Thought):
            self.reasoning += piece.text
        else:
            if piece.id is not None and piece.name is not None:
                self.calls.append(Call(piece.id, piece.name))
            self.calls[piece.index].arguments += piece.arguments


def held_back(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that may begin a mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0
