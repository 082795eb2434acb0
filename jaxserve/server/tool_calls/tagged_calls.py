"""Calls in tags: XML-like parameters (Qwen3-Coder) and key-value pairs (GLM), with bare values.

A bare value may itself quote tags, so `TagCall` checks that the call continues after an end tag.
"""

from __future__ import annotations

import functools
import html
import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxserve.server.tool_calls import literals, text_feed
from jaxserve.server.tool_calls.answer_parts import NAME, Tools, WrittenCall, make_call
from jaxserve.server.tool_calls.call_context import (
    CallBody,
    CallContext,
    after_space,
    only_end,
    shape_of,
)


class TagCall(CallBody):
    """Notation of tool calls in tags: a head, parameters with unquoted values, and an end.

    An end tag ends a value only if the text after the tag continues the call with another parameter
    or the end of the call. Opening tags within a value are counted, so that a balanced quotation is
    part of the value. If counting finds no end, opening tags are ignored, provided that only one
    end tag can end the value.
    """

    end: str  # text after all parameters
    trims: bool = False  # True if one line break on either side of a value is not part of it
    # Texts before and after a JSON object that holds all arguments.
    whole: tuple[str, str] = ("", "")

    @property
    @abstractmethod
    def value_tags(self) -> tuple[str, str]:
        """Beginning of the tag before the value of a parameter, and the whole tag after the
        value.
        """

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Pairs of opening and closing tags within a tool call that must balance."""
        return (self.value_tags,)

    @property
    def final(self) -> re.Pattern[str]:
        """Pattern of the tag that ends the last value of a tool call, and the end of the call after
        it.
        """
        return _final(self.value_tags[1], self.end)

    @abstractmethod
    def _head(self) -> re.Pattern[str]:
        pass

    @abstractmethod
    def opening(self) -> re.Pattern[str]:
        """Return the pattern of the tags before a parameter's value, with leading white space.

        Its group `name` matches the name of the parameter.
        """

    def _name(self, match: re.Match[str]) -> str:
        return match["name"]

    def is_text(self, match: re.Match[str], schema: dict[str, Any]) -> bool:
        """Return whether the value of a parameter may be a string according to the tool's schema.

        Args:
            match: match of the tag before the value.
            schema: JSON schema of all arguments of the tool.
        """
        types = literals.types_of(literals.property_schema(schema, self._name(match)), schema)
        return not types or "string" in types

    def opens(self, text: str, position: int) -> bool:
        """Return whether the tags before a parameter's value begin at index `position` of
        `text`.
        """
        return self.opening().match(text, position, position + text_feed.MAX_HEAD) is not None

    def counts(self, text: str, position: int) -> bool:
        """Return whether an opening tag within a value, at index `position` of `text`, needs an end
        tag of its own.
        """
        return self.opens(text, position)

    def _value(self, raw: str, match: re.Match[str], schema: dict[str, Any]) -> Any:
        return literals.convert(raw, literals.property_schema(schema, self._name(match)), schema)

    def _take_head(
        self, source: text_feed.TextFeed
    ) -> text_feed.Reading[tuple[re.Match[str], str]]:
        return (yield from source.match(self._head())), ""

    def begins(self, source: text_feed.TextFeed) -> text_feed.Reading[None]:
        yield from source.match(self._head())

    def read(
        self, source: text_feed.TextFeed, tools: Tools, context: CallContext
    ) -> text_feed.Reading[list[WrittenCall]]:
        head, behind = yield from self._take_head(source)
        context.layout.note_head(head, behind)
        name = self._name(head)
        schema, values, is_good = tools.get(name, {}), dict[str, Any](), name in tools
        for match, raw in _Values(self, source.text, context, schema).values(source):
            try:
                if match is not None:
                    more = {self._name(match): self._value(raw, match, schema)}
                else:
                    more = {} if raw == "null" else literals.read_json(raw)
                is_good = is_good and isinstance(more, dict) and not more.keys() & values.keys()
            except ValueError:
                is_good = False
            if is_good:
                values |= more
        if not is_good:
            raise text_feed.RepeatedArgument if name in tools else text_feed.UncallableCall
        return [make_call(name, values)]

    def read_formed(
        self, source: text_feed.TextFeed, tools: Tools
    ) -> text_feed.Reading[list[WrittenCall]]:
        """Consume and return one tool call that a grammar enforces, so that no string contains a
        tag of the call.

        Args:
            tools: argument schemas by tool name, which determine the types of the values.

        Raises:
            FormatMismatch: the text does not continue the call, or ends within the call.
        """
        name = self._name((yield from self._take_head(source))[0])
        schema, values = tools.get(name, {}), dict[str, Any]()
        end = self.value_tags[1]
        while True:
            yield from source.skip_space()
            if (yield from source.takes(self.end)):
                return [make_call(name, values)]
            match = yield from source.match(self.opening())
            if not self.is_text(match, schema):
                yield from source.skip_space()
            if self.is_text(match, schema) or not (yield from source.has("{", "[")):
                raw, _ = yield from source.until(end)
            else:  # strings in JSON may contain tags
                raw = yield from source.bracketed()
                yield from source.skip_space()
                yield from source.expect(end)
            try:
                values[self._name(match)] = self._value(raw, match, schema)
            except ValueError:
                raise text_feed.FormatMismatch from None


class _Values:
    """Reader of the parameters of one tagged tool call, in a complete text."""

    def __init__(
        self, call: TagCall, text: str, context: CallContext, schema: dict[str, Any]
    ) -> None:
        self._call = call
        self._text = text
        self._context = context
        self._schema = schema
        self._tags = text_feed.any_of(call.value_tags)

    def values(self, source: text_feed.TextFeed) -> Iterator[tuple[re.Match[str] | None, str]]:
        """Consume the parameters of a tool call up to the end of the call.

        Yields:
            For each parameter: the match of the tags before its value, and the text of the value.
                For a JSON object of all arguments the match is None.

        Raises:
            FormatMismatch: the end of a value or of the call is missing or ambiguous.
        """
        text, call, layout, is_first = self._text, self._call, self._context.layout, True
        while True:
            start = after_space(text, source.position)
            if is_first and call.whole[0] and text.startswith(call.whole[0], start):
                source.take_to(start + len(call.whole[0]))
                yield None, self._whole(source)
                continue
            if text.startswith(call.end, start):
                layout.note("empty" if is_first else "parameter", text[source.position : start])
                source.take_to(start + len(call.end))
                self._context.take_end(text, source.position)
                return
            match = call.opening().match(text, start, start + text_feed.MAX_HEAD)
            if match is None:
                raise text_feed.FormatMismatch
            layout.note("first" if is_first else "parameter", text[source.position : start])
            layout.note("tag", shape_of(match))
            is_first = False
            end = self._end_of_json(match)
            if end is None:
                end = self._end_of_text(match.end())
            raw = text[match.end() : end]
            layout.num_values += 1
            if call.trims:
                layout.note_value(raw)
            source.take_to(end + len(call.value_tags[1]))
            yield match, raw

    def _whole(self, source: text_feed.TextFeed) -> str:
        text_feed.result_of(source.skip_space())
        raw = text_feed.result_of(source.takes("null")) or text_feed.result_of(source.bracketed())
        text_feed.result_of(source.skip_space())
        text_feed.result_of(source.expect(self._call.whole[1]))
        return raw

    def _continues(self, position: int) -> bool:
        start = after_space(self._text, position)
        if self._text.startswith(self._call.end, start):
            return self._context.may_follow(self._text, start + len(self._call.end))
        return self._call.opens(self._text, start)

    def _end_of_json(self, match: re.Match[str]) -> int | None:
        """Return the index of the end tag after a JSON object or array, whose strings may contain
        tags.

        Return None if the schema allows a string, or if the value is not JSON followed by an end
        tag that ends the value.

        Args:
            match: match of the tags before the value.
        """
        text, layout = self._text, self._context.layout
        start = after_space(text, match.end())
        is_bracketed = text.startswith(("{", "["), start)
        if not is_bracketed or layout.num_searched > 2 * len(text):
            return None
        if self._call.is_text(match, self._schema):
            return None
        end = literals.EndFinder().find(text, start)
        layout.num_searched += (len(text) if end is None else end) - start
        if end is None:
            return None
        tag, behind = self._call.value_tags[1], after_space(text, end)
        is_end = text.startswith(tag, behind) and self._continues(behind + len(tag))
        return behind if is_end and _is_json(text[start:end]) else None

    def _end_of_text(self, start: int) -> int:
        """Return the index of the end tag of a parameter's value that begins at index `start`.

        Raises:
            FormatMismatch: no end tag can end the value, or several can.
        """
        tag, depth = self._call.value_tags[1], 0
        for match in self._tags.finditer(self._text, start):
            if match[0] != tag:
                depth += self._call.counts(self._text, match.start())
            elif depth:
                depth -= 1
            elif self._continues(match.end()):
                return match.start()
        end = only_end(self._tags.finditer(self._text, start), tag, self._continues)
        if end is None:
            raise text_feed.FormatMismatch
        return end


def _is_json(text: str) -> bool:
    try:
        literals.read_json(text)
    except literals.RepeatedKey:
        return True
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def _final(value_end: str, end: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(value_end)}\s*{re.escape(end)}")


@dataclass(frozen=True)
class XmlCall(TagCall):
    """Notation of tool calls with one named tag per argument:
    `<function=f><parameter=a>1</parameter></function>`.
    """

    parameter: str  # text before the name of a parameter
    parameter_end: str  # text after the value of a parameter
    end: str  # text after the last parameter
    outer_end: str  # text after `end` that closes the section around the call
    is_quoted: bool = False  # True if names are quoted
    trims: bool = False  # True if one line break on either side of a value is not part of it
    # Name of the attribute that tells strings ("true" or "string") from other values.
    types: str = ""
    before: str = ""  # text between the marker of the call and its name
    tag_end: str = ">"  # text that ends a tag after its attributes
    # Texts before and after a JSON object that holds all arguments.
    whole: tuple[str, str] = ("", "")
    is_escaped: bool = False  # True if names are HTML-escaped

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.parameter, self.parameter_end, self.end, self.before, *self.whole)

    @property
    def value_tags(self) -> tuple[str, str]:
        return self.parameter, self.parameter_end

    def _head(self) -> re.Pattern[str]:
        return _opening(self.before, self.is_quoted, self.types, self.tag_end)

    def opening(self) -> re.Pattern[str]:
        return _opening(self.parameter, self.is_quoted, self.types, self.tag_end)

    def _name(self, match: re.Match[str]) -> str:
        return html.unescape(match["name"]) if self.is_escaped else match["name"]

    def is_text(self, match: re.Match[str], schema: dict[str, Any]) -> bool:
        if not self.types or match["type"] is None:
            return super().is_text(match, schema)
        return match["type"] in ("true", "string")

    def _value(self, raw: str, match: re.Match[str], schema: dict[str, Any]) -> Any:
        if self.trims:
            raw = raw.removeprefix("\n").removesuffix("\n")
        if not self.types or match["type"] is None:
            return super()._value(raw, match, schema)
        return (
            raw if self.is_text(match, schema) else literals.convert(raw, {"type": "json"}, schema)
        )


@functools.lru_cache(maxsize=64)
def _opening(before: str, is_quoted: bool, types: str, end: str) -> re.Pattern[str]:
    name = r"[^\s<>\"'](?:[^<>\"'\n]{0,254}[^\s<>\"'])??"
    name = rf"(?P<quote>[\"']?)(?P<name>{name})(?P=quote)" if is_quoted else rf"(?P<name>{name})"
    types = rf"(?:\s+(?:{types}|index)=\"(?P<type>\w{{1,9}})\")?" if types else ""
    before = rf"{loosely(before)}\s*" if before else ""
    return re.compile(rf"\s*{before}{name}{types}\s*{re.escape(end)}")


@dataclass(frozen=True)
class KeyedCall(TagCall):
    """Notation of tool calls as a name with tagged pairs:
    `f<arg_key>a</arg_key><arg_value>1</arg_value>`.
    """

    end: str  # text after all pairs
    after: str = ""  # marker that may follow the name of the function
    suffix: str = ""  # text at the end of the name of each tag

    @property
    def tags(self) -> tuple[str, str, str, str]:
        """The four tags of an argument: before and after its key, and before and after its
        value.
        """
        before, after = f"arg_key{self.suffix}>", f"arg_value{self.suffix}>"
        return f"<{before}", f"</{before}", f"<{after}", f"</{after}"

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.tags, self.end, self.after)

    @property
    def value_tags(self) -> tuple[str, str]:
        return self.tags[2:]

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return (self.tags[:2], self.tags[2:])

    def _head(self) -> re.Pattern[str]:
        return _KEYED_HEAD

    def _take_head(
        self, source: text_feed.TextFeed
    ) -> text_feed.Reading[tuple[re.Match[str], str]]:
        match, _ = yield from super()._take_head(source)
        return match, (yield from source.takes(self.after))

    def opening(self) -> re.Pattern[str]:
        return _keyed_opening(*self.tags[:3])

    def counts(self, text: str, position: int) -> bool:
        return True


_KEYED_HEAD = re.compile(rf"\s*(?P<name>{NAME})\s*(?=<)")


@functools.lru_cache(maxsize=64)
def _keyed_opening(key: str, key_end: str, value: str) -> re.Pattern[str]:
    key, key_end, value = map(re.escape, (key, key_end, value))
    return re.compile(rf"\s*{key}\s*(?P<name>[^<]{{0,256}}?)\s*{key_end}\s*{value}")


def loosely(text: str) -> str:
    """Return a pattern that matches `text` with any amount of white space, or none, at its
    spaces.
    """
    return r"\s*".join(map(re.escape, text.split()))
