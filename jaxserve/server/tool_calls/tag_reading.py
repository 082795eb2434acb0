"""TagCall: the reading of calls in tags, whose bare values may themselves quote tags."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxserve.server.tool_calls.literals import EndFinder, RepeatedKey, read_json
from jaxserve.server.tool_calls.source import (
    MAX_HEAD,
    Malformed,
    Reading,
    Repeated,
    Source,
    Uncallable,
    any_of,
    result_of,
)
from jaxserve.server.tool_calls.values import convert, property_schema, types_of
from jaxserve.server.tool_calls.written import Tools, WrittenCall, written

_SPACE = re.compile(r"\s*")
# Kinds of places within a call that may contain white space.
_PLACES_IN_CALLS = frozenset({"head", "first", "parameter", "empty"})


@dataclass
class Layout:
    """Spelling of the tags of all calls in an answer, and the white space between them.

    A model keeps to one layout. If the layout changes, some tags may belong to a quotation.

    Attributes:
        num_values: number of values so far.
        num_searched: number of characters searched for ends of JSON values.
        is_lopsided: True if the layout is inconsistent: a value shares a line with its tags
            although other tags are on lines of their own, two calls share a line although their
            tags do not, or the numbers of calls do not count up.
    """

    num_values: int = 0
    num_searched: int = 0
    is_lopsided: bool = False
    _texts: dict[str, set[str]] = field(default_factory=dict)
    # _has_line: a value began with a line break. _is_broken: since then a tag shared the line of a
    # value.
    _has_line: bool = False
    _is_broken: bool = False
    _number: int = 0
    _is_on_lines: bool = False

    def note(self, place: str, text: str) -> None:
        """Record the text at a kind of place: white space, or a tag without its name."""
        self._texts.setdefault(place, set()).add(text)
        self._is_on_lines |= place in _PLACES_IN_CALLS and "\n" in text

    def note_gap(self, space: str, on_lines: tuple[str, ...]) -> None:
        """Record the white space between two calls.

        Args:
            space: the white space.
            on_lines: usual white space between calls whose tags are on lines of their own.
        """
        is_tagged = self._texts.keys() & {"first", "empty"}
        usual = on_lines if self._is_on_lines else ("", "\n") if is_tagged else ("",)
        self.is_lopsided |= space not in usual
        self.note("gap", space)

    def note_value(self, raw: str) -> None:
        """Record whether a value begins and ends with a line break.

        If values are on lines of their own, a quoted call shows as one value that begins with a
        line break and a later one that ends with one.
        """
        starts, ends = raw.startswith("\n"), raw.endswith("\n")
        self._is_broken |= self._has_line and (not starts or raw == "\n")
        self.is_lopsided |= ends and self._is_broken
        self._has_line |= starts
        self._is_broken |= self._has_line and (not ends or raw == "\n")

    def note_head(self, found: re.Match[str], behind: str) -> None:
        """Record the head of a call, and the text `behind` it."""
        self.note("head", shape_of(found) + behind)
        number = found.groupdict().get("type") or ""
        if number.isdecimal():
            self.is_lopsided |= self._number not in (0, int(number) - 1)
            self._number = int(number)

    @property
    def is_regular(self) -> bool:
        """Return whether the layout is consistent, or there are fewer than two values."""
        if self.num_values < 2:
            return True
        if self.is_lopsided or any(len(texts) > 1 for texts in self._texts.values()):
            return False
        place = {name: "".join(texts) for name, texts in self._texts.items()}
        first = place.get("first", "")
        usual = (first, first + place.get("parameter", ""))
        return place.get("empty", first) in usual


def shape_of(found: re.Match[str]) -> str:
    """Return the text of a matched tag without its name and type."""
    text = found[0]
    for group in ("type", "name"):  # from right to left
        if found.groupdict().get(group) is not None:
            start, end = (place - found.start() for place in found.span(group))
            text = text[:start] + text[end:]
    return text


@dataclass(frozen=True)
class Around:
    """Texts around a call, and the layout of the calls so far.

    Attributes:
        mark: marker before a call.
        close: text after a call.
        ends: texts that may follow a call, empty if any text may.
        layout: layout of all calls in the answer.
    """

    mark: str = ""
    close: str = ""
    ends: tuple[str, ...] = ()
    layout: Layout = field(default_factory=Layout)

    def may_follow(self, text: str, position: int) -> bool:
        """Return whether the text from `position` on may follow the end of a call.

        The end of the text may always follow.
        """
        if not self.ends:
            return True
        position = after_space(text, position)
        if text.startswith(self.ends, position):
            return True
        rest = text[position : position + MAX_HEAD]
        return any(end.startswith(rest) for end in self.ends)

    def take_end(self, text: str, position: int) -> None:
        """Record the white space after a call that ends at `position`.

        Raises:
            Malformed: the text at `position` cannot follow a call.
        """
        if not self.may_follow(text, position):
            raise Malformed
        behind = after_space(text, position)
        if self.ends and text.startswith(self.ends[0], behind):
            self.layout.note("close", text[position:behind])


def after_space(text: str, position: int) -> int:
    """Return the index of the first character at or after `position` that is not white space."""
    found = _SPACE.match(text, position)
    return position if found is None else found.end()


class TagCall(ABC):
    """Call in tags: a head, parameters with bare values, and an end.

    An end tag ends a value only if the text after it continues the call with another parameter or
    the end of the call. Opening tags within a value are counted, so that a balanced quotation is
    part of the value. If counting finds no end, opening tags are ignored, provided that only one
    end tag can end the value.

    Attributes:
        end: text after all parameters.
        trims: True if one line break on either side of a value is not part of it.
        whole: texts before and after a JSON object that holds all arguments.
    """

    end: str
    trims: bool = False
    whole: tuple[str, str] = ("", "")

    @property
    @abstractmethod
    def value_tags(self) -> tuple[str, str]:
        """Beginning of the tag before a value, and the tag after the value."""

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Pairs of tags within a call that must balance."""
        return (self.value_tags,)

    @property
    def final(self) -> re.Pattern[str]:
        """Pattern of the end of a value that also ends its call."""
        return _final(self.value_tags[1], self.end)

    @abstractmethod
    def _head(self) -> re.Pattern[str]:
        pass

    @abstractmethod
    def opening(self) -> re.Pattern[str]:
        """Return the pattern of the tags before a value, with leading white space."""

    def _name(self, found: re.Match[str]) -> str:
        return found["name"]

    def is_text(self, found: re.Match[str], schema: dict[str, Any]) -> bool:
        """Return whether the schema allows a string as the value of a matched parameter."""
        types = types_of(property_schema(schema, self._name(found)), schema)
        return not types or "string" in types

    def opens(self, text: str, position: int) -> bool:
        """Return whether a parameter begins at `position`."""
        return self.opening().match(text, position, position + MAX_HEAD) is not None

    def counts(self, text: str, position: int) -> bool:
        """Return whether the opening tag at `position`, within a value, counts as nested."""
        return self.opens(text, position)

    def _value(self, raw: str, found: re.Match[str], schema: dict[str, Any]) -> Any:
        return convert(raw, property_schema(schema, self._name(found)), schema)

    def _take_head(self, source: Source) -> Reading[tuple[re.Match[str], str]]:
        """Take the head of a call. Return the match with its name, and the marker after it."""
        return (yield from source.match(self._head())), ""

    def begins(self, source: Source) -> Reading[None]:
        """Take the head of a call, whatever its name.

        Raises:
            Malformed: the text does not begin like a call.
        """
        yield from source.match(self._head())

    def read(self, source: Source, tools: Tools, around: Around) -> Reading[list[WrittenCall]]:
        """Take and return one call from a complete text.

        Raises:
            Repeated: an argument is given twice, or a value is invalid.
            Uncallable: the tool is unknown.
            Malformed: the end of the call is missing or ambiguous.
        """
        head, behind = yield from self._take_head(source)
        around.layout.note_head(head, behind)
        name = self._name(head)
        schema, values, is_good = tools.get(name, {}), dict[str, Any](), name in tools
        for found, raw in _Values(self, source.text, around, schema).values(source):
            try:
                if found is not None:
                    more = {self._name(found): self._value(raw, found, schema)}
                else:
                    more = {} if raw == "null" else read_json(raw)
                is_good = is_good and isinstance(more, dict) and not more.keys() & values.keys()
            except ValueError:
                is_good = False
            if is_good:
                values |= more
        if not is_good:
            raise Repeated if name in tools else Uncallable
        return [written(name, values)]

    def read_formed(self, source: Source, tools: Tools) -> Reading[list[WrittenCall]]:
        """Take and return a call that a grammar has formed, so that no value contains one of its
        tags.
        """
        name = self._name((yield from self._take_head(source))[0])
        schema, values = tools.get(name, {}), dict[str, Any]()
        end = self.value_tags[1]
        while True:
            yield from source.skip_space()
            if (yield from source.takes(self.end)):
                return [written(name, values)]
            found = yield from source.match(self.opening())
            if not self.is_text(found, schema):
                yield from source.skip_space()
            if self.is_text(found, schema) or not (yield from source.has("{", "[")):
                raw, _ = yield from source.until(end)
            else:  # strings in JSON may contain tags
                raw = yield from source.bracketed()
                yield from source.skip_space()
                yield from source.expect(end)
            try:
                values[self._name(found)] = self._value(raw, found, schema)
            except ValueError:
                raise Malformed from None


