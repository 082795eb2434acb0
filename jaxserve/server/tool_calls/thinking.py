"""ThinkingReader: separates the thoughts in a text from the answer."""

from __future__ import annotations

import enum

from jaxserve.server.tool_calls.formats import ThinkingFormat
from jaxserve.server.tool_calls.pieces import held_back


class Start(enum.Enum):
    """State of the thoughts at the end of a prompt."""

    OPEN = "open"  # the template has begun it
    CLOSED = "closed"  # the template has ended it
    FREE = "free"  # the model begins it itself, or not at all


def start_of(prompt_tail: str, thinking: ThinkingFormat) -> Start:
    """Return the state of the thoughts after the end of a prompt."""
    tail = prompt_tail.rstrip()
    if tail.endswith(thinking.start):
        return Start.OPEN
    return Start.CLOSED if tail.endswith(thinking.end) else Start.FREE


class ThinkingReader:
    """Incremental reader of a text in pieces; how the text is cut does not change the result.

    Space around the thoughts, and between them and the answer, is left out.

    Attributes:
        is_thinking: whether the text so far ends within the thoughts.
    """

    def __init__(self, thinking: ThinkingFormat, start: Start) -> None:
        self._format = thinking
        self._pending = ""
        self._is_certain = start is Start.CLOSED
        self._started = start is Start.OPEN
        self._is_blank = True
        self.is_thinking = start is Start.OPEN

    def feed(self, text: str, final: bool = False) -> tuple[str, str]:
        """Read more text. Return the new thoughts and the new answer that are certain by now."""
        self._pending += text
        if not self._is_certain and not self._begin(final):
            return "", ""
        thoughts = self._think(final) if self.is_thinking else ""
        if self.is_thinking:
            return thoughts, ""
        answer, self._pending = self._pending, ""
        if self._started and self._is_blank:
            answer = answer.lstrip()
        self._is_blank = self._is_blank and not answer
        return thoughts, answer

    def _begin(self, final: bool) -> bool:
        """Find out whether the text begins with a mark. Return False while that is not certain.

        Models repeat a mark that the template has set already.
        """
        mark, text = self._format.start, self._pending.lstrip()
        if not final and mark.startswith(text) and text != mark:
            return False
        self._is_certain = True
        if text.startswith(mark):
            self._pending = text[len(mark) :]
            self._started = self.is_thinking = True
        return True

    def _think(self, final: bool) -> str:
        text = self._pending
        if self._is_blank:
            text = text.lstrip()
        end = text.find(self._format.end)
        if end >= 0:
            self._pending = text[end + len(self._format.end) :]
            self.is_thinking, self._is_blank = False, True
            return text[:end].rstrip()
        kept = 0 if final else held_back(text, self._format.end)
        settled = text[: len(text) - kept].rstrip()
        self._pending = "" if final else text[len(settled) :]
        self._is_blank = self._is_blank and not settled
        return settled
