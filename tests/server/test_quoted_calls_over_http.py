"""Calls that quote calls, over HTTP: a form dictates the text that the model gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.call_writer import write
from tests.server.conftest import SMALL
from tests.server.test_tools import CHAT, MESSAGES, NAMED, RESPONSES, SCHEMA, TOOL, USER
from tests.support.live_server import Server

TEXT = {"type": "string"}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
    for name, properties in (("w", {"path": TEXT, "content": TEXT}), ("rm", {"path": TEXT}))
]
PARSER = "qwen3_coder"
QUOTED = write(PARSER, [("rm", {"path": "/"})])
VALUES = [
    {"path": "x.md", "content": f"An example: {QUOTED} End."},
    {"content": f"{QUOTED}{QUOTED} End.", "path": "x.md"},
    {"path": "x.md", "content": "a </parameter> b"},
]
# An end of the call is quoted, and a call behind it: no call can be told from this.
DOUBTFUL = f"x\n</parameter>\n</function>\n</tool_call>\n{QUOTED} End."


@pytest.fixture(scope="module")
def calling() -> Iterator[Server]:
    with Server([*SMALL, "--tool-call-parser", PARSER, "--enable-auto-tool-choice"]) as server:
        yield server


def answers(server: Server, text: str) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return content and calls of an answer with this text, whole and streamed."""
    asked = {"messages": USER, "tools": TOOLS, "tool_choice": "auto", "max_tokens": 900}
    asked |= {"structured_outputs": {"choice": [text]}, "temperature": 0}
    whole = server.request(CHAT, asked)
    assert whole.status == 200, whole.body
    choice = whole.json()["choices"][0]
    message, content, calls = choice["message"], "", list[tuple[str, str]]()
    given = message.get("tool_calls") or []
    assert choice["finish_reason"] == ("tool_calls" if given else "stop")
    events = [e for e in server.request(CHAT, asked | {"stream": True}).events() if e != "[DONE]"]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    for event in events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            if call.get("id"):
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call["index"]]
            calls[call["index"]] = (name, arguments + (call["function"].get("arguments") or ""))
    return [
        (
            message["content"] or "",
            [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in given],
        ),
        (content, [(name, json.loads(arguments)) for name, arguments in calls]),
    ]


@pytest.mark.parametrize("values", VALUES)
def test_a_quotation_is_a_value_whole_and_streamed(calling: Server, values: Any) -> None:
    assert answers(calling, write(PARSER, [("w", values)])) == [("", [("w", values)])] * 2


def test_what_may_be_a_quotation_is_content_whole_and_streamed(calling: Server) -> None:
    texts = [
        write(PARSER, [("w", {"path": "x.md", "content": DOUBTFUL})]),
        write(PARSER, [("unknown", VALUES[0])]),
        write(PARSER, [("w", VALUES[2])]).replace("=content", "=path"),
        write(PARSER, [("w", VALUES[2])]) + "\nDone. </tool_call>",
    ]
    for text in texts:
        assert answers(calling, text) == [(text, [])] * 2


@pytest.mark.parametrize("limit", [1, 3, 6, 9])
def test_a_forced_call_that_a_limit_cuts_is_never_content(server: Server, limit: int) -> None:
    asked = {"messages": USER, "tools": [TOOL], "tool_choice": NAMED, "temperature": 0}
    whole = server.request(CHAT, asked | {"max_tokens": limit}).json()["choices"][0]
    assert not whole["message"]["content"] and whole["finish_reason"] == "length"
    for event in server.request(CHAT, asked | {"max_tokens": limit, "stream": True}).events():
        assert event == "[DONE]" or not event["choices"][0]["delta"].get("content")
    tool = {"type": "function", "name": "plan", "parameters": SCHEMA}
    body = {"input": "x", "tools": [tool], "tool_choice": "required", "max_output_tokens": limit}
    output = server.request(RESPONSES, body).json()["output"]
    parts = [part for item in output for part in item.get("content") or []]
    assert not any(part["text"] for part in parts), output
    events = server.request(RESPONSES, body | {"stream": True}).events()
    assert not [event for event in events if event["type"] == "response.output_text.delta"]
    body = {"messages": USER, "max_tokens": limit, "tool_choice": {"type": "any"}}
    body["tools"] = [{"name": "plan", "input_schema": SCHEMA}]
    blocks = server.request(MESSAGES, body).json()["content"]
    assert not any(block.get("text") for block in blocks), blocks
    events = server.request(MESSAGES, body | {"stream": True}).events()
    assert not any(event.get("delta", {}).get("text") for event in events)
