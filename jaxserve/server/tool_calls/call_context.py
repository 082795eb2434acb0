"""CallBody, the base class of readers of calls, and CallContext, the texts around a call."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jaxserve.server.tool_calls.answer_parts import Tools, WrittenCall
from jaxserve.server.tool_calls.text_feed import MAX_HEAD, FormatMismatch, Reading, TextFeed

_SPACE = re.compile(r"\s*")


# Kinds of places within a call that may contain white space.
_PLACES_IN_CALLS = frozenset({"head", "first", "parameter", "empty"})


@dataclass
class CallLayout:
    """Spelling of the tags of all tool calls in an answer, and the white space between the tags.

    A model keeps one layout throughout an answer. If the layout changes, some tags may belong to a
    quotation of calls.
    """

    num_values: int = 0  # number of values so far
    num_searched: int = 0  # number of characters searched for ends of JSON values
    # True if the layout is inconsistent: a value shares a line with its tags although other tags
    # are on lines of their own, two calls share a line although their tags do not, or the numbers
    # of calls do not count up.
    is_lopsided: bool = False
    _texts: dict[str, set[str]] = field(default_factory=dict)
    # _has_line: a value began with a line break. _is_broken: since then a tag shared the line of a
    # value.
    _has_line: bool = False
    _is_broken: bool = False
    _number: int = 0
    _is_on_lines: bool = False

    def note(self, place: str, text: str) -> None:
        """Record the text found at a place of a tool call: white space, or a tag without its name.

        Args:
            place: kind of place, such as "head", "parameter", "gap" (between calls) or "close".
        """
        self._texts.setdefault(place, set()).add(text)
        self._is_on_lines |= place in _PLACES_IN_CALLS and "\n" in text

    def note_gap(self, space: str, on_lines: tuple[str, ...]) -> None:
        """Record the white space `space` between two tool calls, and whether it is unusual.

        Args:
            on_lines: usual white space between calls whose tags are on lines of their own.
        """
        is_tagged = self._texts.keys() & {"first", "empty"}
        usual = on_lines if self._is_on_lines else ("", "\n") if is_tagged else ("",)
        self.is_lopsided |= space not in usual
        self.note("gap", space)

    def note_value(self, raw: str) -> None:
        """Record whether the value of an argument begins and ends with a line break.

        If values are on lines of their own, a quoted call shows as one value that begins with a
        line break and a later value that ends with a line break. The layout is then inconsistent.

        Args:
            raw: text between the tags of the value.
        """
        starts, ends = raw.startswith("\n"), raw.endswith("\n")
        self._is_broken |= self._has_line and (not starts or raw == "\n")
        self.is_lopsided |= ends and self._is_broken
        self._has_line |= starts
        self._is_broken |= self._has_line and (not ends or raw == "\n")

    def note_head(self, match: re.Match[str], behind: str) -> None:
        """Record the spelling of the head of a tool call, and check that the numbers of calls count
        up.

        Args:
            match: match of the head, with a group `name` and optionally a group `type` for the
                number.
            behind: marker that follows the head, or "".
        """
        self.note("head", shape_of(match) + behind)
        number = match.groupdict().get("type") or ""
        if number.isdecimal():
            self.is_lopsided |= self._number not in (0, int(number) - 1)
            self._number = int(number)

    @property
    def is_regular(self) -> bool:
        """Whether all tags and gaps recorded so far follow one layout, so that none is quoted.

        It is always True for fewer than two argument values.
        """
        if self.num_values < 2:
            return True
        if self.is_lopsided or any(len(texts) > 1 for texts in self._texts.values()):
            return False
        place = {name: "".join(texts) for name, texts in self._texts.items()}
        first = place.get("first", "")
        usual = (first, first + place.get("parameter", ""))
        return place.get("empty", first) in usual


def shape_of(match: re.Match[str]) -> str:
    """Return the text of a matched tag without the texts of its groups `name` and `type`."""
    text = match[0]
    for group in ("type", "name"):  # from right to left
        if match.groupdict().get(group) is not None:
            start, end = (place - match.start() for place in match.span(group))
            text = text[:start] + text[end:]
    return text


@dataclass(frozen=True)
class CallContext:
    """Markers around the tool call that is being read, and the layout of the calls before it."""

    mark: str = ""
    close: str = ""  # text after a call
    ends: tuple[str, ...] = ()  # texts that may follow a call, empty if any text may
    layout: CallLayout = field(default_factory=CallLayout)

    def may_follow(self, text: str, position: int) -> bool:
        """Return whether the text from index `position` on may follow the end of a tool call.

        One of the texts in `ends` must come next, after white space, unless the text ends before or
        within it. Without `ends`, any text may follow.
        """
        if not self.ends:
            return True
        position = after_space(text, position)
        if text.startswith(self.ends, position):
            return True
        rest = text[position : position + MAX_HEAD]
        return any(end.startswith(rest) for end in self.ends)

    def take_end(self, text: str, position: int) -> None:
        """Record the white space between a tool call, which ends at index `position`, and its
        closing marker.

        Raises:
            FormatMismatch: the text at `position` cannot follow a call.
        """
        if not self.may_follow(text, position):
            raise FormatMismatch
        behind = after_space(text, position)
        if self.ends and text.startswith(self.ends[0], behind):
            self.layout.note("close", text[position:behind])


def after_space(text: str, position: int) -> int:
    """Return the index of the first character of `text`, from `position` on, that is not white
    space.
    """
    match = _SPACE.match(text, position)
    return position if match is None else match.end()


class CallBody(ABC):
    """Base class for notations of tool calls. A notation reads calls from after their marker."""

    marks: tuple[str, ...]  # markers that the reader looks for
    pairs: tuple[tuple[str, str], ...]  # pairs of texts within a call that must balance

    @abstractmethod
    def begins(self, source: TextFeed) -> Reading[None]:
        """Consume the beginning of a tool call up to its arguments, whether its tool is known or
        not.

        Raises:
            FormatMismatch: the text does not begin like a call.
        """

    @abstractmethod
    def read(
        self, source: TextFeed, tools: Tools, context: CallContext
    ) -> Reading[list[WrittenCall]]:
        """Consume one tool call, or all calls of a list, and return the calls in order.

        Args:
            source: complete text, or text that a grammar has formed.
            tools: argument schemas of the tools that may be called, by name.
            context: markers around the call, and the layout of earlier calls.

        Raises:
            UncallableCall: a tool is unknown, or the arguments are invalid.
            RepeatedArgument: a call with unquoted values gives an argument twice.
            FormatMismatch: the end of the call is missing or ambiguous.
        """


def only_end(
    matches: Iterable[re.Match[str]], mark: str, continues: Callable[[int], bool]
) -> int | None:
    """Return the index of the only end marker that can end a value, None if there are none or
    several.

    Args:
        matches: matches of markers in the text of a tool call, in order.
        mark: end marker of the value.
        continues: function that returns whether the call can continue at an index.
    """
    ends = (match.start() for match in matches if match[0] == mark and continues(match.end()))
    first, second = next(ends, None), next(ends, None)
    return first if second is None else None
