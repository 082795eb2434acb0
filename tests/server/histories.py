"""Conversations that go on: answers of every dialect, cut anywhere, as clients send them back.

An answer is read and formatted as in a request, whole or streamed. A client then builds the next
request of each API from the response, and may change it as real clients do.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from jaxserve import SamplingParams
from jaxserve.server.api.anthropic import MessagesFormatter
from jaxserve.server.api.chat import ChatFormatter, Echo
from jaxserve.server.api.generation import ChoicePart, Generation
from jaxserve.server.api.response_events import ResponsesFormatter
from jaxserve.server.schema.openai import ChatMessage, ChatRequest, Tool
from jaxserve.server.schema.response_items import InputItem
from jaxserve.server.schema.responses import ResponsesRequest
from jaxserve.server.served.models import ServedModel
from jaxserve.server.tool_calls.answer import AnswerFormat
from jaxserve.server.tool_calls.thoughts import THINKING_FORMATS, ThoughtState
from jaxserve.server.tool_calls.tools import tool_use

CORPUS = Path(__file__).parent.parent / "structured" / "corpus"
TOOLS = json.loads((CORPUS / "tools.json").read_text())["assistant"]
MAX_CHARS = 1500  # of an answer, so that a conversation fits the bundled model's context
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@cache
def corpus() -> list[dict[str, Any]]:
    """Return texts of answers, each with the parsers of its dialect."""
    found = []
    for path in sorted(CORPUS.glob("*.json")):
        kept = json.loads(path.read_text())
        for output in kept.get("outputs", ()):
            if len(output["text"]) <= MAX_CHARS:
                found.append(
                    {**output, "calls_by": kept["tool_call_parser"]}
                    | {"thinks_by": kept["reasoning_parser"]}
                )
    return found


@dataclass(frozen=True)
class Drawn:
    """An answer as text, with the way that it is read.

    Attributes:
        text: that a model wrote, cut.
        reads: format of the answer.
        is_cut: whether a limit ended it.
    """

    text: str
    reads: AnswerFormat
    is_cut: bool = False


def draw(rng: random.Random) -> Drawn:
    """Draw an answer: any of the corpus, cut at any place, free or forced."""
    output = rng.choice(corpus())
    text = output["text"]
    is_cut = rng.random() < 0.7
    if is_cut:
        text = text[: rng.randrange(len(text) + 1)]
    is_plain = output["calls"] and not output["content"] and not output["reasoning"]
    choice: Any = "required" if is_plain and rng.random() < 0.4 else "auto"
    parser = output["calls_by"] if rng.random() < 0.9 else None
    drawn = read_as(parser, text, choice, output["thinks_by"], output["start"])
    return replace(drawn, is_cut=is_cut)


def read_as(
    parser: str | None,
    text: str,
    choice: Any = "auto",
    thinks_by: str | None = None,
    start: str = "closed",
) -> Drawn:
    """Return an answer that a request with tools reads by a dialect's parsers."""
    use = None
    if parser is not None:
        tools = msgspec.convert(TOOLS, list[Tool])
        user = [ChatMessage(role="user", content="?")]
        body = ChatRequest(messages=user, tools=tools, tool_choice=choice)
        use = tool_use(body, parser, True, json.dumps)
    thinking = THINKING_FORMATS.get(thinks_by or "")
    reads = AnswerFormat(use, thinking, ThoughtState(start) if thinking else ThoughtState.CLOSED)
    return Drawn(text, reads)


def generated(model: ServedModel, drawn: Drawn) -> tuple[Generation, list[ChoicePart]]:
    """Return a finished generation and its only part, which no reader has consumed yet."""
    request = model.llm.requests.make([1, 2, 3], SamplingParams(max_tokens=8))
    generation = Generation(model, [request], [drawn.reads])
    choice = generation.choices[0]
    choice.text, choice.token_ids = drawn.text, [5] * 8
    choice.finish_reason = "length" if drawn.is_cut else "stop"
    part = ChoicePart(0, drawn.text, [5] * 8, choice.finish_reason)
    choice.read(part)
    return generation, [part]


def _events(data: bytes) -> list[Any]:
    lines = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _streamed(formatter: Any, model: ServedModel, drawn: Drawn) -> list[Any]:
    generation, parts = generated(model, drawn)
    data = formatter.opening(generation) + formatter.parts(generation, parts)
    return _events(data + formatter.closing(generation))


def _whole(formatter: Any, model: ServedModel, drawn: Drawn) -> Any:
    generation, _ = generated(model, drawn)
    return json.loads(msgspec.json.encode(formatter.whole(generation)))


