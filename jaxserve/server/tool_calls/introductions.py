"""Descriptions of tools and of calls in words, for chat templates that do not render tools."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.server.tool_calls import call_bodies
from jaxserve.server.tool_calls.formats import CallFormat
from jaxserve.server.tool_calls.gemma import BracedCall


def introduce(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], call_format: CallFormat, role: str
) -> list[dict[str, Any]]:
    """Return a conversation with a description of the tools in its first message.

    It serves chat templates that do not render tools. The description has the tools' JSON schemas
    and an example call.

    Args:
        tools: tools in the form of chat templates.
        role: role of the message with the description, "system" or "user". The description joins
            the first message if that has this role. Otherwise it becomes a new first message.
    """
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        "You can call functions. These are their names and the JSON schemas of their arguments:\n"
        f"{listed}\nA call is written like this:\n{example_of(call_format)}"
    )
    if messages and messages[0]["role"] == role:
        content = messages[0]["content"]
        parts = (content, text) if role == "system" else (text, content)
        return [{**messages[0], "content": "\n\n".join(filter(None, parts))}, *messages[1:]]
    return [{"role": role, "content": text}, *messages]


def example_of(form: CallFormat) -> str:
    """Return the text of an example tool call, of a function NAME, in a call format."""
    before, after = form.section
    body = _example(form.body)
    if form.is_harmony:
        return f"{form.mark}{body}{form.close}"
    if form.is_array and isinstance(form.body, call_bodies.JsonCall):
        body = f"[{body}]"
    if form.is_optional_mark:
        return body
    if isinstance(form.body, call_bodies.JsonCall) and not form.is_array and not before:
        body = f"\n{body}\n"
    return f"{before}{form.mark}{body}{form.close}{after}"


def _example(body: call_bodies.Body) -> str:
    match body:
        case call_bodies.JsonCall(is_keyed=True):
            return '{"NAME": {...}}'
        case call_bodies.JsonCall():
            return f'{{"{body.name}": "NAME", "{body.arguments}": {{...}}}}'
        case call_bodies.HeadedCall():
            number = ":0" if body.is_numbered else ""
            between = "" if body.before else " "
            return f"{body.before}NAME{number}{body.after or between}{{...}}{body.tail}"
        case call_bodies.PythonCalls():
            return "[NAME(ARGUMENT=VALUE, ...)]" if body.is_list else "NAME(ARGUMENT=VALUE, ...)"
        case call_bodies.XmlCall():
            quote = '"' if body.is_quoted else ""
            value = "\nVALUE\n" if body.trims else "VALUE"
            close = f"{quote}{body.tag_end}"
            parameter = f"{body.parameter}{quote}ARGUMENT{close}{value}{body.parameter_end}"
            return f"{body.before}{quote}NAME{close}\n{parameter}\n...\n{body.end}\n"
        case call_bodies.KeyedCall():
            key, key_end, start, end = body.tags
            pair = f"{key}ARGUMENT{key_end}\n{start}VALUE{end}"
            return f"NAME{body.after}\n{pair}\n...\n{body.end}"
        case BracedCall():
            return f"call:NAME{{ARGUMENT:{body.quote}VALUE{body.quote},...}}"
