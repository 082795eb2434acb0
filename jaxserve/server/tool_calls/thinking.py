"""ThinkingReader: parts what a model thinks from what it answers."""

from __future__ import annotations

import enum

from jaxserve.server.tool_calls.formats import Thinking
from jaxserve.server.tool_calls.pieces import held_back


class Start(enum.Enum):
    """How the prompt leaves the reasoning."""

    OPEN = "open"  # the template has begun it
    CLOSED = "closed"  # the template has ended it
    FREE = "free"  # the model begins it itself, or not at all


def start_of(prompt_tail: str, marks: Thinking) -> Start:
    """What the end of a prompt says."""
    tail = prompt_tail.rstrip()
    if tail.endswith(marks.start):
        return Start.OPEN
    return Start.CLOSED if tail.endswith(marks.end) else Start.FREE


class ThinkingReader:
    """Takes a text in pieces of any length; what it makes of it does not depend on them.

    Space around the thoughts, and between them and the answer, is left out.

    Attributes:
        is_thinking: whether the text so far ends within the thoughts.
    """

    def __init__(self, marks: Thinking, start: Start) -> None:
        self._marks = marks
        self._pending = ""
        self._is_certain = start is Start.CLOSED
        self._started = start is Start.OPEN
        self._says_nothing_yet = True
        self.is_thinking = start is Start.OPEN

    def feed(self, text: str, final: bool = False) -> tuple[str, str]:
        """More text; returns the thoughts and the answer that are certain by now."""
        self._pending += text
        if not self._is_certain and not self._begin(final):
            return "", ""
        thoughts = self._think(final) if self.is_thinking else ""
        if self.is_thinking:
            return thoughts, ""
        answer, self._pending = self._pending, ""
        if self._started and self._says_nothing_yet:
            answer = answer.lstrip()
        self._says_nothing_yet = self._says_nothing_yet and not answer
        return thoughts, answer

    def _begin(self, final: bool) -> bool:
        """Find out whether the text begins with a mark; False while that is not certain.

        Models repeat a mark that the template has set already.
        """
        mark, text = self._marks.start, self._pending.lstrip()
        if not final and mark.startswith(text) and text != mark:
            return False
        self._is_certain = True
        if text.startswith(mark):
            self._pending = text[len(mark) :]
            self._started = self.is_thinking = True
        return True

    def _think(self, final: bool) -> str:
        text = self._pending
        if self._says_nothing_yet:
            text = text.lstrip()
        end = text.find(self._marks.end)
        if end >= 0:
            self._pending = text[end + len(self._marks.end) :]
            self.is_thinking, self._says_nothing_yet = False, True
            return text[:end].rstrip()
        kept = 0 if final else held_back(text, self._marks.end)
        said = text[: len(text) - kept].rstrip()
        self._pending = "" if final else text[len(said) :]
        self._says_nothing_yet = self._says_nothing_yet and not said
        return said
