"""Conversion of bare argument values to the types in the JSON schema of a tool."""

from __future__ import annotations

import math
from typing import Any

from jaxserve.server.tool_calls.literals import RepeatedKey, read_json
from jaxserve.text.json_schemas import TYPE_NAMES, place_of, value_at

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
    """Return the schema of property `name` of an object schema, with references resolved.

    Returns:
        The schema of the property, {} if it is unknown.
    """
    properties = resolve(schema, schema).get("properties")
    own = properties.get(name) if isinstance(properties, dict) else None
    return resolve(own, schema)


def resolve(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Follow `$ref`s of a schema within `root`. Return {} if a reference has no target."""
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
    """Return the JSON type names that a schema allows, an empty set if it does not restrict them.

    Each schema is visited once, since schemas of choices may refer to each other.
    """
    types: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting:
        schema = resolve(waiting.pop(), root)
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        given, values = schema.get("type"), schema.get("enum")
        for name in given if isinstance(given, list) else [given]:
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
    """Return the value of a bare text according to a schema.

    Types are tried in the order null, number, boolean, object or array. Otherwise the text is a
    string if the schema allows strings. If not, it is parsed as any JSON value, and stays a string
    if it is not JSON.

    Args:
        text: the value as the model wrote it.
        schema: schema of the value.
        root: schema in which references are resolved.

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
    """Return whether all numbers in a JSON-like value are finite, so that JSON can represent it."""
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
