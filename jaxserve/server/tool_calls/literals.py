"""Parsers of JSON and Python literals as models write them, and conversion of bare values."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from jaxserve.server.schema.decode import is_within
from jaxserve.text.json_schemas import TYPE_NAMES, place_of, value_at

_JSON_STOPS = re.compile(r'["\\{}\[\]]')
_PYTHON_STOPS = re.compile(r"[\"'\\{}\[\]()]")
_OPENING = frozenset("{[(")
MAX_DEPTH, MAX_JSON_DEPTH = 64, 500
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_CONSTANTS = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|\n|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


class EndFinder:
    """Incremental search for the closing bracket of a JSON or Python value in brackets.

    Brackets within strings are ignored. The search continues over successive pieces of text.

    Args:
        python: True for Python syntax, with strings in single quotes and with parentheses.
    """

    def __init__(self, python: bool = False) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._stops = _PYTHON_STOPS if python else _JSON_STOPS

    def find(self, text: str, position: int) -> int | None:
        """Search the next piece of a value for its closing bracket. Return the index in `text`
        after the bracket, or None if the value continues after this piece.

        Args:
            text: text that contains the next piece of the value.
            position: index in `text` at which the piece begins.
        """
        if self._is_escaped and position < len(text):
            position += 1
            self._is_escaped = False
        while match := self._stops.search(text, position):
            mark, position = match[0], match.end()
            if mark == "\\":
                if self._quote:
                    self._is_escaped = position == len(text)
                    position += 1
            elif self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in "\"'":
                self._quote = mark
            elif mark in _OPENING:
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return position
        return None


class RepeatedKey(ValueError):
    """Error: an object in JSON or Python syntax contains the same key twice."""


def read_json(text: str) -> Any:
    """Parse JSON text and return its value. Strings may contain unescaped line breaks.

    Raises:
        RepeatedKey: an object contains the same key twice.
        ValueError: the text is not JSON, contains NaN or an infinity, or is nested deeper than 500
            levels.
    """
    try:
        value = json.loads(
            text, strict=False, parse_constant=_no_number, object_pairs_hook=_object_of
        )
    except RecursionError:
        raise ValueError("nested too deep") from None
    # The maximum depth of the json module differs between versions of Python.
    is_short = text.count("[") + text.count("{") <= MAX_JSON_DEPTH
    if not is_short and not is_within(value, MAX_JSON_DEPTH + 1):  # one level more for scalars
        raise ValueError("nested too deep")
    return value


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise RepeatedKey("an object names a key twice")
    return mapping


def write_json(value: Any) -> str:
    """Return a value as JSON text that can be encoded as UTF-8.

    Non-ASCII characters stay unescaped, unless the text contains half of a surrogate pair.

    Raises:
        ValueError: a number is not finite, or the value is nested too deeply.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(value)
    return text


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def read_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse a list of tool calls in Python syntax, such as `[f(a=1, b="x"), g()]`.

    Returns:
        The name and the arguments of each call, in order. Calls have keyword arguments only, whose
            values are Python or JSON literals.

    Raises:
        ValueError: the text is not such a list, or a call repeats an argument.
    """
    reader = _Python(text)
    reader.expect("[")
    calls = []
    while not reader.take("]"):
        name = reader.match(_NAME)
        reader.expect("(")
        values: dict[str, Any] = {}
        while not reader.take(")"):
            key = reader.match(_NAME)
            reader.expect("=")
            if key in values:
                raise ValueError(f"{key} is given twice")
            values[key] = reader.value(0)
            reader.between(")")
        calls.append((name, values))
        reader.between("]")
    if reader.rest():
        raise ValueError("text after the list")
    return calls


class Cursor:
    """Read position in a complete text, with methods that consume expected marks from left to
    right.

    White space before a mark is skipped.

    Args:
        position: index of the first character to read.
    """

    def __init__(self, text: str, position: int = 0) -> None:
        self._text = text
        self._position = position

    def _skip(self) -> None:
        self._position = _SPACE.match(self._text, self._position).end()  # type: ignore[union-attr]

    def rest(self) -> str:
        """Return the text after the read position, stripped of white space. The position does not
        move.
        """
        return self._text[self._position :].strip()

    def take(self, mark: str) -> bool:
        """Skip white space, and consume the text `mark` if it comes next. Return whether it came
        next.
        """
        self._skip()
        is_there = self._text.startswith(mark, self._position)
        self._position += len(mark) if is_there else 0
        return is_there

    def expect(self, mark: str) -> None:
        """Skip white space, and consume the text `mark`, which must come next.

        Raises:
            ValueError: other text comes next.
        """
        if not self.take(mark):
            raise ValueError(f"no {mark} at {self._position}")

    def between(self, end: str) -> None:
        """Consume the comma between two items of a list, or stop before the closing text `end`.

        Raises:
            ValueError: neither a comma nor `end` comes next.
        """
        self._skip()
        if not self._text.startswith(end, self._position):
            self.expect(",")


class _Python(Cursor):
    """Recursive parser of Python literals, which also accepts true, false and null."""

    def match(self, pattern: re.Pattern[str]) -> str:
        self._skip()
        match = pattern.match(self._text, self._position)
        if match is None:
            raise ValueError(f"nothing fits at {self._position}")
        self._position = match.end()
        return match[0]

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        self._skip()
        first = self._text[self._position : self._position + 1]
        if first in ("'", '"'):
            return self._quoted(first)
        if first == "{":
            return self._mapping(depth)
        if first in ("[", "("):
            return self._items("]" if first == "[" else ")", depth)
        if first and (first.isdigit() or first in "+-."):
            number = self.match(_NUMBER).replace("_", "")
            is_whole = number.lstrip("+-").isdigit()
            if len(number) > 4000:
                raise ValueError("too long a number")
            value = int(number) if is_whole else float(number)
            if value in (float("inf"), float("-inf")):
                raise ValueError("too large a number")
            return value
        name = self.match(_NAME)
        if name not in _CONSTANTS:
            raise ValueError(f"{name} is no value")
        return _CONSTANTS[name]

    def _quoted(self, quote: str) -> str:
        pattern = re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL)
        inner = self.match(pattern)[1:-1]
        return _ESCAPE.sub(_unescaped, inner)

    def _items(self, end: str, depth: int) -> list[Any]:
        self._position += 1
        items = []
        while not self.take(end):
            items.append(self.value(depth + 1))
            self.between(end)
        return items

    def _mapping(self, depth: int) -> dict[str, Any]:
        self._position += 1
        mapping: dict[str, Any] = {}
        while not self.take("}"):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise ValueError("a key that is no text")
            if key in mapping:
                raise RepeatedKey(f"{key} is given twice")
            self.expect(":")
            mapping[key] = self.value(depth + 1)
            self.between("}")
        return mapping


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPES.get(code, code if code in "\"'\\/" else match[0])


_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_CHOICES = ("anyOf", "oneOf", "allOf")
_MAX_REFERENCES = 16
# Python refuses to parse integers of more digits.
_MAX_DIGITS = 4000


def property_schema(schema: dict[str, Any], name: str) -> Any:
    """Return the schema of the property `name` in a JSON schema of an object, with its `$ref`s
    followed.

    The result is {} if the schema does not declare the property, or if a reference has no target.
    """
    properties = resolve(schema, schema).get("properties")
    value_schema = properties.get(name) if isinstance(properties, dict) else None
    return resolve(value_schema, schema)


def resolve(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return the schema that a JSON schema refers to by `$ref`, followed repeatedly within `root`.

    A schema without `$ref` is returned unchanged. The result is {} if the value is not an object,
    if a reference has no target, or after 16 references.
    """
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        place = place_of(reference)
        schema = None if place is None else value_at(root, place)
    return {}