class _Values:
    """Reader of the parameters of one call in a complete text."""

    def __init__(self, call: TagCall, text: str, around: Around, schema: dict[str, Any]) -> None:
        self._call = call
        self._text = text
        self._around = around
        self._schema = schema
        self._tags = any_of(call.value_tags)

    def values(self, source: Source) -> Iterator[tuple[re.Match[str] | None, str]]:
        """Take the parameters and the end of the call.

        Yields:
            The match of the tag before each value, and the raw value. For a JSON object of all
                arguments the match is None.

        Raises:
            Malformed: the end of the call is missing or ambiguous.
        """
        text, call, layout, is_first = self._text, self._call, self._around.layout, True
        while True:
            start = after_space(text, source.position)
            if is_first and call.whole[0] and text.startswith(call.whole[0], start):
                source.take_to(start + len(call.whole[0]))
                yield None, self._whole(source)
                continue
            if text.startswith(call.end, start):
                layout.note("empty" if is_first else "parameter", text[source.position : start])
                source.take_to(start + len(call.end))
                self._around.take_end(text, source.position)
                return
            found = call.opening().match(text, start, start + MAX_HEAD)
            if found is None:
                raise Malformed
            layout.note("first" if is_first else "parameter", text[source.position : start])
            layout.note("tag", shape_of(found))
            is_first = False
            end = self._end_of_json(found)
            if end is None:
                end = self._end_of_text(found.end())
            raw = text[found.end() : end]
            layout.num_values += 1
            if call.trims:
                layout.note_value(raw)
            source.take_to(end + len(call.value_tags[1]))
            yield found, raw

    def _whole(self, source: Source) -> str:
        """Take a JSON object of all arguments, or null, and the tag after it."""
        result_of(source.skip_space())
        raw = result_of(source.takes("null")) or result_of(source.bracketed())
        result_of(source.skip_space())
        result_of(source.expect(self._call.whole[1]))
        return raw

    def _continues(self, position: int) -> bool:
        """Return whether the call can continue after a value that ends at `position`."""
        start = after_space(self._text, position)
        if self._text.startswith(self._call.end, start):
            return self._around.may_follow(self._text, start + len(self._call.end))
        return self._call.opens(self._text, start)

    def _end_of_json(self, found: re.Match[str]) -> int | None:
        """Return the index of the end tag of a JSON value, whose strings may contain tags.

        It is None if the schema allows a string, or if the value is not JSON followed by an end
        tag.
        """
        text, layout = self._text, self._around.layout
        start = after_space(text, found.end())
        is_bracketed = text.startswith(("{", "["), start)
        if not is_bracketed or layout.num_searched > 2 * len(text):
            return None
        if self._call.is_text(found, self._schema):
            return None
        end = EndFinder().find(text, start)
        layout.num_searched += (len(text) if end is None else end) - start
        if end is None:
            return None
        tag, behind = self._call.value_tags[1], after_space(text, end)
        is_end = text.startswith(tag, behind) and self._continues(behind + len(tag))
        return behind if is_end and _is_json(text[start:end]) else None

    def _end_of_text(self, start: int) -> int:
        """Return the index of the tag that ends the value.

        Raises:
            Malformed: no tag can end the value, or counting finds no end and several tags could be
                it.
        """
        tag, depth, ends = self._call.value_tags[1], 0, list[int]()
        for found in self._tags.finditer(self._text, start):
            if found[0] != tag:
                depth += self._call.counts(self._text, found.start())
            elif depth:
                depth -= 1
            elif self._continues(found.end()):
                return found.start()
        for found in self._tags.finditer(self._text, start):
            if found[0] == tag and self._continues(found.end()):
                ends.append(found.start())
                if len(ends) > 1:
                    break
        if len(ends) != 1:
            raise Malformed
        return ends[0]


def _is_json(text: str) -> bool:
    try:
        read_json(text)
    except RepeatedKey:
        return True
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def _final(value_end: str, end: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(value_end)}\s*{re.escape(end)}")
