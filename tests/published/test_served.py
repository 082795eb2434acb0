"""Published vocabularies and templates over HTTP: tools, thoughts, schemas, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.test_tools import NAMED, OTHER, SCHEMA, TOOL, USER, fits
from tests.support.live_server import SMALL, Server

# The grammar allows no other text: a random model would write on for ever.
CLOSED = SCHEMA | {"additionalProperties": False}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "plan", "schema": CLOSED}}
STRICT: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}
# The token that opens a call or a thought, by model: one token of its vocabulary, or None for text.
CALLS = {"qwen3": 151657, "llama3_1": None}
OPENING_THOUGHT, CLOSING_THOUGHT = 151667, 151668
ROOM = ["--max-model-len", "2048", "--num-gpu-blocks-override", "400"]
# Requests come one by one, and each row of a vocabulary of this size takes its time.
ROOM += ["--max-num-seqs", "1", "--decode-sizes", "1"]


@pytest.fixture(scope="module")
def client(published: Callable[[str], Path]) -> Iterator[openai.OpenAI]:
    """Start one server of both models, whose formats follow from their templates."""
    models = [f"{name}={published(name)}" for name in CALLS]
    with (
        Server([*models, *SMALL, *ROOM]) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(params=CALLS)
def package(request: pytest.FixtureRequest) -> str:
    return request.param


def ask(client: openai.OpenAI, model: str, **fields: Any) -> Any:
    """Ask for one answer, and pass fields that the client does not know in the extra body.

    A random model would think to the end, so it does not think unless a test says so.
    """
    fields = {"chat_template_kwargs": {"enable_thinking": False}} | fields
    own = ("thinking_token_budget", "return_token_ids", "chat_template_kwargs")
    beside = {name: fields.pop(name) for name in own if name in fields}
    fields = {"messages": USER, "max_tokens": 1000, "temperature": 1.0, "seed": 3} | fields
    return client.chat.completions.create(
        model=model, extra_body={"return_token_ids": True} | beside, **fields
    )


def joined(chunks: Any) -> dict[str, Any]:
    """Join the deltas of a stream."""
    whole: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            whole["content"] += choice.delta.content or ""
            whole["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            whole["finish_reason"] = choice.finish_reason or whole["finish_reason"]
            for call in choice.delta.tool_calls or []:
                if call.id:
                    whole["calls"].append([call.function.name, ""])
                whole["calls"][call.index][1] += call.function.arguments or ""
    return whole


def told(choice: Any) -> dict[str, Any]:
    """Put a whole answer into the form of `joined`."""
    message = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning", None) or "",
        "calls": calls,
        "finish_reason": choice.finish_reason,
    }


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_forced_calls(client: openai.OpenAI, package: str, choice: Any) -> None:
    tools = [{**TOOL, "function": {**TOOL["function"], "parameters": CLOSED}}, OTHER]
    asked = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    [found] = ask(client, package, **asked).choices
    [call] = found.message.tool_calls
    assert call.function.name in ("plan", "stop") and not found.message.content
    if call.function.name == "plan":
        fits(call.function.arguments)
    if CALLS[package] is not None:
        assert found.token_ids[0] == CALLS[package]
    assert joined(ask(client, package, stream=True, **asked)) == told(found)


def test_strict_calls_that_the_model_begins(client: openai.OpenAI) -> None:
    # A random model opens a call only with a bias towards the token.
    asked = {"tools": [STRICT], "logit_bias": {str(CALLS["qwen3"]): 100}, "temperature": 0}
    [found] = ask(client, "qwen3", parallel_tool_calls=False, **asked).choices
    assert found.token_ids[0] == CALLS["qwen3"]
    [call] = found.message.tool_calls
    fits(call.function.arguments)


def test_forced_calls_come_after_thoughts(client: openai.OpenAI) -> None:
    asked = {"tools": [TOOL, OTHER], "tool_choice": NAMED, "thinking_token_budget": 4}
    [found] = ask(client, "qwen3", chat_template_kwargs={}, **asked).choices
    assert found.message.reasoning and not found.message.content
    assert found.token_ids.index(CALLS["qwen3"]) > found.token_ids.index(CLOSING_THOUGHT)
    fits(found.message.tool_calls[0].function.arguments)


def test_thoughts_end_with_their_budget(client: openai.OpenAI) -> None:
    asked = {"thinking_token_budget": 9, "max_tokens": 60, "chat_template_kwargs": {}}
    asked["logit_bias"] = {str(OPENING_THOUGHT): 60, str(CLOSING_THOUGHT): -100}
    [found] = ask(client, "qwen3", **asked).choices
    assert found.token_ids[0] == OPENING_THOUGHT
    assert found.token_ids.index(CLOSING_THOUGHT) == 10
    assert found.message.reasoning and found.message.content
    assert joined(ask(client, "qwen3", stream=True, **asked)) == told(found)


def test_schemas(client: openai.OpenAI, package: str) -> None:
    [found] = ask(client, package, response_format=FORM).choices
    assert found.finish_reason == "stop"
    fits(found.message.content)
    assert joined(ask(client, package, response_format=FORM, stream=True)) == told(found)


def test_schemas_after_thoughts(client: openai.OpenAI) -> None:
    asked = {"thinking_token_budget": 5, "response_format": FORM, "chat_template_kwargs": {}}
    asked["logit_bias"] = {str(OPENING_THOUGHT): 60}
    [found] = ask(client, "qwen3", **asked).choices
    assert found.token_ids.index(CLOSING_THOUGHT) <= 6 and found.message.reasoning
    fits(found.message.content)


def test_free_answers_are_the_same_streamed_and_whole(client: openai.OpenAI, package: str) -> None:
    asked = {"max_tokens": 40}
    [found] = ask(client, package, **asked).choices
    assert joined(ask(client, package, stream=True, **asked)) == told(found)
