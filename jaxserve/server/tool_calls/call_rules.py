"""Grammar rules of a single call in each notation.

In tagged calls, values are written so that readers convert them back: as JSON if the schema does
not allow strings, otherwise as the text itself up to the tag that ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.server.tool_calls.call_bodies import HeadedCall, JsonCall, KeyedCall, XmlCall
from jaxserve.server.tool_calls.formats import CallFormat
from jaxserve.server.tool_calls.literals import convert, property_schema, types_of
from jaxserve.server.tool_calls.unconstrained_calls import call_ends
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
    """Tool for which a grammar is written: its name, and the JSON schema of its arguments or a Lark
    grammar of its raw text.
    """

    name: str
    schema: dict[str, Any]
    lark: str | None = None


def bare(schema: Any) -> Any:
    """Return a copy of a JSON schema without descriptions and other keywords that do not restrict
    values.
    """
    if isinstance(schema, list):
        return [bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    simplified: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED_SCHEMAS and isinstance(value, dict):
            simplified[name] = {key: bare(inner) for key, inner in value.items()}
        elif name in _VALUES:
            simplified[name] = value
        elif name not in _ANNOTATIONS:
            simplified[name] = bare(value)
    return simplified


def arguments_schema(function: Function) -> dict[str, Any]:
    """Return the JSON schema that a grammar enforces for the arguments of a tool.

    It is the tool's schema with type object and without annotations. Undeclared arguments are
    excluded unless the schema sets `additionalProperties`.
    """
    schema = {"type": "object", **plain_schema(bare(function.schema))}
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and "additionalProperties" not in schema:
        names = required if isinstance(required, list) else []
        missing = {name: {} for name in names if isinstance(name, str) and name not in properties}
        schema |= {"properties": properties | missing, "additionalProperties": False}
    return schema


def json_rule(schema: dict[str, Any]) -> str:
    """Return the right side of a Lark rule that matches the JSON values of a schema.

    `EnforceableSchemas` must have checked the schema before.
    """
    return "%json " + json.dumps({**schema, "x-guidance": _GUIDANCE})


def escaped(mark: str) -> str:
    """Return a regular expression for Lark, without its slashes, that matches exactly the text
    `mark`.
    """
    plain = "_<>"
    return "".join(c if c.isalnum() or c in plain or not c.isascii() else f"\\{c}" for c in mark)


def spelled(text: str, spell: Callable[[str], str]) -> list[str]:
    """Return a list of Lark terms that together match a text.

    Args:
        spell: function that returns the Lark term of a marker, a token `<[id]>` or a quoted string.
            Text between markers becomes quoted strings.
    """
    whole = spell(text)
    if whole.startswith("<["):
        return [whole]
    parts = filter(None, _MARK.split(text))
    return [spell(part) if _MARK.fullmatch(part) else json.dumps(part) for part in parts]


# Keywords of string schemas that a regular expression can enforce.
_LENGTHS = frozenset(("minLength", "maxLength"))
# Maximum `maxLength`. With line breaks around the text, larger counts make the automaton too big.
_LONGEST, _LONGEST_TRIMMED = 1024, 16
Spell = Callable[[str], str]


class Unformable(Exception):
    """Error: a format of tool calls cannot express exactly the values that a JSON schema allows."""


@dataclass(frozen=True)
class _Tags:
    """Texts around the name and the value of an argument in a tagged tool call."""

    key: str  # text before the name
    before: str  # text between the name and the value, with `{}` for the type of the value
    end: str  # text after the value
    # Other texts that a value must not contain, since readers look for them.
    stops: tuple[str, ...] = ()
    trims: bool = False  # True if one line break on either side of a value is not part of it
    is_escaped: bool = False  # True if names are HTML-escaped


def tagged_rules(form: CallFormat, functions: Sequence[Function], spell: Spell) -> Iterator[str]:
    """Yield the Lark rules of one tool call with a tag per argument, of any of the functions.

    The rule `call` matches from after the marker of the call to the call's own end. Arguments come
    in the order of the schema, each at most once.

    Args:
        form: format of the call, whose body is an `XmlCall` or a `KeyedCall`.
        spell: function that returns the Lark term of a marker.

    Raises:
        Unformable: the format cannot express a schema exactly.
    """
    head, tags, tail = _parts(form)
    yield "call: " + " | ".join(f"call{index}" for index in range(len(functions)))
    yield from _text_rule("any_text", "", r"(.|\n)*", tags, spell)
    if "NUMBER" in head:
        yield "NUMBER: /[1-9][0-9]{0,2}/"
    for index, function in enumerate(functions):
        schema = arguments_schema(function)
        required = schema.get("required") or ()
        arguments = []
        for place, name in enumerate(schema.get("properties") or {}):
            rule = f"argument{index}_{place}"
            arguments.append(rule if name in required else f"{rule}?")
            yield from _argument(rule, name, schema, tags, spell)
        if set(required) - set(schema.get("properties") or {}):
            raise Unformable
        name = " ".join(_written(part, function.name, spell) for part in head)
        yield f"call{index}: {name} {' '.join(arguments)} NL? {' '.join(spelled(tail, spell))}"


def _written(part: str, name: str, spell: Spell) -> str:
    if part in ("NUMBER", "NL?"):
        return part
    return " ".join(spelled(part.replace("NAME", name), spell))


def _parts(form: CallFormat) -> tuple[list[str], _Tags, str]:
    """Return the parts of a tagged call: the texts up to the end of the function name, in which
    NAME stands for that name, the tags around an argument, and the text after all arguments.
    """
    body = form.body
    if isinstance(body, KeyedCall):
        key, key_end, value, end = body.tags
        tags = _Tags(key, f"{key_end}\n{value}", end, _stops(form, value))
        return ["NAME", *filter(None, [body.after])], tags, body.end
    assert isinstance(body, XmlCall)
    quote = '"' if body.is_quoted else ""
    kind = f' {body.types}="{{}}"' if body.types else ""
    tags = _Tags(
        body.parameter + quote,
        f"{quote}{kind}{body.tag_end}",
        body.parameter_end,
        _stops(form, body.parameter),
        body.trims,
        body.is_escaped,
    )
    head = [f"{body.before}{quote}NAME{quote}"]
    head += [' index="', "NUMBER", '"'] if body.types == "type" else []
    return [*head, body.tag_end], tags, body.end


def _stops(form: CallFormat, opening: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys([opening, *call_ends(form), *form.starts]))


def _argument(
    rule: str, name: str, schema: dict[str, Any], tags: _Tags, spell: Spell
) -> Iterator[str]:
    """Yield the Lark rules of one argument of a tagged call: its tags and its value.

    Args:
        rule: name of the rule of the argument.
        name: name of the argument.
        schema: JSON schema of all arguments of the tool.

    Raises:
        Unformable: the tags cannot express the name or the values that the schema allows.
    """
    value_schema = property_schema(schema, name)
    types = types_of(value_schema, schema)
    is_text = "string" in types or not types
    shown = name
    if tags.is_escaped:
        shown = name.replace("&", "&amp;").replace('"', "&quot;")
    if not shown or set(shown) & set("<>\"'\n") or shown != shown.strip():
        raise Unformable
    kind = "string" if is_text else sorted(types)[0].replace("integer", "number")
    if tags.before.startswith('" string='):
        kind = "true" if is_text else "false"
    before = tags.before.replace("{}", kind)
    opening = _opening(f"{tags.key}{shown}{before}", spell)
    end = " ".join(spelled(tags.end, spell))
    space = "NL?" if tags.trims else ""
    if not is_text:
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        inner = schema["properties"][name]
        yield f"{rule}: NL? {opening} {space} value{rule} {space} {end}"
        yield f"value{rule}: {json_rule({**inner, **shared})}"
        return
    values = value_schema.get("enum", [value_schema["const"]] if "const" in value_schema else None)
    if values is not None:
        choices = _choices(values, value_schema, schema, tags)
        yield f"{rule}: NL? {opening} {space} ({choices}) {space} {end}"
        return
    yield from _text(rule, opening, value_schema, tags, spell)


def _opening(text: str, spell: Spell) -> str:
    return " NL? ".join(" ".join(spelled(line, spell)) for line in text.split("\n"))


def _choices(values: list[Any], value_schema: Any, schema: dict[str, Any], tags: _Tags) -> str:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if "{}" in tags.before and not all(isinstance(value, str) for value in values):
        raise Unformable
    for text in texts:
        read = convert(text, value_schema, schema)
        marks = (tags.end, *tags.stops, "\n")
        is_there = any(type(read) is type(value) and read == value for value in values)
        if not is_there or any(mark in text for mark in marks):
            raise Unformable
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts if text) or '""'


def _text(rule: str, opening: str, value_schema: Any, tags: _Tags, spell: Spell) -> Iterator[str]:
    """Yield the Lark rules of an argument with any text as value, with the length limits of its
    schema.

    Args:
        rule: name of the rule of the argument.
        opening: Lark terms of the tags before the value.

    Raises:
        Unformable: the schema restricts the text by other keywords, or its limits are too large.
    """
    limits = value_schema.keys() - {"type"}
    if all(choice == {"type": choice.get("type")} for choice in value_schema.get("anyOf", [{}])):
        limits.discard("anyOf")
    bounds = limits & _LENGTHS if value_schema.get("type") == "string" else set[str]()
    if limits - bounds:
        raise Unformable
    low, high = value_schema.get("minLength", 0), value_schema.get("maxLength", "")
    longest = _LONGEST_TRIMMED if tags.trims else _LONGEST
    if not all(isinstance(n, int) and 0 <= n <= longest for n in (low, high or 0)):
        raise Unformable
    if not bounds:
        yield f"{rule}: NL? {opening} any_text"
        return
    inner = rf"(.|\n){{{low},{high}}}"
    yield from _text_rule(
        rule, f"NL? {opening}", rf"\n{inner}\n" if tags.trims else inner, tags, spell
    )


def _text_rule(rule: str, before: str, inner: str, tags: _Tags, spell: Spell) -> Iterator[str]:
    # The rules match `inner` up to and including the tag that ends it.
    first, *rest = spelled(tags.end, spell)
    without = rf" & ~/(.|\n)*({'|'.join(map(escaped, tags.stops))})(.|\n)*/"
    if first.startswith("<["):  # one added token ends the text
        end = escaped(tags.end if not rest else tags.end[: tags.end.index(">") + 1])
        yield rf"TEXT_{rule.upper()}: /{inner}/ & ~/(.|\n)*{end}(.|\n)*/{without}"
        yield f"{rule}: {before} TEXT_{rule.upper()} {' '.join([first, *rest])}"
        return
    end = escaped(tags.end)
    yield rf"text_{rule}[lazy]: /{inner}{end}/ & ~/(.|\n)*{end}(.|\n)+/{without}"
    yield f"{rule}: {before} text_{rule}"


_KEYWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def object_rules(
    form: CallFormat, functions: Sequence[Function], spell: Callable[[str], str]
) -> Iterator[str]:
    """Yield the Lark rules of one tool call as a JSON object, or as a name with JSON arguments.

    The rule `call` matches a call of any of the functions.

    Args:
        form: format of the call, whose body is a `JsonCall` or a `HeadedCall`.
        spell: function that returns the Lark term of a marker.
    """
    body = form.body
    assert isinstance(body, JsonCall | HeadedCall)
    yield "call: " + " | ".join(f"call{index}" for index in range(len(functions)))
    yield "NUMBER: /[0-9]{1,3}/"
    for index, function in enumerate(functions):
        name, arguments = function.name, f"args{index}"
        if isinstance(body, HeadedCall):
            parts = [*spelled(body.before, spell), json.dumps(name)]
            parts += ['":" NUMBER'] if body.is_numbered else []
            parts += [*spelled(body.after, spell), arguments, *spelled(body.tail, spell)]
        elif body.is_keyed:
            parts = [json.dumps(f'{{"{name}": '), arguments, '"}"']
        else:
            head = f'"{body.name}": "{name}", "{body.arguments}": '
            number = [json.dumps(f'{{"{body.number}": "'), "NUMBER", json.dumps(f'", {head}')]
            parts = number if body.number else [json.dumps("{" + head)]
            parts += [arguments, '"}"']
        yield f"call{index}: {' '.join(parts)}"
        yield f"{arguments}: {json_rule(arguments_schema(function))}"


def python_rules(functions: Sequence[Function]) -> Iterator[str]:
    """Yield the Lark rules of one tool call in Python syntax, of any of the functions.

    The rule `call` matches a call with keyword arguments in the order of the schema, required ones
    first.

    Raises:
        InvalidRequest: the name of a property is not a valid Python keyword argument.
    """
    yield "call: " + " | ".join(f"call{index}" for index in range(len(functions)))
    for index, function in enumerate(functions):
        schema = arguments_schema(function)
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        properties: dict[str, Any] = schema.get("properties") or {}
        required = [name for name in properties if name in (schema.get("required") or ())]
        optional = [name for name in properties if name not in required]
        names = [*required, *optional]
        bad = [name for name in names if not _KEYWORD.fullmatch(name)]
        if bad:
            raise InvalidRequest(f"tools: {bad[0][:60]!r} cannot be a keyword in Python", "tools")
        keys = [f"key{index}_{place}" for place in range(len(names))]
        for key, name in zip(keys, names, strict=True):
            value_schema = properties[name]
            inner = {**value_schema, **shared} if isinstance(value_schema, dict) else {}
            yield f"{key}: {json.dumps(name + '=')} value{key}"
            yield f"value{key}: {json_rule(inner)}"
        # Optional arguments that may follow another argument and a comma.
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
