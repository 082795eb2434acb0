"""Ways to write a call after its mark. Each is a reader of one call, or of a list of them."""

from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxserve.server.tool_calls.gemma import read_braces
from jaxserve.server.tool_calls.literals import read_calls, read_json, write_json
from jaxserve.server.tool_calls.source import Malformed, Reading, Source
from jaxserve.server.tool_calls.values import convert, property_schema
from jaxserve.server.tool_calls.written import NAME, Tools, WrittenCall

_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
# Keys of a call that has no arguments.
_CALL_KEYS = frozenset({"name", "type", "id", "tool_name", "tool_call_id"})
_LIST_BEGINNING = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]{0,127})?\s*")
_SHORT_NAME = re.compile(rf"\s*({NAME})\s*(?=\()")


@dataclass(frozen=True)
class JsonCall:
    """A call as a JSON object: `{"name": "f", "arguments": {"a": 1}}`.

    Args:
        arguments: the key of the arguments, as the model writes it; both usual ones are read.
        name: the key of the name.
        number: the key of the call's number, "" where it has none.
        is_keyed: the name itself is the key of the arguments: `{"f": {"a": 1}}`.
        may_be_bare: the name may also stand before the arguments: `f[ARGS]{"a": 1}`.
        answers: names that say that nothing is called, and the answer follows.
    """

    arguments: str = "arguments"
    name: str = "name"
    number: str = ""
    is_keyed: bool = False
    may_be_bare: bool = False
    answers: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    def read(self, source: Source, tools: Tools) -> Reading[list[WrittenCall]]:
        yield from source.skip_space()
        if not (yield from source.has("{")):
            if not self.may_be_bare:
                raise Malformed
            found = yield from source.match(_BARE)
            if found[1] not in tools:
                raise Malformed
            return [written(found[1], (yield from source.bracketed()))]
        text = yield from source.bracketed()
        try:
            value = read_json(text)
        except ValueError:
            raise Malformed from None
        if not isinstance(value, dict):
            raise Malformed
        name = value.get(self.name)
        if name in self.answers and name not in tools:
            return []
        return [self._call(value, tools)]

    def _call(self, value: dict[str, Any], tools: Tools) -> WrittenCall:
        if self.is_keyed:
            [name, *others], given = list(value) or [""], ""
            if others:
                raise Malformed
            arguments = value.get(name)
        else:
            name, given = value.get(self.name), list(value.keys() & _ARGUMENT_KEYS)
            if len(given) > 1 or (not given and value.keys() - _CALL_KEYS):
                raise Malformed
            arguments = value[given[0]] if given else {}
        if not isinstance(name, str) or name not in tools:
            raise Malformed
        return written(name, arguments)

    def read_head(self, source: Source) -> Reading[tuple[str, str | None]]:
        """Take the text before the arguments of a call that a grammar has formed."""
        found = yield from source.match(_formed_head(self))
        return found[1], None

    def read_tail(self, source: Source) -> Reading[None]:
        """Take the text after the arguments."""
        yield from source.skip_space()
        yield from source.takes("}")


# A newer way to write `[TOOL_CALLS]`: the name, perhaps a mark, the arguments.
_BARE = re.compile(rf"\s*({NAME})\s*(?:\[ARGS\])?\s*(?=\{{)")


@functools.lru_cache(maxsize=64)
def _formed_head(body: JsonCall) -> re.Pattern[str]:
    number = rf'"{body.number}": "[0-9]{{1,3}}", ' if body.number else ""
    if body.is_keyed:
        return re.compile(rf'\s*\{{"({NAME})": (?=\{{)')
    keys = "|".join(sorted(_ARGUMENT_KEYS))
    return re.compile(rf'\s*\{{{number}"{body.name}": "({NAME})", "(?:{keys})": (?=\{{)')


@dataclass(frozen=True)
class HeadedCall:
    """A call whose name stands before the JSON object of its arguments.

    Args:
        after: the text between the name and the arguments.
        before: the text before the name, after the mark.
        is_numbered: a colon and the call's number follow the name. All of it is the call's id.
        tail: the text after the arguments.
    """

    after: str
    before: str = ""
    is_numbered: bool = False
    tail: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.after, self.before)

    def read(self, source: Source, tools: Tools) -> Reading[list[WrittenCall]]:
        name, number = yield from self.read_head(source)
        if name not in tools:
            raise Malformed
        text = yield from source.bracketed()
        yield from self.read_tail(source)
        return [written(name, text, number)]

    def read_head(self, source: Source) -> Reading[tuple[str, str | None]]:
        """Take the text before the arguments. Return the name and the call's id."""
        found = yield from source.match(_head(self))
        return found["name"], found["id"] if self.is_numbered else None

    def read_tail(self, source: Source) -> Reading[None]:
        """Take the text after the arguments."""
        if self.tail.strip():
            yield from source.skip_space()
            yield from source.takes(self.tail.strip())