def types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """Return the JSON type names ("string", "object", ...) that a JSON schema allows.

    They come from the keywords type, enum and const of the schema, and of its alternatives in
    anyOf, oneOf and allOf. The set is empty if the schema does not restrict the type.

    Args:
        root: schema within which `$ref`s are resolved.
    """
    types: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting:
        schema = resolve(waiting.pop(), root)
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        declared, values = schema.get("type"), schema.get("enum")
        for name in declared if isinstance(declared, list) else [declared]:
            if isinstance(name, str):
                types.add(TYPE_NAMES.get(name.lower(), name.lower()))
        for value in values if isinstance(values, list) else []:
            types.add(_TYPES.get(type(value), "string"))
        if "const" in schema:
            types.add(_TYPES.get(type(schema["const"]), "string"))
        for key in _CHOICES:
            choices = schema.get(key)
            waiting += choices if isinstance(choices, list) else []
    return types


def convert(text: str, schema: Any, root: dict[str, Any]) -> Any:
    """Convert a tool argument that a model wrote without quotes to the type that its JSON schema
    allows.

    The types are tried in the order null, number, boolean, object or array. Otherwise the result is
    the text itself if the schema allows strings or has no types. A schema without strings accepts
    any JSON value, and text that is not JSON remains a string.

    Args:
        text: text of the argument.
        root: schema within which `$ref`s are resolved.

    Raises:
        RepeatedKey: the schema does not allow strings, and an object in the value repeats a key.
    """
    types = types_of(schema, root) or {"string"}
    bare = text.strip()
    if "null" in types and bare.lower() == "null":
        return None
    if types & {"integer", "number"}:
        number = _number(bare, "number" in types)
        if number is not None:
            return number
    if "boolean" in types and bare.lower() in _BOOLEANS:
        return _BOOLEANS[bare.lower()]
    if "string" in types and not types & {"object", "array"}:
        return text
    try:
        value = read_json(text)
    except RepeatedKey:
        if "string" not in types:
            raise
        return text
    except ValueError:
        return text
    if not is_finite(value):
        return text
    fits = types & {_TYPES[type(value)]} or "string" not in types
    return value if fits else text


def _number(text: str, may_be_fraction: bool) -> int | float | None:
    if len(text) > _MAX_DIGITS or "_" in text or not text.isascii():
        return None
    try:
        return int(text)
    except ValueError:
        pass
    if not may_be_fraction:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def is_finite(value: Any) -> bool:
    """Return whether a JSON-like value contains no NaN and no infinity, at any depth."""
    level = [value]
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, float) and not math.isfinite(item):
                return False
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level = inner
    return True
