"""Calls as JSON, as a name with JSON arguments, and in Python syntax."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxserve.server.tool_calls import text_feed
from jaxserve.server.tool_calls.answer_parts import NAME, Tools, WrittenCall, make_call
from jaxserve.server.tool_calls.call_context import CallBody, CallContext
from jaxserve.server.tool_calls.gemma import BracedCall
from jaxserve.server.tool_calls.literals import read_calls, read_json, write_json
from jaxserve.server.tool_calls.tagged_calls import KeyedCall, XmlCall, loosely

_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
# Keys of a call without arguments.
_CALL_KEYS = frozenset({"name", "type", "id", "tool_name", "tool_call_id"})
# A function name, or a bare or quoted key, and the first character after it.
_LIST_NAME = re.compile(r"\s*+(?:[A-Za-z_][\w.-]{0,127}+)?+\s*+([\s\S])")
_KEY = re.compile(r"\s*+\w{0,64}+\s*+([\s\S])")
_SHORT_NAME = re.compile(rf"\s*({NAME})\s*(?=\()")


@dataclass(frozen=True)
class JsonCall(CallBody):
    """Notation of a tool call as a JSON object, `{"name": "f", "arguments": {"a": 1}}`."""

    # Key of the arguments as the model was trained. The two usual keys are always read.
    arguments: str = "arguments"
    name: str = "name"
    number: str = ""  # key of the number of the call, "" if it has no number
    is_keyed: bool = False  # True if the name is the key of the arguments: `{"f": {"a": 1}}`
    may_be_bare: bool = False  # True if the name may also precede the arguments: `f[ARGS]{"a": 1}`
    answers: tuple[str, ...] = ()  # names that mean "no call": the answer follows
    marks: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = (("{", "}"),)

    def begins(self, source: text_feed.TextFeed) -> text_feed.Reading[None]:
        yield from source.skip_space()
        if (yield from source.takes("[")):
            yield from source.skip_space()
        if (yield from source.takes("{")):
            if (yield from source.match(_KEY))[1] not in "\"':":
                raise text_feed.FormatMismatch
        elif self.may_be_bare:
            yield from source.match(_BARE)
        else:
            raise text_feed.FormatMismatch

    def read(
        self, source: text_feed.TextFeed, tools: Tools, context: CallContext | None = None
    ) -> text_feed.Reading[list[WrittenCall]]:
        yield from source.skip_space()
        if not (yield from source.has("{")):
            if not self.may_be_bare:
                raise text_feed.FormatMismatch
            match = yield from source.match(_BARE)
            text = yield from source.takes("null")
            if not text:
                text = yield from source.bracketed()
            elif source.text[source.position : source.position + 1].isalnum():
                raise text_feed.FormatMismatch
            if match[1] not in tools:
                raise text_feed.UncallableCall
            return [make_call(match[1], text)]
        text = yield from source.bracketed()
        try:
            value = read_json(text)
        except ValueError:
            raise text_feed.UncallableCall from None
        if not isinstance(value, dict):
            raise text_feed.UncallableCall
        name = value.get(self.name)
        if isinstance(name, str) and name in self.answers and name not in tools:
            return []
        return [self._call(value, tools)]

    def _call(self, value: dict[str, Any], tools: Tools) -> WrittenCall:
        if self.is_keyed:
            [name, *others], argument_keys = list(value) or [""], ""
            if others:
                raise text_feed.UncallableCall
            arguments = value.get(name)
        else:
            name, argument_keys = value.get(self.name), list(value.keys() & _ARGUMENT_KEYS)
            if len(argument_keys) > 1 or (not argument_keys and value.keys() - _CALL_KEYS):
                raise text_feed.UncallableCall
            arguments = value[argument_keys[0]] if argument_keys else {}
        if not isinstance(name, str) or name not in tools:
            raise text_feed.UncallableCall
        return make_call(name, arguments)

    def read_head(self, source: text_feed.TextFeed) -> text_feed.Reading[tuple[str, str | None]]:
        """Consume the text before the arguments of a JSON tool call that a grammar has formed.

        Return the name of the tool, and None for the id of the call.
        """
        match = yield from source.match(_formed_head(self))
        return match[1], None

    def read_tail(self, source: text_feed.TextFeed) -> text_feed.Reading[None]:
        """Consume the "}" that closes a tool call after its arguments, if it comes next."""
        yield from source.skip_space()
        yield from source.takes("}")


# Newer notation of `[TOOL_CALLS]`: the name, an optional marker, and the arguments.
_BARE = re.compile(rf"\s*({NAME})\s*(?:(?:\[ARGS\])?\s*(?=\{{)|\[ARGS\]\s*(?=null))")


@functools.lru_cache(maxsize=64)
def _formed_head(body: JsonCall) -> re.Pattern[str]:
    number = rf'"{body.number}": "[0-9]{{1,3}}", ' if body.number else ""
    if body.is_keyed:
        return re.compile(rf'\s*\{{"({NAME})": (?=\{{)')
    keys = "|".join(sorted(_ARGUMENT_KEYS))
    return re.compile(rf'\s*\{{{number}"{body.name}": "({NAME})", "(?:{keys})": (?=\{{)')


@dataclass(frozen=True)
class HeadedCall(CallBody):
    """Notation of a tool call whose name precedes the JSON object of its arguments."""

    after: str  # text between the name and the arguments
    before: str = ""  # text between the marker and the name
    # True if a colon and a number follow the name. The id of the call is then `before`, name and
    # number together.
    is_numbered: bool = False
    tail: str = ""  # text after the arguments

    pairs: tuple[tuple[str, str], ...] = (("{", "}"),)

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.after, self.before)

    def begins(self, source: text_feed.TextFeed) -> text_feed.Reading[None]:
        yield from source.match(_head(self, "{n<`"))

    def read(
        self, source: text_feed.TextFeed, tools: Tools, context: CallContext | None = None
    ) -> text_feed.Reading[list[WrittenCall]]:
        name, number = yield from self.read_head(source, "{n<`")
        if (yield from source.has("{")):
            text = yield from source.bracketed()
        else:
            text = yield from source.takes("null")
            yield from source.skip_space()
            close = self.tail.strip() or ("" if context is None else context.close)
            if not (yield from source.has(close)) and not (text and source.is_empty):
                raise text_feed.FormatMismatch
        yield from self.read_tail(source)
        if name not in tools:
            raise text_feed.UncallableCall
        return [make_call(name, text, number)]

    def read_head(
        self, source: text_feed.TextFeed, behind: str = "{"
    ) -> text_feed.Reading[tuple[str, str | None]]:
        """Consume the text before the arguments of a tool call. Return the name of the tool, and
        the id of the call (None in formats without ids).

        Args:
            behind: characters, one of which must follow the consumed text.

        Raises:
            FormatMismatch: the text does not begin like a call.
        """
        match = yield from source.match(_head(self, behind))
        return match["name"], match["id"] if self.is_numbered else None

    def read_tail(self, source: text_feed.TextFeed) -> text_feed.Reading[None]:
        """Consume the text that the format has after the arguments of a tool call, if it comes
        next.
        """
        if self.tail.strip():
            yield from source.skip_space()
            yield from source.takes(self.tail.strip())


@functools.lru_cache(maxsize=64)
def _head(body: HeadedCall, behind: str) -> re.Pattern[str]:
    number = r"(?::\d{1,9})?" if body.is_numbered else ""
    before = rf"(?:{loosely(body.before)})?"
    call = rf"(?P<id>{before}(?P<name>{NAME}?){number})"
    return re.compile(rf"\s*{call}\s*{loosely(body.after)}\s*(?=[{re.escape(behind)}])")


@dataclass(frozen=True)
class PythonCalls(CallBody):
    """Notation of tool calls in Python syntax: a list `[f(a=1), g()]`, or one call per line."""

    is_list: bool = True  # True if the calls are in brackets
    marks: tuple[str, ...] = ()

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The pair of brackets that must balance: square brackets for a list, otherwise
        parentheses.
        """
        return (("[", "]"),) if self.is_list else (("(", ")"),)

    def begins(self, source: text_feed.TextFeed) -> text_feed.Reading[None]:
        yield from source.skip_space()
        if not self.is_list:
            yield from source.match(_SHORT_NAME)
            return
        yield from source.expect("[")
        yield from source.skip_space()
        if (yield from source.match(_LIST_NAME))[1] != "(":
            raise text_feed.FormatMismatch

    def read(
        self, source: text_feed.TextFeed, tools: Tools, context: CallContext | None = None
    ) -> text_feed.Reading[list[WrittenCall]]:
        yield from source.skip_space()
        name = ""
        if not self.is_list:
            name = (yield from source.match(_SHORT_NAME))[1]
        elif not (yield from source.has("[")):
            raise text_feed.IncompleteCall if source.is_cut("[") else text_feed.FormatMismatch
        text = yield from source.bracketed(python=True)
        try:
            named = read_calls(text if self.is_list else f"[{name}{text}]")
            calls = [WrittenCall(name, write_json(values)) for name, values in named]
        except ValueError:
            raise text_feed.UncallableCall from None
        if not calls or not all(call.name in tools for call in calls):
            raise text_feed.UncallableCall
        return calls


Body = JsonCall | HeadedCall | PythonCalls | XmlCall | KeyedCall | BracedCall


def all_marks(bodies: Iterable[Body]) -> set[str]:
    """Return the set of all non-empty markers that some notations of tool calls look for."""
    return {mark for body in bodies for mark in body.marks if mark}