@functools.lru_cache(maxsize=64)
def _head(body: HeadedCall) -> re.Pattern[str]:
    number = r"(?::\d{1,9})?" if body.is_numbered else ""
    before = rf"(?:{_loosely(body.before)})?"
    return re.compile(
        rf"\s*(?P<id>{before}(?P<name>{NAME}?){number})\s*{_loosely(body.after)}\s*(?=\{{)"
    )


def _loosely(text: str) -> str:
    """Return a pattern of a text, in which white space may be more or less."""
    return r"\s*".join(map(re.escape, text.split()))


@dataclass(frozen=True)
class PythonCalls:
    """Calls as in Python: a list `[f(a=1), g()]`, or without brackets, one a line.

    Args:
        is_list: the calls stand in brackets.
    """

    is_list: bool = True
    marks: tuple[str, ...] = ()

    def read(self, source: Source, tools: Tools) -> Reading[list[WrittenCall]]:
        yield from source.skip_space()
        if self.is_list:
            yield from self._expect_list(source)
            text = yield from source.bracketed(python=True)
        else:
            found = yield from source.match(_SHORT_NAME)
            inside = yield from source.bracketed(python=True)
            text = f"[{found[1]}{inside}]"
        try:
            calls = [WrittenCall(name, write_json(values)) for name, values in read_calls(text)]
        except ValueError:
            raise Malformed from None
        if not calls or not all(call.name in tools for call in calls):
            raise Malformed
        return calls

    def _expect_list(self, source: Source) -> Reading[None]:
        """Wait for as much of a list as says that its first item is a call."""
        while True:
            beginning = _LIST_BEGINNING.match(source.text, source.position)
            if beginning is None and not source.is_empty:
                raise Malformed
            if beginning is not None and beginning.end() < len(source.text):
                if source.text[beginning.end()] != "(":
                    raise Malformed
                return
            yield from source.more()


@dataclass(frozen=True)
class XmlCall:
    """A call in tags, as `<function=f><parameter=a>1</parameter></function>`.

    Args:
        parameter: the text before a parameter's name.
        parameter_end: the text after its value.
        end: the text after all parameters.
        outer_end: the text after that. Where a value has no end, it ends before both.
        is_quoted: names stand in quotation marks.
        trims: a line end at either side of a value is none of it.
        types: name of the attribute that says whether a value is a string: "true" or "string".
        before: the text before a call's name, after the mark.
        tag_end: the text after a tag's attributes.
        whole: the texts around a JSON object that holds all arguments.
        is_escaped: names are written as in HTML.
    """

    parameter: str
    parameter_end: str
    end: str
    outer_end: str
    is_quoted: bool = False
    trims: bool = False
    types: str = ""
    before: str = ""
    tag_end: str = ">"
    whole: tuple[str, str] = ("", "")
    is_escaped: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.parameter, self.parameter_end, self.end, self.before, *self.whole)

    def read(self, source: Source, tools: Tools) -> Reading[list[WrittenCall]]:
        tag = _opening(self.before, self.is_quoted, self.types, self.tag_end)
        name = self._name((yield from source.match(tag)))
        schema = tools.get(name)
        if schema is None:
            raise Malformed
        opening = _opening(self.parameter, self.is_quoted, self.types, self.tag_end)
        stops = (self.parameter_end, self.parameter)
        if self.end and self.outer_end:
            stops += (self.end + self.outer_end, f"{self.end}\n{self.outer_end}")
        values: dict[str, Any] = {}
        while True:
            yield from source.skip_space()
            if (yield from source.takes(self.end)):
                return [written(name, values)]
            if self.whole[0] and (yield from source.takes(self.whole[0])):
                text, _ = yield from source.until(self.whole[1])
                values |= json.loads(written(name, text).arguments)
                continue
            found = yield from source.match(opening)
            text, stop = yield from source.until(*stops)
            if stop != self.parameter_end:
                source.put_back()
            values[self._name(found)] = self._value(text, found, schema)

    def _name(self, opening: re.Match[str]) -> str:
        return html.unescape(opening["name"]) if self.is_escaped else opening["name"]

    def _value(self, text: str, opening: re.Match[str], schema: dict[str, Any]) -> Any:
        if self.trims:
            text = text.removeprefix("\n").removesuffix("\n")
        if not self.types or opening["type"] is None:
            return convert(text, property_schema(schema, self._name(opening)), schema)
        is_text = opening["type"] in ("true", "string")
        return text if is_text else convert(text, {"type": "json"}, schema)


