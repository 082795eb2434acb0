"""Source: a text that comes in, read from left to right by generators."""

from __future__ import annotations

import functools
import re
from collections.abc import Generator
from typing import TypeVar

from jaxserve.server.tool_calls.literals import EndFinder
from jaxserve.text.added_texts import pattern_of_any

T = TypeVar("T")
# A reader that yields whenever it needs more of the text.
Reading = Generator[None, None, T]
# The longest text before a call's arguments.
MAX_HEAD = 512
_SPACE = re.compile(r"\s+")


class Malformed(Exception):
    """A text that is not what it began like."""


class Cut(Malformed):
    """A text that ended inside a call."""


class Uncallable(Malformed):
    """A call that has been taken to its end, and calls no tool: its name or arguments are wrong."""


class Repeated(Uncallable):
    """A call with bare values that names an argument twice, so that its end is doubtful."""


class Source:
    """A text of which the beginning is known, and of that the part that has not been taken.

    Readers are generators: they take from the beginning, and yield to wait for more. Nothing that
    was taken is looked at again, so that a long text costs the same in many pieces.

    Attributes:
        text: the part of it that is at hand.
        position: in this text, of the first character that has not been taken.
        is_final: whether nothing will be added.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_final = False
        self._taken: list[str] = []

    def add(self, text: str, final: bool) -> None:
        rest = self.text[self.position :]
        self.text = rest + text if rest else text
        self.position = 0
        self.is_final = final

    @property
    def is_empty(self) -> bool:
        """Return whether all that came has been taken."""
        return self.position == len(self.text)

    def take_to(self, end: int) -> str:
        """Take the characters up to a position in the text."""
        text = self.text[self.position : end]
        self.position += len(text)
        self._taken.append(text)
        return text

    def take(self, count: int) -> str:
        """Take that many characters."""
        return self.take_to(self.position + count)

    def settle(self) -> None:
        """Forget what was taken: it will not be needed again."""
        self._taken.clear()

    def rewind(self) -> None:
        """Put back what was taken since the text was last settled."""
        self._put_back(0)

    def _put_back(self, count: int) -> None:
        """Put back all but the first `count` parts that were taken."""
        size = sum(map(len, self._taken[count:]))
        if size <= self.position:
            self.position -= size
        else:  # it came in earlier pieces
            self.text = "".join(self._taken[count:]) + self.text[self.position :]
            self.position = 0
        del self._taken[count:]

    def search(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return where a pattern is first found in what has not been taken."""
        return pattern.search(self.text, self.position)

    def certain_end(self, marks: tuple[str, ...]) -> int:
        """Return the position before what may begin a mark, at the end of the text."""
        return len(self.text) - held_back(self.text, marks, self.position)

    def more(self) -> Reading[None]:
        """Wait for more text.

        Raises:
            Cut: there is none.
        """
        if self.is_final:
            raise Cut
        yield

    def skip_space(self) -> Reading[None]:
        """Take white space, up to the first other character or the end."""
        while True:
            found = _SPACE.match(self.text, self.position)
            if found is not None:
                self.take_to(found.end())
            if not self.is_empty or self.is_final:
                return
            yield

    def has(self, *marks: str) -> Reading[str]:
        """Return which of some marks comes next; "" for none. None of them begins another."""
        while True:
            for mark in marks:
                if mark and self.text.startswith(mark, self.position):
                    return mark
            rest = self.text[self.position : self.position + MAX_HEAD]
            if self.is_final or not any(mark.startswith(rest) for mark in marks if mark):
                return ""
            yield

    def is_cut(self, *marks: str) -> bool:
        """Return whether the text has ended before one of some marks was whole."""
        rest = self.text[self.position : self.position + MAX_HEAD]
        return self.is_final and any(mark.startswith(rest) and mark != rest for mark in marks)

    def takes(self, *marks: str) -> Reading[str]:
        """Take the mark that comes next, if it does; see `has`."""
        mark = yield from self.has(*marks)
        if mark:
            self.take(len(mark))
        return mark

    def takes_behind_space(self, *marks: str) -> Reading[str]:
        """Take white space and the mark behind it, if that comes; else neither."""
        if not any(marks):
            return ""
        count = len(self._taken)
        yield from self.skip_space()
        mark = yield from self.takes(*marks)
        if not mark:
            self._put_back(count)
        return mark

    def expect(self, mark: str) -> Reading[None]:
        """Take a mark that has to come next.

        Raises:
            Malformed: it does not.
        """
        if mark and not (yield from self.takes(mark)):
            raise Cut if self.is_cut(mark) else Malformed

    def match(self, pattern: re.Pattern[str]) -> Reading[re.Match[str]]:
        """Take what a pattern matches, which is short and ends with what cannot go on.

        Raises:
            Malformed: nothing does.
        """
        tried = ""
        while True:
            head, found = self.text[self.position : self.position + MAX_HEAD].rstrip(), None
            if head != tried:  # more space alone changes nothing
                found = pattern.match(self.text, self.position, self.position + MAX_HEAD)
                tried = head
            if found is not None:
                self.take_to(found.end())
                return found
            if len(self.text) - self.position >= MAX_HEAD:
                raise Malformed
            yield from self.more()

    def rest(self) -> Reading[str]:
        """Take all text up to the end."""
        parts = list[str]()
        while True:
            parts.append(self.take_to(len(self.text)))
            self.settle()
            if self.is_final:
                return "".join(parts)
            yield

    def until(self, *marks: str) -> Reading[tuple[str, str]]:
        """Take the text up to the first of some marks, and the mark. Return both.

        Raises:
            Malformed: none comes.
        """
        pattern, parts = any_of(marks), list[str]()
        while True:
            found = self.search(pattern)
            if found is not None:
                parts.append(self.take_to(found.start()))
                return "".join(parts), self.take_to(found.end())
            parts.append(self.take_to(self.certain_end(marks)))
            yield from self.more()

    def bracketed(self, python: bool = False) -> Reading[str]:
        """Take a value in brackets, of which the first comes next.

        Raises:
            Malformed: it does not end.
        """
        finder, parts = EndFinder(python), list[str]()
        while True:
            end = finder.find(self.text, self.position)
            parts.append(self.take_to(len(self.text) if end is None else end))
            if end is not None:
                return "".join(parts)
            yield from self.more()


def result_of(reading: Reading[T]) -> T:
    """Return the result of a reading of a text that is complete, which never waits for more."""
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return end.value


@functools.lru_cache(maxsize=256)
def any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds any of some marks, the longest of those in one place."""
    return re.compile(pattern_of_any(marks))


@functools.lru_cache(maxsize=256)
def _beginnings(marks: tuple[str, ...]) -> tuple[int, frozenset[str], frozenset[str]]:
    beginnings = {mark[:size] for mark in marks for size in range(1, len(mark))}
    longest = max(map(len, beginnings), default=0)
    return longest, frozenset(beginnings), frozenset(mark[0] for mark in marks if mark)


def held_back(text: str, marks: tuple[str, ...], start: int = 0) -> int:
    """Return the length of the longest end of a text, behind `start`, that may begin a mark."""
    longest, beginnings, first = _beginnings(marks)
    for size in range(min(longest, len(text) - start), 0, -1):
        if text[-size] in first and text[-size:] in beginnings:
            return size
    return 0
