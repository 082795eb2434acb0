"""Incremental text input: generators read it from left to right while more text arrives."""

from __future__ import annotations

import functools
import re
from collections.abc import Generator
from typing import TypeVar

from jaxserve.server.tool_calls.literals import EndFinder
from jaxserve.text.added_texts import pattern_of_any

T = TypeVar("T")
# Generator that reads from a `TextFeed`. It yields when it needs more text, and returns a T.
Reading = Generator[None, None, T]
# Maximum number of characters before a call's arguments.
MAX_HEAD = 512
_SPACE = re.compile(r"\s+")


class FormatMismatch(Exception):
    """Error: the text that is read does not match the expected format of a tool call."""


class IncompleteCall(FormatMismatch):
    """Error: the text ended inside a tool call."""


class UncallableCall(FormatMismatch):
    """Error: a tool call is complete, but its tool is unknown or its arguments are invalid."""


class RepeatedArgument(UncallableCall):
    """Error: a tool call gives an argument twice, so the end of its unquoted values is
    uncertain.
    """


class TextFeed:
    """Text input that arrives in pieces, with a read position that moves from left to right.

    Readers are generators: they consume text from the read position on, and yield to wait for more.
    Consumed text is not scanned again, so the total cost is linear in the length of the text,
    whatever the size of the pieces.
    """

    def __init__(self) -> None:
        self.text = ""  # the text available now. It begins at or before the read position.
        self.position = 0  # index in `text` of the first character that has not been consumed
        self.is_final = False  # True if no more text will be added
        self._taken: list[str] = []

    def add(self, text: str, final: bool) -> None:
        rest = self.text[self.position :]
        self.text = rest + text if rest else text
        self.position = 0
        self.is_final = final

    @property
    def is_empty(self) -> bool:
        """Whether all text that has arrived has been consumed."""
        return self.position == len(self.text)

    def take_to(self, end: int) -> str:
        """Consume and return the text from the read position to index `end` (exclusive) of
        `text`.
        """
        text = self.text[self.position : end]
        self.position += len(text)
        self._taken.append(text)
        return text

    def take(self, count: int) -> str:
        """Consume and return the next `count` characters of the text, fewer if it ends before."""
        return self.take_to(self.position + count)

    def settle(self) -> None:
        """Commit the text consumed so far, so that a later `rewind` returns to the current read
        position.
        """
        self._taken.clear()

    def rewind(self) -> None:
        """Move the read position back to its place at the last `settle`."""
        self._put_back(0)

    def _put_back(self, count: int) -> None:
        size = sum(map(len, self._taken[count:]))
        if size <= self.position:
            self.position -= size
        else:  # the taken text is no longer part of self.text
            self.text = "".join(self._taken[count:]) + self.text[self.position :]
            self.position = 0
        del self._taken[count:]

    def search(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return the first match of `pattern` in the unread part of the available text, or None."""
        return pattern.search(self.text, self.position)

    def certain_end(self, marks: tuple[str, ...]) -> int:
        """Return the index in `text` from which on the text may be an incomplete marker.

        It is the length of `text`, unless the unread text ends with the beginning of one of
        `marks`.
        """
        return len(self.text) - held_back(self.text, marks, self.position)

    def more(self) -> Reading[None]:
        """Yield once, to wait until more text has been added.

        Raises:
            IncompleteCall: the text has ended.
        """
        if self.is_final:
            raise IncompleteCall
        yield

    def skip_space(self) -> Reading[None]:
        """Consume white space, waiting for more text, up to the next other character or the end of
        the text.
        """
        while True:
            match = _SPACE.match(self.text, self.position)
            if match is not None:
                self.take_to(match.end())
            if not self.is_empty or self.is_final:
                return
            yield

    def has(self, *marks: str) -> Reading[str]:
        """Wait until it is certain which of the markers comes next. The marker is not consumed.

        Args:
            marks: markers to expect, none of which is a prefix of another.

        Returns:
            The marker at the read position, or "" if the text continues differently or ends.
        """
        while True:
            for mark in marks:
                if mark and self.text.startswith(mark, self.position):
                    return mark
            rest = self.text[self.position : self.position + MAX_HEAD]
            if self.is_final or not any(mark.startswith(rest) for mark in marks if mark):
                return ""
            yield

    def is_cut(self, *marks: str) -> bool:
        """Return whether the input has ended, and its unread text is a proper prefix of one of
        `marks`.
        """
        rest = self.text[self.position : self.position + MAX_HEAD]
        return self.is_final and any(mark.startswith(rest) and mark != rest for mark in marks)

    def takes(self, *marks: str) -> Reading[str]:
        """Wait for the next characters, and consume and return the one of `marks` that comes next.

        If no marker comes next, nothing is consumed and the result is "".
        """
        mark = yield from self.has(*marks)
        if mark:
            self.take(len(mark))
        return mark

    def takes_behind_space(self, *marks: str) -> Reading[str]:
        """Consume white space and the one of `marks` after it, and return the marker.

        If no such marker follows, the white space stays unread and the result is "".
        """
        if not any(marks):
            return ""
        count = len(self._taken)
        yield from self.skip_space()
        mark = yield from self.takes(*marks)
        if not mark:
            self._put_back(count)
        return mark

    def expect(self, mark: str) -> Reading[None]:
        """Consume the marker `mark`, which must come next.

        Raises:
            IncompleteCall: the text ended within the marker.
            FormatMismatch: other text comes next.
        """
        if mark and not (yield from self.takes(mark)):
            raise IncompleteCall if self.is_cut(mark) else FormatMismatch

    def match(self, pattern: re.Pattern[str]) -> Reading[re.Match[str]]:
        """Wait for a match of `pattern` at the read position, consume it, and return the match
        object.

        The match must be shorter than MAX_HEAD characters and must not depend on later text.

        Raises:
            FormatMismatch: the next MAX_HEAD characters do not match.
            IncompleteCall: the text ended without a match.
        """
        tried = ""
        while True:
            head, match = self.text[self.position : self.position + MAX_HEAD].rstrip(), None
            if head != tried:  # more white space alone cannot complete a match
                match = pattern.match(self.text, self.position, self.position + MAX_HEAD)
                tried = head
            if match is not None:
                self.take_to(match.end())
                return match
            if len(self.text) - self.position >= MAX_HEAD:
                raise FormatMismatch
            yield from self.more()

    def rest(self) -> Reading[str]:
        """Consume and return all text up to the end of the input, waiting for text that is yet to
        come.
        """
        parts = list[str]()
        while True:
            parts.append(self.take_to(len(self.text)))
            self.settle()
            if self.is_final:
                return "".join(parts)
            yield

    def until(self, *marks: str) -> Reading[tuple[str, str]]:
        """Wait for the first of some markers, and consume the text up to the end of that marker.

        Returns:
            The text before the marker, and the marker.

        Raises:
            IncompleteCall: the text ended without any of the markers.
        """
        pattern, parts = any_of(marks), list[str]()
        while True:
            match = self.search(pattern)
            if match is not None:
                parts.append(self.take_to(match.start()))
                return "".join(parts), self.take_to(match.end())
            parts.append(self.take_to(self.certain_end(marks)))
            yield from self.more()

    def bracketed(self, python: bool = False) -> Reading[str]:
        """Consume and return the value in brackets that comes next, up to its closing bracket.

        Args:
            python: True for Python syntax, False for JSON.

        Raises:
            IncompleteCall: the text ended within the value.
        """
        finder, parts = EndFinder(python), list[str]()
        while True:
            end = finder.find(self.text, self.position)
            parts.append(self.take_to(len(self.text) if end is None else end))
            if end is not None:
                return "".join(parts)
            yield from self.more()


def result_of(reading: Reading[T]) -> T:
    """Run a generator that reads complete text to its end, and return the value that it returns."""
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return end.value


@functools.lru_cache(maxsize=256)
def any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a compiled pattern that matches any of the markers, the longest one at each
    position.
    """
    return re.compile(pattern_of_any(marks))


@functools.lru_cache(maxsize=256)
def _beginnings(marks: tuple[str, ...]) -> tuple[int, frozenset[str], frozenset[str]]:
    beginnings = {mark[:size] for mark in marks for size in range(1, len(mark))}
    longest = max(map(len, beginnings), default=0)
    return longest, frozenset(beginnings), frozenset(mark[0] for mark in marks if mark)


def held_back(text: str, marks: tuple[str, ...], start: int = 0) -> int:
    """Return how many characters at the end of a text may be the beginning of an incomplete marker.

    It is the length of the longest suffix of `text[start:]` that is a proper prefix of one of
    `marks`, 0 if there is none. A reader keeps this suffix until more text arrives.
    """
    longest, beginnings, first = _beginnings(marks)
    for size in range(min(longest, len(text) - start), 0, -1):
        if text[-size] in first and text[-size:] in beginnings:
            return size
    return 0
