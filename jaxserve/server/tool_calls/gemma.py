"""Gemma's notation of objects: bare keys, strings between marks, other values bare."""

from __future__ import annotations

import re
from typing import Any

from jaxserve.server.tool_calls.literals import MAX_DEPTH, Cursor, read_json
from jaxserve.server.tool_calls.values import (
    convert,
    is_finite,
    property_schema,
    resolve,
    types_of,
)

_BARE = re.compile(r"[^,}\]]+")


def read_braces(text: str, quote: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Read an object in braces.

    Args:
        text: the object, from its brace to that which closes it.
        quote: the mark at both ends of a string.
        schema: of the object. Bare values are converted by it, where it says something of them.

    Raises:
        ValueError: the text is anything else.
    """
    reader = _Reader(text, quote, schema)
    value = reader.mapping(schema, 0)
    if reader.rest():
        raise ValueError("text after the object")
    return value


class _Reader(Cursor):
    """Reader of the notation."""

    def __init__(self, text: str, quote: str, root: dict[str, Any]) -> None:
        super().__init__(text)
        self._quote = quote
        self._root = root

    def _until(self, mark: str) -> str:
        end = self._text.find(mark, self._position)
        if end < 0:
            raise ValueError(f"no {mark}")
        taken, self._position = self._text[self._position : end], end + len(mark)
        return taken

    def mapping(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        if depth > MAX_DEPTH or not self.take("{"):
            raise ValueError("no object, or nested too deep")
        values: dict[str, Any] = {}
        while not self.take("}"):
            if self.take(self._quote):
                key = self._until(self._quote)
                self.expect(":")
            else:
                key = self._until(":").strip()
            if not key or set(key) & set("{}[],"):
                raise ValueError("not a key")
            values[key] = self._value(property_schema(schema, key), depth)
            self.between("}")
        return values

    def _items(self, schema: Any, depth: int) -> list[Any]:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        items: list[Any] = []
        while not self.take("]"):
            items.append(self._value(schema, depth))
            self.between("]")
        return items

    def _value(self, schema: Any, depth: int) -> Any:
        schema = resolve(schema, self._root)
        if self.take(self._quote):
            text, types = self._until(self._quote), types_of(schema, self._root)
            return text if not types or "string" in types else convert(text, schema, self._root)
        if self.take("{"):
            self._position -= 1
            return self.mapping(schema, depth + 1)
        if self.take("["):
            return self._items(schema.get("items"), depth + 1)
        found = _BARE.match(self._text, self._position)
        self._position += 0 if found is None else len(found[0])
        text = "" if found is None else found[0].strip()
        if not text:
            raise ValueError("no value")
        return convert(text, schema, self._root) if schema else _bare(text)


def _bare(text: str) -> Any:
    """Return a number, a boolean or null where a text is one, or else the text."""
    try:
        value = read_json(text)
    except ValueError:
        return text
    return value if is_finite(value) else text
