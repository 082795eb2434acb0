"""gpt-oss's channels over HTTP: forced calls, schemas and budgets, with random weights."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.server.conftest import Many
from tests.server.models import CALL, CHANNEL, END, MESSAGE, RETURN, START
from tests.server.test_tools import CHAT, OTHER, SCHEMA, TOOL, USER, fits, streamed
from tests.support.live_server import Server

MODEL = "channels"


@pytest.fixture
def channels(many: Many) -> Server:
    return many.server


def ask(server: Server, **fields: Any) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Return the choice, the same choice streamed, and the usage."""
    asked = {"model": MODEL, "messages": USER, "max_tokens": 500, "return_token_ids": True}
    asked |= {"temperature": 1.0, "seed": 5} | fields
    answer = server.request(CHAT, asked)
    assert answer.status == 200, answer.body
    [found] = answer.json()["choices"]
    return found, streamed(server, asked), answer.json()["usage"]


@pytest.mark.parametrize("seed", [1, 2])
def test_forced_calls_are_messages_of_their_channel(channels: Server, seed: int) -> None:
    # Random thoughts would never end.
    bias = {str(END): 100.0}
    found, said, _ = ask(
        channels, tools=[TOOL, OTHER], tool_choice="required", seed=seed, logit_bias=bias
    )
    assert found["message"].get("tool_calls"), found
    [call] = found["message"]["tool_calls"]
    assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
    if call["function"]["name"] == "plan":
        fits(call["function"]["arguments"])
    assert found["token_ids"][0] == CHANNEL and said["arguments"] == call["function"]["arguments"]


def test_a_schema_holds_in_the_channel_of_answers(channels: Server) -> None:
    closed = SCHEMA | {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "plan", "schema": closed}}
    found, said, usage = ask(channels, response_format=form, thinking_token_budget=0)
    jsonschema.validate(json.loads(found["message"]["content"]), closed)
    assert said["content"] == found["message"]["content"] and found["finish_reason"] == "stop"
    tokens = found["token_ids"]
    assert tokens[:2] == [END, START] and tokens.index(CHANNEL) < tokens.index(MESSAGE)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=len)
def test_raw_text_of_custom_tools_has_its_channel(channels: Server, tools: list[Any]) -> None:
    grammar = {"syntax": "lark", "definition": 'start: "*** " /[a-c"{}\\n]{4}/ " End"'}
    tool = {"name": "patch", "format": {"type": "grammar", "grammar": grammar}}
    named = {"type": "custom", "custom": {"name": "patch"}}
    found, said, _ = ask(
        channels,
        tools=[*tools, {"type": "custom", "custom": tool}],
        tool_choice=named if tools else "required",
        thinking_token_budget=0,
    )
    [call] = found["message"]["tool_calls"]
    assert found["message"]["content"] is None and not said["content"]
    assert call["custom"]["name"] == "patch"
    assert said["arguments"] == call["custom"]["input"]
    assert re.fullmatch(r'\*\*\* [a-c"{}\n]{4} End', call["custom"]["input"])
    body = {"model": MODEL, "input": "x", "max_output_tokens": 200, "thinking_token_budget": 0}
    form = {"type": "grammar", **grammar}
    body |= {"tools": [{"type": "custom", "name": "patch", "format": form}]}
    answer = channels.request("/v1/responses", body | {"tool_choice": "required"}).json()
    item = answer["output"][-1]
    assert item["type"] == "custom_tool_call" and item["input"].startswith("*** ")


@pytest.mark.parametrize("stop", [CALL, RETURN])
def test_a_call_and_a_return_end_an_answer(channels: Server, stop: int) -> None:
    found, said, _ = ask(channels, logit_bias={str(stop): 100.0})
    assert found["finish_reason"] == "stop" and len(found["token_ids"]) == 1
    assert not found["message"]["content"] and not said["content"]
