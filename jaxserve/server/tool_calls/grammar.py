"""Grammars of calls in llguidance's dialect of Lark, which make every call well formed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.server.tool_calls.formats import CallFormat
from jaxserve.structured import plain_schema

MAX_CALLS = 16
# Spaces between parts of arguments. Without a bound, small models generate them for ever.
_GUIDANCE = {"whitespace_pattern": r"[ \n]{0,16}"}
# Keywords that do not restrict a value. Descriptions are most of a schema's size.
_ANNOTATIONS = frozenset(
    ("description", "title", "default", "examples", "$comment", "deprecated", "readOnly")
)
# Keywords whose values map names of the user's choice to schemas.
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_VALUES = frozenset(("enum", "const"))
_KEYWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Function:
    """Name of a tool, and the JSON schema of its arguments."""

    name: str
    schema: dict[str, Any]


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


def _arguments(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments: an object with only the named properties."""
    schema = {"type": "object", **plain_schema(bare(function.schema))}
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _GUIDANCE})


def grammar_of_calls(
    form: CallFormat,
    functions: Sequence[Function],
    spell: Callable[[str], str],
    *,
    most: int = MAX_CALLS,
    may_answer: bool = False,
    answer_schema: dict[str, Any] | None = None,
) -> str:
    """Return a grammar whose texts are calls of these functions.

    Args:
        form: of the calls.
        functions: at least one.
        spell: writes a mark in Lark, as text or as a token.
        most: the largest number of calls in a text.
        may_answer: whether a text may also hold no call, or other text between calls.
        answer_schema: JSON schema of an answer without calls; None for free text.
    """
    mark = spell(form.mark)
    rules = list(_python_rules(functions) if form.is_python else _json_rules(form, functions))
    times = f"{{0,{most - 1}}}"
    between = json.dumps(f"{form.separators[:1]} ")
    listed = f"call ({between} call){times}" if most > 1 else "call"
    if form.is_optional_mark:
        calls = listed
        calls = f'"[" {calls} "]"' if form.is_array else calls
    elif form.is_array:
        rules.append(f'after: "[" {listed} "]"')
        calls = f"{mark} after"
    else:
        rules.append(rf'after: "\n" call "\n" {spell(form.close)}')
        calls = f"{mark} after"
        if most > 1:
            calls += f' ("\\n" {mark} after){times}'
    rules.append(f"calls: {calls}")
    if not may_answer:
        rules.append("start: calls")
    elif answer_schema is not None:
        # An optional mark is required here, since an answer may begin like a call.
        first = f"{mark} calls" if form.is_optional_mark else "calls"
        rules += [f"start: {first} | answer", f"answer: {_json(answer_schema)}"]
    else:
        rules += _free_rules(form, spell, most)
    return "\n".join(rules)


def _free_rules(form: CallFormat, spell: Callable[[str], str], most: int) -> Iterator[str]:
    """Yield the rules of texts that are free until they call, from `start` on."""
    mark = spell(form.mark)
    # A mark within an answer, in whatever tokens, would be read as the beginning of a call.
    no_mark = rf"~/(.|\n)*{_escaped(form.mark)}(.|\n)*/"
    if form.is_optional_mark:
        # A text that begins like a call must be one.
        opening = r"\[" if form.is_python else r"\{"
        close = f" {spell(form.close)}?" if form.close else ""
        yield f"start: calls | {mark} calls{close} | ANSWER"
        yield rf"ANSWER: /\s*([^\s{opening}](.|\n)*)?/ & {no_mark}"
        return
    if mark.startswith("<"):
        yield f"start: ANSWER ({mark} after ANSWER){{0,{most}}}"
    else:
        yield f"start: (before after){{0,{most}}} ANSWER"
        yield rf"before[lazy]: /(.|\n)*{_escaped(form.mark)}/"
    yield rf"ANSWER: /(.|\n)*/ & {no_mark}"


def _escaped(mark: str) -> str:
    return "".join(c if c.isalnum() or c in "_<>" else "\\" + c for c in mark)


def _json_rules(form: CallFormat, functions: Sequence[Function]) -> Iterator[str]:
    yield "call: " + " | ".join(f"call{index}" for index in range(len(functions)))
    for index, function in enumerate(functions):
        head = json.dumps(f'{{"name": "{function.name}", "{form.arguments}": ')
        yield f'call{index}: {head} args{index} "}}"'
        yield f"args{index}: {_json(_arguments(function))}"


def _python_rules(functions: Sequence[Function]) -> Iterator[str]:
    """Yield the rules of calls with keywords in the order of the schema, required ones first.

    Raises:
        InvalidRequest: the name of a property is no keyword of Python.
    """
    yield "call: " + " | ".join(f"call{index}" for index in range(len(functions)))
    for index, function in enumerate(functions):
        schema = _arguments(function)
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        properties: dict[str, Any] = schema.get("properties") or {}
        required = [name for name in properties if name in schema.get("required", ())]
        optional = [name for name in properties if name not in required]
        names = [*required, *optional]
        bad = [name for name in names if not _KEYWORD.fullmatch(name)]
        if bad:
            raise InvalidRequest(f"tools: {bad[0][:60]!r} cannot be a keyword in Python", "tools")
        keys = [f"key{index}_{place}" for place in range(len(names))]
        for key, name in zip(keys, names, strict=True):
            own = properties[name]
            inner = {**own, **shared} if isinstance(own, dict) else {}
            yield f"{key}: {json.dumps(name + '=')} value{key}"
            yield f"value{key}: {_json(inner)}"
        # Optional keywords that may follow another keyword and its comma.
        for place in range(len(required), len(names)):
            rest = f"tail{index}_{place + 1}" if place + 1 < len(names) else '""'
            yield f'tail{index}_{place}: (", " {keys[place]})? {rest}'
        first = len(required)
        tail = f"tail{index}_{first}" if optional else '""'
        needed = ' ", " '.join(keys[:first])
        if required:
            inside = f"{needed} {tail}"
        else:
            ways = [
                f"{keys[place]} " + (f"tail{index}_{place + 1}" if place + 1 < len(names) else "")
                for place in range(len(names))
            ]
            inside = " | ".join([*ways, '""'])
        yield f'call{index}: {json.dumps(function.name + "(")} inside{index} ")"'
        yield f"inside{index}: {inside}"
