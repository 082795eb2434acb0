"""Rules that grammars of calls share: of schemas without what says nothing, and of marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxserve.structured import plain_schema

# Spaces between parts of arguments. Without a bound, small models generate them for ever.
_GUIDANCE = {"whitespace_pattern": r"[ \n]{0,16}", "lenient": True}
# Keywords that do not restrict a value. Descriptions are most of a schema's size.
_ANNOTATIONS = frozenset(
    ("description", "title", "default", "examples", "$comment", "deprecated", "readOnly")
)
# Keywords whose values map names of the user's choice to schemas.
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_VALUES = frozenset(("enum", "const"))
_MARK = re.compile(r"(<[^<>\s\"]+>)")


@dataclass(frozen=True)
class Function:
    """Name of a tool, and the JSON schema of its arguments; or the Lark grammar of its raw text."""

    name: str
    schema: dict[str, Any]
    lark: str | None = None


def bare(schema: Any) -> Any:
    """Return a schema without the keywords that do not restrict a value."""
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
    """Return the schema of a function's arguments: an object with only the named properties."""
    schema = {"type": "object", **plain_schema(bare(function.schema))}
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and "additionalProperties" not in schema:
        names = required if isinstance(required, list) else []
        missing = {name: {} for name in names if isinstance(name, str) and name not in properties}
        schema |= {"properties": properties | missing, "additionalProperties": False}
    return schema


def json_rule(schema: dict[str, Any]) -> str:
    """Return a rule for a value of a schema that `EnforceableSchemas` has checked."""
    return "%json " + json.dumps({**schema, "x-guidance": _GUIDANCE})


def escaped(mark: str) -> str:
    """Return a regular expression of a mark, between strokes."""
    plain = "_<>"
    return "".join(c if c.isalnum() or c in plain or not c.isascii() else f"\\{c}" for c in mark)


def spelled(text: str, spell: Callable[[str], str]) -> list[str]:
    """Return the parts of a text, of which some are marks, or all of it is one."""
    whole = spell(text)
    if whole.startswith("<["):
        return [whole]
    parts = filter(None, _MARK.split(text))
    return [spell(part) if _MARK.fullmatch(part) else json.dumps(part) for part in parts]
