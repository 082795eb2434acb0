"""Tools and thoughts over HTTP: a grammar forces them, since the bundled model calls no tool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.openai import ChatMessage, ChatRequest, FunctionDefinition, Tool
from jaxserve.server.tool_calls.tools import check_tools, tool_use
from tests.support.live_server import Server

MODEL = "demo_model"
USER: Any = [{"role": "user", "content": "Reverse: s-t-o-n-e"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"day": {"enum": ["mon", "tue"]}, "sure": {"type": "boolean"}},
    "required": ["day", "sure"],
}
TOOL: Any = {"type": "function", "function": {"name": "plan", "parameters": SCHEMA}}
OTHER: Any = {"type": "function", "function": {"name": "stop"}}
NAMED: Any = {"type": "function", "function": {"name": "plan"}}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as one:
        yield one


def fits(arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMA)


@pytest.mark.parametrize("choice", [NAMED, "required"])
@pytest.mark.parametrize("seed", [1, 2])
def test_forced_calls_are_the_same_streamed_and_whole(
    client: openai.OpenAI, choice: Any, seed: int
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": [TOOL, OTHER]}
    asked |= {"tool_choice": choice, "seed": seed, "temperature": 1.0, "max_tokens": 300}
    asked["parallel_tool_calls"] = choice == "required"
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.tool_calls and whole.message.content is None
    for call in whole.message.tool_calls:
        assert call.type == "function" and call.id.startswith("call_")
        if call.function.name == "plan" and whole.finish_reason != "length":
            fits(call.function.arguments)
    assert whole.finish_reason in ("stop" if choice is NAMED else "tool_calls", "length")
    calls: list[list[str]] = []
    deltas = 0
    chunks = list(client.chat.completions.create(**asked, stream=True))
    for chunk in chunks:
        assert not chunk.choices[0].delta.content
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.function
            if delta.id:
                calls.append([delta.function.name or "", ""])
            calls[delta.index][1] += delta.function.arguments or ""
            deltas += 1
    expected = [[one.function.name, one.function.arguments] for one in whole.message.tool_calls]
    assert calls == expected and deltas > len(calls)
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


class Plan(BaseModel):
    """When to do it."""

    day: str
    sure: bool


def test_the_clients_helpers(client: openai.OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(Plan)]
    asked: Any = {"model": MODEL, "messages": USER, "tools": tools, "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 300}
    tools[0]["function"]["parameters"]["properties"]["day"]["maxLength"] = 8
    parsed = client.chat.completions.parse(**asked).choices[0].message.tool_calls
    assert parsed and isinstance(parsed[0].function.parsed_arguments, Plan)
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert final.tool_calls
    assert final.tool_calls[0].function.parsed_arguments == parsed[0].function.parsed_arguments


class Answer(BaseModel):
    yes: bool


def test_answers_of_a_pydantic_form(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": USER, "response_format": Answer}
    whole = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(whole, Answer)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole
    said = client.responses.parse(model=MODEL, input="Yes?", text_format=Answer)
    assert isinstance(said.output_parsed, Answer)


def test_responses(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "plan", "parameters": SCHEMA, "strict": False}
    asked: Any = {"model": MODEL, "input": "Reverse: a-b", "tools": [tool], "temperature": 0}
    asked["tool_choice"] = {"type": "function", "name": "plan"}
    [item] = client.responses.create(**asked).output
    assert item.type == "function_call" and item.status == "completed"
    fits(item.arguments)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        [again] = stream.get_final_response().output
    assert again.type == "function_call" and again.arguments == item.arguments
    said = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
    assert "".join(said) == item.arguments and len(said) > 1
    assert [one.sequence_number for one in events] == list(range(len(events)))
    turn: Any = [
        {"role": "user", "content": "Reverse: a-b"},
        {"type": "function_call", "call_id": "c1", "name": "plan", "arguments": item.arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]
    answer = client.responses.create(model=MODEL, input=turn, max_output_tokens=4)
    assert answer.output[0].type == "message"


def test_messages(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        asked: Any = {"model": MODEL, "messages": USER, "max_tokens": 200}
        asked["extra_body"] = {"temperature": 0}
        asked["tools"] = [{"name": "plan", "description": "A plan", "input_schema": SCHEMA}]
        asked["tool_choice"] = {"type": "tool", "name": "plan"}
        whole = client.messages.create(**asked)
        [block] = whole.content
        assert block.type == "tool_use" and whole.stop_reason == "tool_use"
        jsonschema.validate(block.input, SCHEMA)
        with client.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert final.content[0].type == "tool_use" and final.content[0].input == block.input
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
        assert "input_json" in kinds and final.stop_reason == "tool_use"
        results: Any = [{"type": "tool_result", "tool_use_id": block.id, "content": "fine"}]
        more: Any = [
            *USER,
            {"role": "assistant", "content": [block.model_dump()]},
            {"role": "user", "content": [*results, {"type": "text", "text": "and?"}]},
        ]
        assert client.messages.create(**asked | {"messages": more}).stop_reason == "tool_use"
        counted = client.messages.count_tokens(model=MODEL, messages=more, tools=asked["tools"])
        assert counted.input_tokens > 20


def function(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return {"type": "object", "properties": {"a": schema}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [function("")]}, "tools"),
    ({"tools": [function("a b")]}, "tools"),
    ({"tools": [function("<|im_end|>")]}, "tools"),
    ({"tools": [function("f\ue000")]}, "tools"),
    ({"tools": [function("x" * 129)]}, "tools"),
    ({"tools": [function(), function()]}, "tools"),
    ({"tools": [function(f"f{i}") for i in range(1025)]}, "tools"),
    ({"tools": [function(description="x" * 600_000)]}, "tools"),
    ({"tools": [function(parameters=nested(20))]}, "tools"),
    ({"tools": [function(parameters={"type": "array"})]}, "tools"),
    (
        {"tools": [function(parameters={"properties": {"a": {"type": "foo"}}}, strict=True)]},
        "tools",
    ),
    ({"tools": [function(parameters={"properties": {"a": {"enum": ["x" * 70_000]}}})]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": 7}, "tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": [OTHER], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"functions": [{"name": "f"}]}, "function_call"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda one: str(one)[:50])
def test_what_is_wrong_is_refused_by_its_name(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": USER, "max_tokens": 4, "tool_choice": "required", **fields}
    if "tools" not in fields:
        body = {"messages": USER, "max_tokens": 4, **fields}
    answer = server.request(CHAT, body)
    assert answer.status == 400, answer.body[:300]
    assert answer.error["param"] == param, answer.error


def many_tools(count: int, description: str = "") -> list[Tool]:
    names = (f"tool_{number}" for number in range(count))
    return [Tool(function=FunctionDefinition(name=n, description=description)) for n in names]


def test_a_request_may_bring_1024_tools_of_half_a_mebibyte() -> None:
    check_tools(many_tools(1024, "x" * 380))
    chat = ChatRequest(messages=[ChatMessage(role="user", content="a")], tools=many_tools(1024))
    use = tool_use(chat, "hermes", True, json.dumps)
    assert use is not None and len(use.calls.tools) == 1024
    with pytest.raises(InvalidRequest, match="tools takes at most 1024 tools, got 1025"):
        check_tools(many_tools(1025))
    with pytest.raises(InvalidRequest, match="tools takes at most 524288 bytes"):
        check_tools(many_tools(1024, "x" * 512))


def test_a_request_may_bring_128_stop_strings(server: Server) -> None:
    plain = server.request(CHAT, {"messages": USER, "max_tokens": 20, "temperature": 0}).json()
    text = plain["choices"][0]["message"]["content"]
    stops = [*(f"never {number}" for number in range(127)), text[3:5]]
    for path, field in ((CHAT, "stop"), (MESSAGES, "stop_sequences")):
        body = {"messages": USER, "max_tokens": 20, "temperature": 0, field: stops}
        answer = server.request(path, body).json()
        if path == CHAT:
            assert answer["choices"][0]["stop_reason"] == text[3:5]
            assert answer["choices"][0]["message"]["content"] == text[: text.index(text[3:5])]
        else:
            assert answer["stop_sequence"] == text[3:5]


def test_wrong_tools_and_items_are_refused(server: Server) -> None:
    for path, fields, param in (
        (MESSAGES, {"tool_choice": {"type": "tool"}, "tools": []}, "tool_choice"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": -9}}, "thinking"),
        (MESSAGES, {"thinking": {"type": "enabled"}}, "thinking"),
        (RESPONSES, {"input": [{"type": "function_call"}]}, "input"),
        (RESPONSES, {"input": [{"type": "unheard_of_call"}]}, "input"),
    ):
        body = {"messages": USER, "max_tokens": 2} if path == MESSAGES else {"input": "a"}
        answer = server.request(path, body | fields)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_no_tools_are_shown_where_none_may_be_called(server: Server) -> None:
    body = {"messages": USER, "max_tokens": 20, "temperature": 0}
    plain = server.request(CHAT, body).json()
    none = server.request(CHAT, body | {"tools": [TOOL], "tool_choice": "none"}).json()
    assert plain["choices"] == none["choices"]
    assert plain["usage"]["prompt_tokens"] == none["usage"]["prompt_tokens"]


def test_a_template_that_knows_no_tools_is_given_them_in_words(server: Server) -> None:
    """The bundled model's template does not read `tools`."""
    told = {**TOOL, "function": {**TOOL["function"], "description": "Plans a day."}}
    for first in ([], [{"role": "system", "content": "Be brief."}]):
        body = {"messages": [*first, *USER], "max_tokens": 60, "temperature": 0}
        asked = body | {"tools": [told, OTHER], "tool_choice": NAMED}
        answer = server.request(CHAT, asked | {"return_token_ids": True}).json()
        ids = {"tokens": answer["prompt_token_ids"]}
        prompt = server.request("/detokenize", ids).json()["prompt"]
        assert "Plans a day." in prompt and '"enum": ["mon", "tue"]' in prompt
        assert '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>' in prompt
        assert prompt.index("Plans a day.") < prompt.index("Reverse: s-t-o-n-e")
        plain = server.request(CHAT, body).json()["usage"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens"] > plain + 50
        counted = {"messages": [*first, *USER], "tools": [told, OTHER]}
        assert server.request("/tokenize", counted).json()["tokens"] == ids["tokens"]


def test_a_call_that_a_limit_cuts_says_so(server: Server) -> None:
    asked = {"messages": USER, "tools": [TOOL], "tool_choice": "required", "temperature": 0}
    asked["max_tokens"] = 40
    [choice] = server.request(CHAT, asked).json()["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])
    tool = {"type": "function", "name": "plan", "parameters": SCHEMA}
    body = {"input": "x", "tools": [tool], "tool_choice": "required", "temperature": 0}
    answer = server.request(RESPONSES, body | {"max_output_tokens": 40}).json()
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"


THINKING: dict[str, Any] = {
    "messages": [*USER, {"role": "assistant", "content": "<think>"}],
    "continue_final_message": True,
    "add_generation_prompt": False,
    "max_tokens": 30,
    "temperature": 1.0,
    "seed": 3,
}


def test_thoughts_end_with_their_budget_and_then_the_form_holds(narrow: Server) -> None:
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    asked = THINKING | form | {"thinking_token_budget": 6}
    whole = narrow.request(CHAT, asked).json()
    message = whole["choices"][0]["message"]
    assert message["content"] in ("yes", "no")
    assert message["reasoning"] == message["reasoning_content"] != ""
    deltas = [
        event["choices"][0]["delta"]
        for event in narrow.request(CHAT, asked | {"stream": True}).events()
        if event != "[DONE]"
    ]
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    hidden = narrow.request(CHAT, asked | {"include_reasoning": False}).json()
    assert hidden["choices"][0]["message"]["reasoning"] is None
    assert hidden["choices"][0]["message"]["content"] == message["content"]


def streamed(server: Server, asked: dict[str, Any]) -> dict[str, str]:
    """Return the joined fields of a streamed message, including a call's arguments."""
    message: dict[str, str] = {"content": "", "reasoning": "", "arguments": ""}
    for event in server.request(CHAT, asked | {"stream": True}).events():
        delta = {} if event == "[DONE]" else event["choices"][0]["delta"]
        for name in ("content", "reasoning"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or []:
            message["arguments"] += call.get("function", {}).get("arguments") or ""
            message["arguments"] += call.get("custom", {}).get("input") or ""
    return message


@pytest.mark.parametrize("seed", [3, 4])
def test_a_schema_holds_after_the_thoughts(narrow: Server, seed: int) -> None:
    sure = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    sure["additionalProperties"] = False
    asked = THINKING | {"seed": seed, "max_tokens": 110, "thinking_token_budget": 6}
    asked["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "sure", "schema": sure},
    }
    choice = narrow.request(CHAT, asked).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "stop" and message["reasoning"]
    jsonschema.validate(json.loads(message["content"]), sure)
    said = streamed(narrow, asked)
    assert (said["content"], said["reasoning"]) == (message["content"], message["reasoning"])


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_forced_calls_come_after_the_thoughts(narrow: Server, choice: Any) -> None:
    asked = THINKING | {"max_tokens": 160, "thinking_token_budget": 6}
    asked |= {"tools": [TOOL, OTHER], "tool_choice": choice, "parallel_tool_calls": False}
    message = narrow.request(CHAT, asked).json()["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert message["reasoning"] and message["content"] is None
    if call["function"]["name"] == "plan":
        fits(call["function"]["arguments"])
    said = streamed(narrow, asked)
    assert said["reasoning"] == message["reasoning"] and not said["content"]
    assert said["arguments"] == call["function"]["arguments"]


def test_a_budget_changes_nothing_before_it_is_spent(narrow: Server) -> None:
    free = narrow.request(CHAT, THINKING | {"return_token_ids": True, "ignore_eos": True}).json()
    ids = free["choices"][0]["token_ids"]
    for budget in (0, 1, 7):
        fields = {"thinking_token_budget": budget, "return_token_ids": True, "ignore_eos": True}
        choice = narrow.request(CHAT, THINKING | fields).json()["choices"][0]
        assert choice["token_ids"][:budget] == ids[:budget]
        assert bool(choice["message"].get("reasoning")) <= (budget > 0)
        assert choice["message"]["content"]


def test_thoughts_in_messages_and_responses(narrow: Server) -> None:
    body = {"messages": THINKING["messages"], "max_tokens": 25, "temperature": 0}
    body["thinking"] = {"type": "enabled", "budget_tokens": 5}
    blocks = narrow.request(MESSAGES, body).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    events = narrow.request(MESSAGES, body | {"stream": True}).events()
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]


def test_a_model_may_choose_where_its_calls_are_known(narrow: Server) -> None:
    body = {"messages": USER, "max_tokens": 20, "temperature": 0, "tools": [TOOL]}
    for tool in (TOOL, function("plan", parameters=SCHEMA, strict=True)):
        choice = narrow.request(CHAT, body | {"tools": [tool]}).json()["choices"][0]
        assert choice["message"]["content"].startswith("e-n-o-t-")
        assert "tool_calls" not in choice["message"]
