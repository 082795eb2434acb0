"""Grammar rules shared by all call formats: simplified JSON schemas, and marker texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxserve.structured import plain_schema

# White space between JSON tokens. Without a bound, small models can generate it endlessly.
_GUIDANCE = {"whitespace_pattern": r"[ \n]{0,16}", "lenient": True}
# Keywords that do not restrict values. Descriptions are most of the size of a schema.
_ANNOTATIONS = frozenset(
    ("description", "title", "default", "examples", "$comment", "deprecated", "readOnly")
)
# Keywords whose values map user-defined names to schemas.
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_VALUES = frozenset(("enum", "const"))
_MARK = re.compile(r"(<[^<>\s\"]+>)")


@dataclass(frozen=True)
class Function:
    """Tool as grammars need it: its name, and a JSON schema of arguments or a Lark grammar of raw
    text.
    """

    name: str
    schema: dict[str, Any]
    lark: str | None = None


def bare(schema: Any) -> Any:
    """Return a schema without annotation keywords, which do not restrict values."""
    if isinstance(schema, list):
        return [bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED_SCHEMAS and isinstance(value, dict):
            made[name] = {key: bare(inner) for key, inner in value.items()}
        elif name in _VALUES:
            made[name] = value
        elif name not in _ANNOTATIONS:
            made[name] = bare(value)
    return made


def arguments_schema(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments: an object with only the declared properties."""
    schema = {"type": "object", **plain_schema(bare(function.schema))}
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and "additionalProperties" not in schema:
        names = required if isinstance(required, list) else []
        missing = {name: {} for name in names if isinstance(name, str) and name not in properties}
        schema |= {"properties": properties | missing, "additionalProperties": False}
    return schema


def json_rule(schema: dict[str, Any]) -> str:
    """Return the right side of a Lark rule that matches JSON values of a schema.

    `EnforceableSchemas` must have checked the schema.
    """
    return "%json " + json.dumps({**schema, "x-guidance": _GUIDANCE})


def escaped(mark: str) -> str:
    """Return a regular expression that matches `mark`, for use between slashes in Lark."""
    plain = "_<>"
    return "".join(c if c.isalnum() or c in plain or not c.isascii() else f"\\{c}" for c in mark)


def spelled(text: str, spell: Callable[[str], str]) -> list[str]:
    """Return a text as Lark terms: markers as `spell` writes them, other text quoted."""
    whole = spell(text)
    if whole.startswith("<["):
        return [whole]
    parts = filter(None, _MARK.split(text))
    return [spell(part) if _MARK.fullmatch(part) else json.dumps(part) for part in parts]
