"""Schemas of answers in every field that may hold one, over HTTP: enforced, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.live_server import Server

CHAT, TEXT, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages")
)
MODEL = "demo_model"
USER: Any = [{"role": "user", "content": "Reverse: s-t-o-n-e"}]
BODY: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 200},
    TEXT: {"prompt": "a", "max_tokens": 200},
    RESPONSES: {"input": "a", "max_output_tokens": 200},
    MESSAGES: {"messages": USER, "max_tokens": 200},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"day": {"enum": ["mon", "tue"]}, "sure": {"type": "boolean"}},
    "required": ["day", "sure"],
    "additionalProperties": False,
}
WRAPPED = {"name": "plan", "schema": SCHEMA}
# As zod writes records, and with a type that JSON Schema lacks.
LOOSE: dict[str, Any] = {
    **SCHEMA,
    "propertyNames": {"type": "string", "pattern": "^(?!x)"},
    "properties": {**SCHEMA["properties"], "note": {"type": "any", "const": 1}},
    "not": {"required": ["z"]},
}
# The prompt shows it, and the context is short.
SMALL_LOOSE: dict[str, Any] = {
    "type": "object",
    "properties": {"day": {"enum": ["mon", "tue"]}},
    "required": ["day"],
    "propertyNames": {"type": "string"},
}


def texts(path: str, answer: Any) -> list[str]:
    if path == RESPONSES:
        return [answer["output"][0]["content"][0]["text"]]
    if path == MESSAGES:
        return [answer["content"][0]["text"]]
    return [one["text"] if path == TEXT else one["message"]["content"] for one in answer["choices"]]


FORMS: list[tuple[str, dict[str, Any]]] = [
    *(
        (path, {"response_format": form})
        for path in (CHAT, TEXT)
        for form in (
            {"type": "json_object", "schema": SCHEMA},
            {"type": "json_schema", "schema": SCHEMA},
            {"type": "json_schema", "name": "plan", "schema": SCHEMA, "strict": True},
            {"type": "json_object", "json_schema": WRAPPED},
            {"type": "json_schema", "json_schema": WRAPPED, "schema": SCHEMA},
        )
    ),
    *(
        (RESPONSES, {"text": {"format": form}})
        for form in (
            {"type": "json_object", "schema": SCHEMA},
            {"type": "json_schema", "schema": SCHEMA},
            {"type": "json_schema", "json_schema": WRAPPED},
            {"type": "json_object", "json_schema": WRAPPED},
        )
    ),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    *((path, {"structured_outputs": {"json": SCHEMA}}) for path in (CHAT, TEXT, RESPONSES)),
]


@pytest.mark.parametrize(("path", "fields"), FORMS, ids=lambda one: str(one)[:60])
def test_a_schema_is_enforced_wherever_it_stands(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    more = {} if path == MESSAGES else {"seed": 3}
    answer = server.request(path, BODY[path] | fields | {"temperature": 1.0} | more)
    assert answer.status == 200, answer.body
    for text in texts(path, answer.json()):
        jsonschema.validate(json.loads(text), SCHEMA)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (CHAT, {"response_format": form}, "response_format")
        for form in (
            {"type": "json_schema", "schema": LOOSE, "strict": True},
            {"type": "json_schema", "json_schema": {"schema": LOOSE, "strict": True}},
            {"type": "text", "json_schema": WRAPPED},
        )
    ),
    *(
        (RESPONSES, {"text": {"format": form}}, "text")
        for form in (
            {"schema": SCHEMA},  # the default type has no schema
            {"type": "json_schema", "schema": LOOSE, "strict": True},
            {"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": LOOSE}},
        )
    ),
    (RESPONSES, {"response_format": {"type": "json_object"}}, "response_format"),
    (MESSAGES, {"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format"),
    (MESSAGES, {"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
]


@pytest.mark.parametrize(("path", "fields", "name"), REFUSED, ids=lambda one: str(one)[:60])
def test_a_schema_that_is_not_enforced_is_refused(
    server: Server, path: str, fields: dict[str, Any], name: str
) -> None:
    answer = server.request(path, BODY[path] | fields)
    assert (answer.status, answer.error["param"]) == (400, name), answer.body
    if "strict" in str(fields):
        assert "#/propertyNames" in answer.error["message"]


def test_what_no_grammar_enforces_is_left_out_unless_strict(server: Server) -> None:
    for path, fields in (
        (CHAT, {"response_format": {"type": "json_schema", "schema": LOOSE}}),
        (TEXT, {"response_format": {"type": "json_object", "schema": LOOSE}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": LOOSE}}}),
    ):
        answer = server.request(path, BODY[path] | fields | {"temperature": 0})
        assert answer.status == 200, answer.body
        [text] = texts(path, answer.json())
        assert json.loads(text).keys() >= {"day", "sure"}


def test_a_rendered_prompt_keeps_the_form(server: Server) -> None:
    asked = BODY[CHAT] | {"response_format": {"type": "json_schema", "schema": LOOSE}}
    rendered = server.request(f"{CHAT}/render", asked).json()
    rendered = rendered[0] if isinstance(rendered, list) else rendered
    answer = server.request("/inference/v1/generate", rendered | {"output_mode": "text"})
    assert answer.status == 200, answer.body


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as one:
        yield one


def test_forced_calls_of_loose_schemas(client: openai.OpenAI, server: Server) -> None:
    function: dict[str, Any] = {"name": "plan", "parameters": SMALL_LOOSE}
    other: Any = {"type": "function", "function": {"name": "odd", "parameters": {"type": "array"}}}
    asked: Any = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 400}
    asked["tools"] = [{"type": "function", "function": function}, other]
    asked["tool_choice"] = {"type": "function", "function": {"name": "plan"}}
    [call] = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments).keys() >= {"day"}
    function["strict"] = True
    with pytest.raises(openai.BadRequestError, match=r"'plan'.*#/propertyNames") as strict:
        client.chat.completions.create(**asked)
    assert strict.value.param == "tools"
    tool = {"name": "plan", "input_schema": SMALL_LOOSE}
    body = BODY[MESSAGES] | {"tools": [tool], "tool_choice": {"type": "tool", "name": "plan"}}
    [block] = server.request(MESSAGES, body).json()["content"]
    assert block["input"].keys() >= {"day"}
    flat: Any = {"type": "function", "name": "plan", "parameters": SMALL_LOOSE}
    asked = {"model": MODEL, "input": "a", "tools": [flat], "tool_choice": "required"}
    [item, *_] = client.responses.create(**asked, parallel_tool_calls=False).output
    assert item.type == "function_call"
    assert json.loads(item.arguments).keys() >= {"day"}
    for path, tools in (
        (MESSAGES, [tool | {"strict": True}]),
        (RESPONSES, [flat | {"strict": True}]),
    ):
        choice = {"type": "any"} if path == MESSAGES else "required"
        answer = server.request(path, BODY[path] | {"tools": tools, "tool_choice": choice})
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "'plan'" in answer.error["message"] and "#/propertyNames" in answer.error["message"]
