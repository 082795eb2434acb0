"""Calls as the chat template of each dialect writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxserve.server.tool_calls.call_bodies import (
    HeadedCall,
    JsonCall,
    KeyedCall,
    PythonCalls,
    XmlCall,
)
from jaxserve.server.tool_calls.formats import CALL_FORMATS, CallFormat
from jaxserve.server.tool_calls.gemma import BracedCall

Calls = Sequence[tuple[str, dict[str, Any]]]
# Dialects of tags whose tags stand side by side; in other dialects each tag has a line of its own.
SIDE_BY_SIDE = ("glm47", "hy_v4", "kimi_k3", "step3")


def _dumped(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parameter(parser: str, name: str, value: Any) -> str:
    """Return one parameter of a dialect of tags."""
    form, text = CALL_FORMATS[parser], _dumped(value)
    line = "" if parser in SIDE_BY_SIDE else "\n"
    if isinstance(form.body, KeyedCall):
        key, key_end, before, after = form.body.tags
        return f"{key}{name}{key_end}{line}{before}{text}{after}"
    if isinstance(form.body, BracedCall):
        quote = form.body.quote
        return f"{name}:{quote}{text}{quote}" if isinstance(value, str) else f"{name}:{text}"
    assert isinstance(form.body, XmlCall)
    body = form.body
    quote, is_text = '"' * body.is_quoted, isinstance(value, str)
    kinds = {"string": "true" if is_text else "false", "type": "string" if is_text else "object"}
    kind = f' {body.types}="{kinds[body.types]}"' if body.types else ""
    text = f"\n{text}\n" if body.trims else text
    return f"{body.parameter}{quote}{name}{quote}{kind}{body.tag_end}{text}{body.parameter_end}"


def _tagged(parser: str, form: CallFormat, calls: Calls) -> str:
    body, line = form.body, "" if parser in SIDE_BY_SIDE else "\n"
    assert isinstance(body, XmlCall | KeyedCall)
    before, after = form.section
    texts = []
    for number, (name, values) in enumerate(calls):
        parts = [parameter(parser, key, value) for key, value in values.items()]
        if isinstance(body, KeyedCall):
            head = f"{form.mark}{name}{body.after}"
        else:
            quote = '"' * body.is_quoted
            index = f' index="{number + 1}"' if body.types == "type" else ""
            head = f"{form.mark}{body.before}{quote}{name}{quote}{index}{body.tag_end}"
        call = line.join([head, *parts, body.end]) + form.close
        texts.append(line.join([before, call, after]) if form.has_own_section else call)
    between = "" if parser in ("glm47", "hy_v4", "kimi_k3") else "\n"
    joined = between.join(texts)
    if form.section[0] and not form.has_own_section:
        outer = "\n" if parser == "step3" else line
        return outer.join([before, joined, after])
    return joined


def _json(form: CallFormat, calls: Calls) -> str:
    body = form.body
    assert isinstance(body, JsonCall)
    objects = []
    for number, (name, values) in enumerate(calls):
        made: dict[str, Any] = {body.name: name, body.arguments: values}
        if body.number:
            made = {body.number: str(number), **made}
        objects.append(_dumped({name: values} if body.is_keyed else made))
    before, after = form.section
    if form.is_array:
        return f"{form.mark}[{', '.join(objects)}]{form.close}"
    if form.is_optional_mark:
        return "; ".join(objects)
    if form.section[0] or not form.close:
        return "\n".join(f"{before}{form.mark}{one}{form.close}{after}" for one in objects)
    return "\n".join(f"{form.mark}\n{one}\n{form.close}" for one in objects)


def _headed(form: CallFormat, calls: Calls) -> str:
    body = form.body
    assert isinstance(body, HeadedCall)
    texts = []
    for number, (name, values) in enumerate(calls):
        count = f":{number}" if body.is_numbered else ""
        head = f"{form.mark}{body.before}{name}{count}{body.after}"
        texts.append(f"{head}{_dumped(values)}{body.tail}{form.close}")
    return form.section[0] + "".join(texts) + form.section[1]


def write(parser: str, calls: Calls) -> str:
    """Return calls as a model of a dialect writes them."""
    form = CALL_FORMATS[parser]
    if form.is_harmony:
        turn = "<|start|>assistant"
        return turn.join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            f"{_dumped(values)}<|call|>"
            for name, values in calls
        )
    match form.body:
        case JsonCall():
            return _json(form, calls)
        case HeadedCall():
            return _headed(form, calls)
        case PythonCalls():
            texts = [
                f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
                for name, values in calls
            ]
            is_list = form.body.is_list
            inner = f"[{', '.join(texts)}]" if is_list else "\n".join(texts)
            return inner if form.is_optional_mark else f"{form.mark}{inner}{form.close}"
        case BracedCall():
            return "".join(
                f"{form.mark}call:{name}{{"
                + ",".join(parameter(parser, key, value) for key, value in values.items())
                + f"}}{form.close}"
                for name, values in calls
            )
        case _:
            return _tagged(parser, form, calls)
