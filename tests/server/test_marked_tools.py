"""Calls of models whose marks of calls are tokens of their own, as Qwen's and Hermes' are."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.server.conftest import Many
from tests.server.models import CALL_MARKS
from tests.server.test_tools import CHAT, NAMED, OTHER, SCHEMA, TOOL, USER, fits, streamed
from tests.support.live_server import Server

MODEL = "marked"


@pytest.fixture
def marked(many: Many) -> Server:
    return many.server


def ask(**fields: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": USER, "tools": [TOOL, OTHER], "max_tokens": 400}
    return asked | {"temperature": 1.0, "seed": 5, "return_token_ids": True} | fields


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_forced_calls_come_in_the_models_own_tokens(marked: Server, choice: Any, seed: int) -> None:
    asked = ask(tool_choice=choice, seed=seed, parallel_tool_calls=seed > 1)
    answer = marked.request(CHAT, asked)
    assert answer.status == 200, answer.body
    [found] = answer.json()["choices"]
    assert found["message"]["content"] is None and found["message"]["tool_calls"]
    calls = found["message"]["tool_calls"]
    for call in calls if found["finish_reason"] != "length" else calls[:-1]:
        if call["function"]["name"] == "plan":
            fits(call["function"]["arguments"])
    tokens = found["token_ids"]
    start, end = 260, 261
    assert tokens[0] == start and tokens.count(start) == len(calls)
    assert tokens.count(end) == len(calls) - (found["finish_reason"] == "length")
    said = streamed(marked, asked)
    assert said["arguments"] == "".join(call["function"]["arguments"] for call in calls)
    assert not said["content"]


def test_a_strict_call_may_be_begun_by_the_model(marked: Server) -> None:
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    # A random model produces the call only because of the mark.
    asked = ask(tools=[strict], logit_bias={"260": 100.0}, parallel_tool_calls=False)
    for fields in ({}, {"temperature": 0}):
        [found] = marked.request(CHAT, asked | fields).json()["choices"]
        assert found["token_ids"][0] == 260
        [call] = found["message"]["tool_calls"]
        fits(call["function"]["arguments"])
        said = streamed(marked, asked | fields)
        assert said["arguments"] == call["function"]["arguments"]


def test_forced_calls_of_the_other_endpoints(marked: Server) -> None:
    with openai.OpenAI(base_url=f"{marked.url}/v1", api_key="any", max_retries=0) as client:
        tool: Any = {"type": "function", "name": "plan", "parameters": SCHEMA, "strict": False}
        asked: Any = {"model": MODEL, "input": "x", "tools": [tool], "temperature": 0}
        asked["tool_choice"] = {"type": "function", "name": "plan"}
        [item] = client.responses.create(**asked).output
        assert item.type == "function_call"
        fits(item.arguments)
        with client.responses.stream(**asked) as stream:
            list(stream)
            [again] = stream.get_final_response().output
        assert again.type == "function_call" and again.arguments == item.arguments
    with anthropic.Anthropic(base_url=marked.url, api_key="any", max_retries=0) as client:
        asked = {"model": MODEL, "messages": USER, "max_tokens": 400}
        asked["extra_body"] = {"temperature": 0}
        asked["tools"] = [{"name": "plan", "input_schema": SCHEMA}]
        asked["tool_choice"] = {"type": "any"}
        block = client.messages.create(**asked).content[0]
        assert block.type == "tool_use"
        jsonschema.validate(block.input, SCHEMA)


def test_forms_may_hold_the_texts_of_tokens(marked: Server) -> None:
    texts = [*CALL_MARKS, "<|end|>", "<|bot|> a</tool_call>"]
    for text in texts:
        for form in ({"choice": [text]}, {"json": {"const": text}}):
            body = {"model": MODEL, "messages": USER, "structured_outputs": form, "max_tokens": 60}
            answer = marked.request(CHAT, body)
            assert answer.status == 200, answer.body
            said = answer.json()["choices"][0]["message"]["content"]
            assert (json.loads(said) if "json" in form else said) == text


@pytest.mark.parametrize("name", ["stop", "plan"])
def test_a_model_that_chooses_calls_allowed_tools_alone(marked: Server, name: str) -> None:
    """The answer is dictated. A call of a tool that is not allowed is content."""
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    reference: Any = {"type": "function", "function": {"name": "stop"}}
    choice: Any = {"mode": "auto", "tools": [reference]}
    asked = ask(structured_outputs={"choice": [text]})
    asked["tool_choice"] = {"type": "allowed_tools", "allowed_tools": choice}
    message = marked.request(CHAT, asked).json()["choices"][0]["message"]
    assert len(message.get("tool_calls") or []) == (name == "stop")
    assert message["content"] == (None if name == "stop" else text)
    said = streamed(marked, asked)
    assert said["content"] == (message["content"] or "")
    flat: Any = {"type": "function", "parameters": {}}
    tools: Any = [flat | {"name": "plan"}, flat | {"name": "stop"}]
    body = {"model": MODEL, "input": "x", "tools": tools, "max_output_tokens": 200}
    body["tool_choice"] = choice | {"type": "allowed_tools", "tools": [flat | {"name": "stop"}]}
    body["structured_outputs"] = {"choice": [text]}
    [item] = marked.request("/v1/responses", body).json()["output"]
    assert item["type"] == ("function_call" if name == "stop" else "message")
