"""Hosted tools, custom tools, and tools that a choice allows: in chats and responses, over HTTP."""

from __future__ import annotations

import json
import random
import re
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import response_input_item_param as item_params
from openai.types.responses import tool_param

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.openai import ChatRequest
from jaxserve.server.schema.response_items import InputItem
from jaxserve.server.schema.response_tools import HOSTED_ITEMS, HOSTED_TOOLS, strip_hosted
from jaxserve.server.schema.responses import ResponsesRequest, as_chat, check_served, items_of
from jaxserve.server.tool_calls.custom_tools import CustomInput
from jaxserve.server.tool_calls.tools import tool_use
from tests.support.live_server import Server

CHAT, RESPONSES, CONVERSATIONS = "/v1/chat/completions", "/v1/responses", "/v1/conversations"
MODEL = "demo_model"
USER: Any = [{"role": "user", "content": "Yes?"}]
OPEN: dict[str, Any] = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
# Items and tools that say something: leaving them out would change the conversation.
SAYING = {"message", "reasoning", "function_call", "function_call_output", "custom_tool_call"}
SAYING |= {"custom_tool_call_output", "item_reference", "compaction", "compaction_trigger"}
SAYING |= {"additional_tools", "configuration_update"}


def kinds(union: Any) -> set[str]:
    """Return the types of the members of a union of the official client."""
    found: set[str] = set()
    for member in typing.get_args(union):
        hint = typing.get_type_hints(member).get("type")
        values = [hint]
        while values:
            value = values.pop()
            found |= {value} if isinstance(value, str) else set()
            values += typing.get_args(value)
    return found


def test_every_tool_and_item_of_the_official_client_is_known() -> None:
    assert kinds(tool_param.ToolParam) - HOSTED_TOOLS == {"function", "custom", "namespace"}
    assert kinds(item_params.ResponseInputItemParam) - HOSTED_ITEMS == SAYING


def chat(**fields: Any) -> ChatRequest:
    body = {"input": "a", **fields}
    strip_hosted(body)
    request = msgspec.convert(body, ResponsesRequest)
    return as_chat(request, items_of(request))


ODD: dict[str, Any] = {
    "name": {"a": 1},
    "arguments": {"q": [1]},
    "output": {"type": "computer_screenshot"},
    "parameters": [1],
    "tools": ["a"],
    "format": None,
    "action": {"type": "click"},
    "input": 5,
    "call_id": 7,
    "summary": "a",
    "content": {"x": 1},
    "role": "robot",
}


def test_hosted_tools_and_items_are_left_out_whatever_they_hold() -> None:
    plain = chat(input=USER)
    tools = [{"type": kind, **more} for kind in sorted(HOSTED_TOOLS) for more in ({}, ODD)]
    items = [{"type": kind, **more} for kind in sorted(HOSTED_ITEMS) for more in ({}, ODD)]
    for choice in (None, "auto", "none"):
        given = chat(input=[*items, *USER, *items], tools=tools, tool_choice=choice)
        assert (given.messages, given.tools) == (plain.messages, None)
    function = {"type": "function", "name": "f"}
    given = chat(tools=[*tools, function], tool_choice={"type": "function", "name": "f"})
    assert [tool.function.name for tool in given.tools or []] == ["f"]
    check_served([InputItem(type=kind) for kind in HOSTED_ITEMS], "items")


def test_thoughts_reach_their_message_over_a_hosted_call() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "b"}
    messages = chat(input=[*USER, thought, {"type": "web_search_call"}, said]).messages
    assert messages[-1].reasoning_content == "hm"


def test_an_allowed_group_stands_for_its_tools() -> None:
    members = [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]
    group = {"type": "namespace", "name": "n", "tools": members}
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "namespace", "name": "n"}],
    }
    given = chat(tools=[{"type": "function", "name": "x"}, group], tool_choice=choice)
    found = tool_use(given, "hermes", True, json.dumps)
    assert found is not None and set(found.calls.tools) == {"n__f", "n__g"}
    choice["tools"] = [{"type": "namespace", "name": "m"}]
    with pytest.raises(InvalidRequest, match="'m' is not in tools"):
        chat(tools=[group], tool_choice=choice)


