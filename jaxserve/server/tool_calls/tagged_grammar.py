"""Grammar rules of tagged calls, whose values are bare text.

Values are written so that readers convert them back: as JSON if the schema does not allow strings,
otherwise as the text itself up to the tag that ends it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.server.tool_calls.bodies import KeyedCall, XmlCall
from jaxserve.server.tool_calls.chosen import call_ends
from jaxserve.server.tool_calls.formats import CallFormat
from jaxserve.server.tool_calls.grammar_parts import (
    Function,
    arguments_schema,
    escaped,
    json_rule,
    spelled,
)
from jaxserve.server.tool_calls.values import convert, property_schema, types_of

# Keywords of string schemas that a regular expression can enforce.
_LENGTHS = frozenset(("minLength", "maxLength"))
# Maximum `maxLength`. With line breaks around the text, larger counts make the automaton too big.
_LONGEST, _LONGEST_TRIMMED = 1024, 16
Spell = Callable[[str], str]


class Unformable(Exception):
    """The call format cannot express exactly the values that a schema allows."""


@dataclass(frozen=True)
class _Tags:
    """Texts around an argument.

    Attributes:
        key: text before the name.
        before: text between the name and the value, with `{}` for the type of the value.
        end: text after the value.
        stops: other texts that a value must not contain, since readers look for them.
        trims: True if one line break on either side of a value is not part of it.
        is_escaped: True if names are HTML-escaped.
    """

    key: str
    before: str
    end: str
    stops: tuple[str, ...] = ()
    trims: bool = False
    is_escaped: bool = False


def tagged_rules(form: CallFormat, functions: Sequence[Function], spell: Spell) -> Iterator[str]:
    """Yield the rules of one call, from after its marker to its own end.

    Arguments come in the order of the schema, each at most once.

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
    """Return the texts up to the name of a call, the tags of its arguments, and its end."""
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
    """Yield the rules of an argument: its tags and its value."""
    own = property_schema(schema, name)
    types = types_of(own, schema)
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
    values = own.get("enum", [own["const"]] if "const" in own else None)
    if values is not None:
        choices = _choices(values, own, schema, tags)
        yield f"{rule}: NL? {opening} {space} ({choices}) {space} {end}"
        return
    yield from _text(rule, opening, own, tags, spell)


def _opening(text: str, spell: Spell) -> str:
    return " NL? ".join(" ".join(spelled(line, spell)) for line in text.split("\n"))


def _choices(values: list[Any], own: Any, schema: dict[str, Any], tags: _Tags) -> str:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if "{}" in tags.before and not all(isinstance(value, str) for value in values):
        raise Unformable
    for text in texts:
        read = convert(text, own, schema)
        marks = (tags.end, *tags.stops, "\n")
        is_there = any(type(read) is type(value) and read == value for value in values)
        if not is_there or any(mark in text for mark in marks):
            raise Unformable
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts if text) or '""'


def _text(rule: str, opening: str, own: Any, tags: _Tags, spell: Spell) -> Iterator[str]:
    """Yield the rules of a free text, with its length bounds if it has any."""
    limits = own.keys() - {"type"}
    if all(choice == {"type": choice.get("type")} for choice in own.get("anyOf", [{}])):
        limits.discard("anyOf")
    bounds = limits & _LENGTHS if own.get("type") == "string" else set[str]()
    if limits - bounds:
        raise Unformable
    low, high = own.get("minLength", 0), own.get("maxLength", "")
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
    """Yield the rules of a text that matches `inner`, up to and including the tag that ends it."""
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