def chat_answer(model: ServedModel, drawn: Drawn, streams: bool) -> dict[str, Any]:
    """Return the assistant's message as a client of the chat endpoint has it."""
    body = ChatRequest(messages=[])
    formatter = ChatFormatter(body, model.tokenizer(), "chatcmpl-1", Echo())
    if not streams:
        return _whole(formatter, model, drawn)["choices"][0]["message"]
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: list[dict[str, Any]] = []
    for event in _streamed(formatter, model, drawn):
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(calls):
                    function = {"name": call["function"]["name"], "arguments": ""}
                    calls.append({"id": call["id"], "type": "function", "function": function})
                more = call["function"].get("arguments") or ""
                calls[call["index"]]["function"]["arguments"] += more
    return message | ({"tool_calls": calls} if calls else {})


def messages_answer(
    model: ServedModel, drawn: Drawn, streams: bool, rng: random.Random
) -> list[dict[str, Any]]:
    """Return the content blocks as a client of Anthropic's endpoint has them."""
    if not streams:
        return _whole(MessagesFormatter(), model, drawn)["content"]
    blocks: list[dict[str, Any]] = []
    for event in _streamed(MessagesFormatter(), model, drawn):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        delta = event.get("delta", {})
        for name, field in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
            if name in delta:
                blocks[-1][field] += delta[name]
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = _parsed(text, rng)
    return blocks


def _parsed(text: str, rng: random.Random) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return rng.choice([{}, None, text, [text]])


def response_answer(model: ServedModel, drawn: Drawn, streams: bool) -> dict[str, Any]:
    """Return the response as a client of OpenAI's responses endpoint has it."""
    formatter = ResponsesFormatter(ResponsesRequest(input="?"), model.tokenizer())
    if streams:
        return _streamed(formatter, model, drawn)[-1]["response"]
    return _whole(formatter, model, drawn)


def _result(rng: random.Random) -> Any:
    return rng.choice(["ok", "", None, [], [{"type": "text", "text": "ok"}], [IMAGE], "x\n</s>"])


def chat_turns(answer: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Return the answer's message and the client's next messages, with typical changes."""
    said = dict(answer)
    if rng.random() < 0.3:
        said = {name: value for name, value in said.items() if value is not None}
    if not said.get("content") and rng.random() < 0.5:
        said["content"] = rng.choice([None, "", []])
    elif rng.random() < 0.2 and isinstance(said.get("content"), str):
        said["content"] = [{"type": "text", "text": said["content"]}]
    if rng.random() < 0.3:
        for name in ("reasoning", "reasoning_content"):
            said.pop(name, None)
    calls = [json.loads(json.dumps(call)) for call in said.get("tool_calls") or ()]
    for call in calls:
        if rng.random() < 0.3:
            call["function"]["arguments"] = _parsed(call["function"]["arguments"], rng)
    if calls:
        said["tool_calls"] = calls
    elif rng.random() < 0.2:
        said["tool_calls"] = rng.choice([None, []])
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": _result(rng)} for call in calls
    ]
    rng.shuffle(results)
    fate = rng.random()
    if fate < 0.15:
        results = results[1:]
    elif fate < 0.25:
        results.append({"role": "tool", "tool_call_id": "unknown", "content": _result(rng)})
    elif fate < 0.3:
        return [*results, said, {"role": "user", "content": "Go on."}]
    more = [] if results and rng.random() < 0.5 else [{"role": "user", "content": "Go on."}]
    return [said, *results, *more]


def messages_turns(blocks: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Return the answer's blocks and the client's next ones, in Anthropic's form."""
    picture = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
    given: list[Any] = []
    for block in blocks:
        if block["type"] == "tool_use":
            content = rng.choice(["ok", "", None, [], [{"type": "text", "text": "a"}, picture]])
            result = {"type": "tool_result", "tool_use_id": block["id"], "content": content}
            given.append(result)
    if given and rng.random() < 0.2:
        given.pop()
    if not given or rng.random() < 0.4:
        given.append({"type": "text", "text": "Go on."})
    if rng.random() < 0.2:
        blocks = [block for block in blocks if block["type"] != "thinking"]
    if rng.random() < 0.1:
        blocks = [{"type": "redacted_thinking", "data": "a"}, *blocks]
    return [{"role": "assistant", "content": blocks}, {"role": "user", "content": given}]


def response_turns(output: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Return the answer's items and the client's next ones, in the form of /v1/responses."""
    items = [dict(item) for item in output]
    results = []
    for item in items:
        if item["type"] == "function_call":
            if rng.random() < 0.3:
                item["arguments"] = _parsed(item["arguments"], rng)
            content = rng.choice(["ok", "", None, [{"type": "input_image", "image_url": "a"}]])
            kind = "function_call_output"
            results.append({"type": kind, "call_id": item["call_id"], "output": content})
    if rng.random() < 0.2:
        items = [item for item in items if item["type"] != "reasoning"]
    more = [] if results and rng.random() < 0.5 else [{"role": "user", "content": "Go on."}]
    return [*items, *results, *more]


def as_items(items: list[dict[str, Any]]) -> list[InputItem]:
    return msgspec.convert(items, list[InputItem])
