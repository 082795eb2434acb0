"""Requests of Claude Code, Codex and Open WebUI, as scripts.serving.record_clients wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from scripts.serving.record_clients import shape_of
from tests.clients.conftest import KEY, MODEL

RECORDED = Path(__file__).parent / "recorded"
# How the official packages read a stream, and its first and last events.
READERS: dict[str, tuple[Any, list[str]]] = {
    "/v1/messages": (RawMessageStreamEvent, ["message_start", "message_stop"]),
    "/v1/responses": (ResponseStreamEvent, ["response.created", "response.completed"]),
    "/v1/chat/completions": (ChatCompletionChunk, []),
}


def requests() -> Iterator[Any]:
    """Give each recorded request, with its client's name."""
    for path in sorted(RECORDED.glob("*.json")):
        for number, request in enumerate(json.loads(path.read_text())["requests"]):
            yield pytest.param(request, id=f"{path.stem}-{number}")


@pytest.mark.parametrize("asked", [*requests()])
def test_recorded_requests_are_answered(url: str, asked: dict[str, Any]) -> None:
    body = asked["body"]
    if body is not None:
        body |= {"model": MODEL}
        # The model here has room for little.
        body |= {name: 16 for name in body if name.startswith("max_")}
        body |= {"max_output_tokens": 400} if "input" in body else {"max_tokens": 16}
    headers = {"authorization": f"Bearer {KEY}"} | asked["headers"]
    answer = httpx2.request(
        asked["method"], url + asked["path"], json=body, headers=headers, timeout=120
    )
    assert answer.status_code == 200, answer.text
    if body is None or not body["stream"]:
        return
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    event, ends = READERS[asked["path"].partition("?")[0]]
    read = TypeAdapter(event).validate_json
    events = [read(line.removeprefix("data: ")) for line in lines if "[DONE]" not in line]
    assert len(events) >= 2
    if ends:
        assert [events[0].type, events[-1].type] == ends


def test_records_hold_no_text_of_others() -> None:
    schema = {"type": "object", "properties": {"description": {"type": "string"}}}
    told = {"properties": {"description": {"type": "string", "description": "What it is."}}}
    tools = [
        {"name": name, "description": "Runs it.", "input_schema": schema | told} for name in "ab"
    ]
    asked = {"type": "text", "text": "You are an agent.", "tools": tools}
    tool = {"name": "a", "description": "x", "input_schema": schema}
    assert shape_of(asked) == {"type": "text", "text": "x", "tools": [tool]}
