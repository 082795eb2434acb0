"""Calls in Gemma's notation: objects with bare keys, strings between markers, other values bare."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jaxserve.server.tool_calls import literals, text_feed
from jaxserve.server.tool_calls.answer_parts import NAME, Tools, WrittenCall, make_call
from jaxserve.server.tool_calls.call_context import CallBody, CallContext, after_space, only_end

_BARE = re.compile(r"[^,}\]]+")
_BARE_KEY = re.compile(r"[^{}\[\],:<>]{1,256}:")
_BARE_ITEM = re.compile(r"[-+.\w]{1,64}\s*[,\]]")


class BraceReader(literals.Cursor):
    """Parser of the arguments of a tool call in Gemma's notation: an object in braces with bare
    keys.

    A marker ends a string only if the text after the marker continues the object or ends the call.
    Call markers within a string are counted, so that a balanced quotation of calls is part of the
    string. If counting finds no end, call markers are ignored, provided that only one marker can
    end the string.

    Args:
        position: index in `text` of the opening brace.
        quote: marker at both ends of a string.
        schema: JSON schema of the arguments, which determines the types of bare values.
    """

    def __init__(
        self, text: str, position: int, quote: str, schema: dict[str, Any], context: CallContext
    ) -> None:
        super().__init__(text, position)
        self._quote = quote
        self._root = schema
        self._context = context
        self._marks = text_feed.any_of(tuple(filter(None, (quote, context.mark, context.close))))
        self._closing: list[str] = []  # closing brackets still due
        self.is_repeated = False  # True if an object repeats a key

    @property
    def position(self) -> int:
        """Index in the parsed text of the next character that the parser reads."""
        return self._position

    def call(self) -> dict[str, Any]:
        """Parse the object of the arguments and return it, after checking that the tool call ends
        behind it.

        Raises:
            FormatMismatch: the call does not end after the object.
            ValueError: the text is not an object in this notation, or the end of a string is
                ambiguous.
        """
        values = self._mapping(self._root)
        self._context.take_end(self._text, self._position)
        return values

    def _open(self, mark: str, close: str) -> None:
        if len(self._closing) > literals.MAX_DEPTH or not self.take(mark):
            raise ValueError("no object, or nested too deep")
        self._closing.append(close)

    def _mapping(self, schema: dict[str, Any]) -> dict[str, Any]:
        self._open("{", "}")
        self._note("{", self._position - 1)
        values: dict[str, Any] = {}
        while not self.take("}"):
            is_quoted = self.take(self._quote)
            self._context.layout.note("key", self._quote if is_quoted else "")
            if is_quoted:
                end = self._text.find(
                    self._quote, self._position, self._position + text_feed.MAX_HEAD
                )
                key, behind = self._text[self._position : end], end + len(self._quote)
                if end < 0:
                    raise ValueError("no end of a key")
                self._position = behind
                self.expect(":")
            else:
                match = _BARE_KEY.match(self._text, self._position)
                key = "" if match is None else match[0][:-1].strip()
                self._position += 0 if match is None else len(match[0])
            if not key or set(key) & set("{}[],"):
                raise ValueError("not a key")
            self.is_repeated |= key in values
            self._note(":", self._position - 1)
            values[key] = self._value(literals.property_schema(schema, key))
            self._separate("}")
        self._closing.pop()
        return values

    def _items(self, schema: Any) -> list[Any]:
        self._open("[", "]")
        items: list[Any] = []
        while not self.take("]"):
            items.append(self._value(schema))
            self._separate("]")
        self._closing.pop()
        return items

    def _value(self, schema: Any) -> Any:
        schema = literals.resolve(schema, self._root)
        if self.take(self._quote):
            text, types = self._string(), literals.types_of(schema, self._root)
            if not types or "string" in types:
                return text
            return self._converted(text, schema)
        self._skip()
        if self._text.startswith("{", self._position):
            return self._mapping(schema)
        if self._text.startswith("[", self._position):
            return self._items(schema.get("items"))
        match = _BARE.match(self._text, self._position)
        self._position += 0 if match is None else len(match[0])
        text = "" if match is None else match[0].strip()
        if not text or self._quote in text:
            raise ValueError("no value")
        return self._converted(text, schema) if schema else _bare(text)

    def _converted(self, text: str, schema: Any) -> Any:
        try:
            return literals.convert(text, schema, self._root)
        except literals.RepeatedKey:
            self.is_repeated = True
            return None

    def _separate(self, end: str) -> None:
        self._note(f"before {end}", self._position)
        if not self._text.startswith(end, after_space(self._text, self._position)):
            self.expect(",")
            self._note(f"behind {end}", self._position)

    def _note(self, place: str, start: int) -> None:
        text = self._text[start : after_space(self._text, self._position)]
        self._context.layout.note(place, text)

    def _string(self) -> str:
        """Consume a string and its end marker, and return the string. The start marker was consumed
        before.

        Raises:
            ValueError: no marker can end the string, or several can.
        """
        start, depth = self._position, 0
        for match in self._marks.finditer(self._text, start):
            if match[0] != self._quote:
                depth = max(0, depth + (1 if match[0] == self._context.mark else -1))
            elif not depth and self._continues(match.end()):
                end = match.start()
                break
        else:
            marks = self._marks.finditer(self._text, start)
            end = only_end(marks, self._quote, self._continues)
        if end is None:
            raise ValueError("no end of a string, or several")
        self._context.layout.num_values += 1
        self._position = end + len(self._quote)
        return self._text[start:end]

    def _continues(self, position: int) -> bool:
        """Return whether the text after a string that ends at `position` continues or ends the
        arguments.
        """
        text, closing = self._text, self._closing.copy()
        while closing:
            position = after_space(text, position)
            if text.startswith(closing[-1], position):
                closing.pop()
                position += 1
            elif not text.startswith(",", position):
                return False
            elif closing[-1] == "}":
                return self._is_key(after_space(text, position + 1))
            else:
                return self._is_item(after_space(text, position + 1))
        return self._context.may_follow(text, position)

    def _is_key(self, start: int) -> bool:
        text, quote = self._text, self._quote
        if match := _BARE_KEY.match(text, start):
            start = after_space(text, match.end())
            value = _BARE.match(text, start, start + text_feed.MAX_HEAD)
            return text.startswith((quote, "{", "["), start) or not (value and quote in value[0])
        end = text.find(quote, start + len(quote), start + text_feed.MAX_HEAD)
        is_quoted = text.startswith(quote, start) and end >= 0
        return is_quoted and text.startswith(":", after_space(text, end + len(quote)))

    def _is_item(self, start: int) -> bool:
        is_bracketed = self._text.startswith((self._quote, "{", "["), start)
        return is_bracketed or _BARE_ITEM.match(self._text, start) is not None


def _bare(text: str) -> Any:
    try:
        value = literals.read_json(text)
    except ValueError:
        return text
    return value if literals.is_finite(value) else text


@dataclass(frozen=True)
class BracedCall(CallBody):
    """Notation of Gemma's tool calls: `call:f{a:<|"|>text<|"|>,b:[1,2]}`."""

    quote: str  # marker at both ends of a string
    pairs: tuple[tuple[str, str], ...] = (("{", "}"),)

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.quote,)

    @property
    def final(self) -> re.Pattern[str]:
        """Pattern of the marker that ends the last string of a tool call, up to the last closing
        brace.
        """
        return re.compile(rf"{re.escape(self.quote)}[\s}}\]]*\}}")

    def begins(self, source: text_feed.TextFeed) -> text_feed.Reading[None]:
        yield from source.match(_BRACED_NAME)

    def read(
        self, source: text_feed.TextFeed, tools: Tools, context: CallContext
    ) -> text_feed.Reading[list[WrittenCall]]:
        head = yield from source.match(_BRACED_NAME)
        context.layout.note_head(head, "")
        name = head["name"]
        reader = BraceReader(source.text, source.position, self.quote, tools.get(name, {}), context)
        try:
            values = reader.call()
        except ValueError:
            raise text_feed.FormatMismatch from None
        source.take_to(reader.position)
        if name not in tools:
            raise text_feed.UncallableCall
        if reader.is_repeated:
            raise text_feed.RepeatedArgument
        return [make_call(name, values)]


_BRACED_NAME = re.compile(rf"\s*call:\s*(?P<name>{NAME})\s*(?=\{{)")