CHOICES = [
    *({"type": kind} for kind in sorted(HOSTED_TOOLS)),
    {"type": "mcp", "server_label": "a", "name": "b"},
    {"type": "unheard_of"},
    {"type": "function"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp", "server_label": "a"}]},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "unheard_of"}]},
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_choice_of_a_hosted_tool_is_refused(choice: Any) -> None:
    tools = [{"type": "mcp", "server_label": "a"}, {"type": "function", "name": "f"}]
    with pytest.raises(InvalidRequest) as error:
        chat(tools=tools, tool_choice=choice)
    assert error.value.parameter == "tool_choice"


@pytest.mark.parametrize("kind", ["additional_tools", "compaction", "unheard_of_call"])
def test_items_that_say_something_are_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest):
        chat(input=[*USER, {"type": kind}])


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as one:
        yield one


def test_hosted_tools_over_http(client: openai.OpenAI, server: Server) -> None:
    tools: Any = [
        {"type": "image_generation"},
        {"type": "local_shell"},
        {"type": "tool_search", "execution": "client", "parameters": {}},
        {"type": "mcp", "server_label": "a", "server_url": "http://b", "require_approval": "never"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
    ]
    search: Any = {"id": "ws_1", "type": "web_search_call", "status": "completed"}
    search["action"] = {"type": "search", "query": "a"}
    screen = {"type": "computer_screenshot", "image_url": "http://c"}
    seen: Any = {"type": "computer_call_output", "call_id": "c", "output": screen}
    asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
    plain = client.responses.create(**asked, input=USER)
    given = client.responses.create(**asked, input=[search, seen, *USER], tools=tools)
    assert given.output_text == plain.output_text
    assert plain.usage and given.usage
    assert given.usage.input_tokens == plain.usage.input_tokens
    assert [tool.type for tool in given.tools] == [tool["type"] for tool in tools]
    listed = [item.type for item in client.responses.input_items.list(given.id, order="asc")]
    assert listed == ["web_search_call", "computer_call_output", "message"]
    again = client.responses.create(**asked, input=USER, previous_response_id=given.id)
    assert again.status in ("completed", "incomplete")
    with pytest.raises(openai.BadRequestError, match="'image_generation' are not served"):
        client.responses.create(
            **asked, input="a", tools=tools, tool_choice={"type": "image_generation"}
        )
    kept = client.conversations.create(items=[search, *USER])
    assert client.responses.create(**asked, input="b", conversation=kept.id).output_text
    counted = {"input": [search, seen, *USER], "tools": tools}
    number = server.request(f"{RESPONSES}/input_tokens", counted).json()["input_tokens"]
    assert number == plain.usage.input_tokens


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": OPEN}}


def custom(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **fields}}


def allow(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def use(**fields: Any) -> Any:
    body = msgspec.convert({"messages": USER, **fields}, ChatRequest)
    return tool_use(body, "hermes", True, json.dumps)


def test_allowed_tools_alone_are_shown_and_called() -> None:
    tools = [function("f"), function("g"), custom("h")]
    for mode in ("auto", "required"):
        found = use(tools=tools, tool_choice=allow(mode, "g", "h"))
        assert set(found.calls.tools) == {"g", "h"}
        assert [tool["function"]["name"] for tool in found.described] == ["g", "h"]
        assert (found.grammar is None) == (mode == "auto")
    assert use(tools=tools, tool_choice=allow("auto")) is None
    for mode, name in (("auto", "x"), ("required", "x")):
        with pytest.raises(InvalidRequest, match="'x' is not in tools"):
            use(tools=tools, tool_choice=allow(mode, "f", name))
    with pytest.raises(InvalidRequest, match="tool_choice"):
        use(tools=tools, tool_choice=allow("required"))


MALFORMED: list[dict[str, Any]] = [
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "custom"}]},
    {"tools": [{"type": "custom", "function": {"name": "f"}}]},
    {"tools": [custom("f", format={"type": "xml"})]},
    {"tools": [custom("f", format={"type": "grammar"})]},
    {"tools": [custom("f", format={"type": "grammar", "grammar": {"syntax": "lark"}})]},
    {"tool_choice": {"type": "custom"}},
    {"tool_choice": {"type": "custom", "function": {"name": "f"}}},
    {"tool_choice": {"type": "allowed_tools"}},
    {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}},
    {"messages": [*USER, {"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
]


@pytest.mark.parametrize("fields", MALFORMED, ids=str)
def test_malformed_tools_are_named(server: Server, fields: dict[str, Any]) -> None:
    body = {"messages": USER, "tools": [function("f")], "max_tokens": 1, **fields}
    answer = server.request(CHAT, body)
    assert answer.status == 400
    assert answer.error["param"].split(".")[0] == next(iter(fields)), answer.body


@pytest.mark.parametrize("named", [True, False])
def test_custom_tools_of_chats(client: openai.OpenAI, server: Server, named: bool) -> None:
    tools: Any = [custom("shout", description="Says it."), function("f")]
    choice: Any = {"type": "custom", "custom": {"name": "shout"}}
    if not named:
        choice = allow("required", "shout")
    asked: Any = {"model": MODEL, "messages": USER, "tools": tools, "tool_choice": choice}
    asked |= {"temperature": 1.0, "seed": 5, "max_tokens": 100, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0]
    [call] = whole.message.tool_calls or []
    assert call.type == "custom" and call.custom.name == "shout" and call.id
    events = server.request(CHAT, asked | {"stream": True}).events()[:-1]
    deltas = [d for e in events for d in e["choices"][0]["delta"].get("tool_calls") or []]
    assert deltas[0]["type"] == "custom" and deltas[0]["custom"]["name"] == "shout"
    assert not any("function" in delta for delta in deltas)
    assert "".join(delta["custom"].get("input", "") for delta in deltas) == call.custom.input
    chunks = client.chat.completions.create(**asked, stream=True)
    found: list[Any] = [d for c in chunks for d in c.choices[0].delta.tool_calls or []]
    assert "".join(delta.custom.get("input", "") for delta in found) == call.custom.input
    said: Any = [
        *USER,
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    again = client.chat.completions.create(model=MODEL, messages=said, max_tokens=4)
    assert again.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_allowed_tools_of_responses(client: openai.OpenAI, server: Server, mode: str) -> None:
    tools: Any = [
        {"type": "custom", "name": "shout"},
        {"type": "function", "name": "f", "parameters": OPEN, "strict": False},
        {"type": "image_generation"},
    ]
    allowed: Any = [{"type": "custom", "name": "shout"}, {"type": "image_generation"}]
    choice: Any = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    asked: Any = {"model": MODEL, "input": "Yes?", "tools": tools, "tool_choice": choice}
    asked |= {"temperature": 0, "max_output_tokens": 60, "parallel_tool_calls": False}
    if mode == "auto":  # the model's calls are not known
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.responses.create(**asked)
        choice["tools"] = allowed[1:]
        assert client.responses.create(**asked).output[0].type == "message"
        return
    whole = client.responses.create(**asked)
    [item] = whole.output
    assert item.type == "custom_tool_call" and item.name == "shout"
    assert whole.tool_choice.type == "allowed_tools"  # type: ignore[union-attr]
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    said = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(said) == item.input
    group = {"type": "namespace", "name": "n", "description": "d", "tools": tools[:1]}
    body = asked | {"tools": [group], "tool_choice": {"type": "custom", "name": "shout"}}
    [grouped] = client.responses.create(**body).output
    assert grouped.type == "custom_tool_call"
    assert (grouped.namespace, grouped.name) == ("n", "shout")


def test_the_text_of_a_custom_call_is_read_in_any_pieces() -> None:
    texts = ["", "a", '"\\\n\t\u2028', "é😀\x00", "x" * 50, "\ud7ff", "{}", '{"input": "b"}']
    for seed in range(200):
        rng = random.Random(seed)
        text = "".join(rng.choices(texts, k=3))
        written = json.dumps({"input": text}, ensure_ascii=rng.random() < 0.5)
        written = written.replace("{", rng.choice(["{", " { "]), 1)
        reader, read, place = CustomInput(), "", 0
        while place < len(written):
            size = rng.randint(1, 5)
            read += reader.feed(written[place : place + size])
            place += size
        assert read + reader.finish() == text
        cut = CustomInput()
        begun = cut.feed(written[: rng.randint(0, len(written))])
        assert text.startswith(begun)
    for odd in ("{}", '{"input": 5}', "plain", '{"b": 1}', "[1]", '{"b": 1, "input": "c"}'):
        reader = CustomInput()
        expected = "c" if "c" in odd else odd
        assert reader.feed(odd) + reader.finish() == expected


GRAMMARS = [("lark", 'start: "(" start ")" | WORD\nWORD: /[a-c"]{2}/'), ("regex", r'go "\d{2}')]


@pytest.mark.parametrize(("syntax", "definition"), GRAMMARS)
def test_texts_of_custom_tools_obey_their_grammar(
    client: openai.OpenAI, server: Server, syntax: Any, definition: str
) -> None:
    pattern = definition if syntax == "regex" else r'(\(*)[a-c"]{2}(\)*)'
    grammar = {"syntax": syntax, "definition": definition}
    tools: Any = [function("f"), custom("go", format={"type": "grammar", "grammar": grammar})]
    asked: Any = {"model": MODEL, "messages": USER, "tools": tools, "max_tokens": 100}
    asked |= {"tool_choice": {"type": "custom", "custom": {"name": "go"}}, "temperature": 0}
    [call] = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert call.type == "custom" and re.fullmatch(pattern, call.custom.input)
    events = server.request(CHAT, asked | {"stream": True}).events()[:-1]
    deltas = [d for e in events for d in e["choices"][0]["delta"].get("tool_calls") or []]
    assert "".join(delta["custom"].get("input", "") for delta in deltas) == call.custom.input
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    flat: Any = {"type": "custom", "name": "go", "format": {"type": "grammar", **grammar}}
    asked = {"model": MODEL, "input": "Yes?", "tools": [flat], "temperature": 0}
    asked |= {"tool_choice": "required", "max_output_tokens": 100, "parallel_tool_calls": False}
    whole = client.responses.create(**asked)
    [item] = whole.output
    assert item.type == "custom_tool_call" and re.fullmatch(pattern, item.input)
    assert whole.tools[0].format.definition == definition  # type: ignore[union-attr]
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    said = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(said) == item.input
    for path, body in (
        (
            CHAT,
            {
                "messages": USER,
                "tools": [
                    custom(
                        "go",
                        format={
                            "type": "grammar",
                            "grammar": {"syntax": syntax, "definition": "start: ("},
                        },
                    )
                ],
            },
        ),
        (
            RESPONSES,
            {
                "input": "a",
                "tools": [flat | {"format": flat["format"] | {"definition": "start: ("}}],
            },
        ),
    ):
        answer = server.request(path, body | {"tool_choice": "required"})
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "'go'" in answer.error["message"]