@functools.lru_cache(maxsize=64)
def _opening(before: str, is_quoted: bool, types: str, end: str) -> re.Pattern[str]:
    """Return the pattern of a tag from its name on, or from the text before that."""
    name = r"[^\s<>\"'](?:[^<>\"'\n]{0,254}[^\s<>\"'])??"
    name = rf"(?P<quote>[\"']?)(?P<name>{name})(?P=quote)" if is_quoted else rf"(?P<name>{name})"
    types = rf"(?:\s+(?:{types}|index)=\"(?P<type>\w{{1,9}})\")?" if types else ""
    before = rf"{_loosely(before)}\s*" if before else ""
    return re.compile(rf"\s*{before}{name}{types}\s*{re.escape(end)}")


@dataclass(frozen=True)
class KeyedCall:
    """A call as a name and pairs of tags: `f<arg_key>a</arg_key><arg_value>1</arg_value>`.

    Args:
        end: the text after all pairs.
        after: a mark that may follow the name.
        suffix: a text at the end of each tag's name.
    """

    end: str
    after: str = ""
    suffix: str = ""

    @property
    def tags(self) -> tuple[str, str, str, str]:
        """The tags around a key, and around a value."""
        before, after = f"arg_key{self.suffix}>", f"arg_value{self.suffix}>"
        return f"<{before}", f"</{before}", f"<{after}", f"</{after}"

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.tags, self.end, self.after)

    def read(self, source: Source, tools: Tools) -> Reading[list[WrittenCall]]:
        name = (yield from source.match(_KEYED_NAME))[1]
        schema = tools.get(name)
        if schema is None:
            raise Malformed
        yield from source.takes(self.after)
        values: dict[str, Any] = {}
        before, after, value, value_end = self.tags
        while True:
            yield from source.skip_space()
            if (yield from source.takes(self.end)):
                return [written(name, values)]
            yield from source.expect(before)
            key = (yield from source.until(after))[0].strip()
            yield from source.skip_space()
            yield from source.expect(value)
            text = (yield from source.until(value_end))[0]
            values[key] = convert(text, property_schema(schema, key), schema)


_KEYED_NAME = re.compile(rf"\s*({NAME})\s*(?=<)")


@dataclass(frozen=True)
class BracedCall:
    """A call in Gemma's notation: `call:f{a:<|"|>text<|"|>,b:[1,2]}`.

    Args:
        quote: the mark at both ends of a string.
    """

    quote: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.quote,)

    def read(self, source: Source, tools: Tools) -> Reading[list[WrittenCall]]:
        name = (yield from source.match(_BRACED_NAME))[1]
        schema = tools.get(name)
        if schema is None:
            raise Malformed
        text = yield from self._braces(source)
        try:
            return [written(name, read_braces(text, self.quote, schema))]
        except ValueError:
            raise Malformed from None

    def _braces(self, source: Source) -> Reading[str]:
        """Take all up to the closing brace, apart from braces in strings."""
        parts, depth = list[str](), 0
        while True:
            parts += yield from source.until(self.quote, "{", "}", "[", "]")
            if parts[-1] == self.quote:
                parts += yield from source.until(self.quote)
            else:
                depth += 1 if parts[-1] in "{[" else -1
            if depth <= 0 and parts[-1] != self.quote:
                return "".join(parts)


_BRACED_NAME = re.compile(rf"\s*call:\s*({NAME})\s*(?=\{{)")

Body = JsonCall | HeadedCall | PythonCalls | XmlCall | KeyedCall | BracedCall


def written(name: str, arguments: Any, number: str | None = None) -> WrittenCall:
    """Return a call with its arguments, an object or the JSON text of it.

    Raises:
        Malformed: they are no object.
    """
    try:
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        if not isinstance(arguments, dict):
            raise Malformed
        return WrittenCall(name, write_json(arguments), number)
    except ValueError:
        raise Malformed from None


def all_marks(bodies: Iterable[Body]) -> set[str]:
    """Return the texts that bodies look for."""
    return {mark for body in bodies for mark in body.marks if mark}
