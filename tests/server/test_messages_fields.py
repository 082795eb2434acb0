"""Fields and blocks of Anthropic's messages: forms, effort, cache counts, and text blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import Many
from tests.support.live_server import Server

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER: dict[str, Any] = {"role": "user", "content": "Reverse: s-t-o-n-e"}
GOOD = {"messages": [USER], "max_tokens": 100, "temperature": 0}
SCHEMA = {"type": "json_schema", "schema": {"enum": ["left", "right"]}}


@pytest.fixture
def strange(many: Many) -> Server:
    """Return a server whose model `strange` has a template that shows its inputs."""
    return many.server


def ask(server: Server, path: str = PATH, **fields: Any) -> dict[str, Any]:
    answer = server.request(path, GOOD | fields)
    assert answer.status == 200, answer.body
    return answer.json()


def prompt(server: Server, *messages: dict[str, Any], **fields: Any) -> int:
    """Return the number of tokens of a conversation."""
    return ask(server, COUNT, messages=list(messages) or [USER], **fields)["input_tokens"]


@pytest.mark.parametrize(
    "fields", [{"output_format": SCHEMA}, {"output_config": {"format": SCHEMA}}], ids=str
)
def test_an_answer_has_the_form_of_a_schema(server: Server, fields: dict[str, Any]) -> None:
    answer = ask(server, **fields)
    assert json.loads(answer["content"][0]["text"]) in ("left", "right")
    assert answer["stop_reason"] == "end_turn"


def test_what_is_read_and_written_of_the_cache_is_counted(server: Server) -> None:
    """As vLLM and Anthropic have it, the three counts of a prompt add up to it."""
    long = {"messages": [{"role": "user", "content": "count " * 12}], "cache_salt": "mine"}
    total = ask(server, COUNT, **long)["input_tokens"]
    whole = total // 16 * 16
    first, second = ask(server, **long)["usage"], ask(server, **long)["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert [first[name] for name in names] == [total - whole, whole, 0]
    read = min(whole, (total - 1) // 16 * 16)
    assert [second[name] for name in names] == [total - whole, whole - read, read]
    events = server.request(PATH, GOOD | long | {"stream": True}).events()
    usages = [events[0]["message"]["usage"], events[-2]["usage"]]
    assert all([usage[name] for name in names] == [second[n] for n in names] for usage in usages)
    chat = {"messages": long["messages"], "max_tokens": 1, "cache_salt": "yours"}
    details = [
        server.request("/v1/chat/completions", chat).json()["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    assert details[0] == {"cached_tokens": 0, "created_cache_tokens": whole}
    assert details[1] == {"cached_tokens": read, "created_cache_tokens": whole - read}
    asked = {"input": "count " * 12, "max_output_tokens": 1, "cache_salt": "theirs"}
    usage = server.request("/v1/responses", asked).json()["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": whole}


INPUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
    ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
    ({"chat_template_kwargs": {"style": "zz"}}, {"style": "zz"}),
    (
        {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": "perhaps"}},
        {"enable_thinking": "perhaps"},
    ),
]


@pytest.mark.parametrize(("fields", "inputs"), INPUTS, ids=str)
def test_efforts_thoughts_and_inputs_reach_the_template(
    strange: Server, fields: dict[str, Any], inputs: dict[str, Any]
) -> None:
    shown = {"messages": [USER], "chat_template_kwargs": inputs}
    count = strange.request("/tokenize", shown | {"model": "strange"}).json()["count"]
    assert prompt(strange, model="strange", **fields) == count


def test_system_messages_in_the_middle(server: Server, strange: Server) -> None:
    """System messages join the first message if the template refuses them, as in vLLM."""
    inline = [USER, {"role": "system", "content": "Be brief."}, USER]
    for before, joined in (({"system": "Hm. "}, "Hm. Be brief."), ({}, "Be brief.")):
        moved = prompt(strange, USER, USER, model="strange", system=joined)
        assert prompt(strange, *inline, model="strange", **before) == moved
    chat = {"messages": inline}
    assert prompt(server, *inline) == server.request("/tokenize", chat).json()["count"]


def test_the_line_for_billing_is_left_out(server: Server) -> None:
    bill = {"type": "text", "text": "x-anthropic-billing-header: cch=1f2e;"}
    rest = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    assert prompt(server, system=[bill, rest]) == prompt(server, system="Be brief.")
    said = {"role": "system", "content": bill["text"]}
    assert prompt(server, USER, said) == prompt(server)


TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "text", "text": "a", "citations": None}, "a"),
    ({"type": "document", "source": {"type": "text", "data": "a"}}, "a"),
    (
        {"type": "document", "title": "t", "context": "c", "source": {"type": "text", "data": "a"}},
        "t\nc\na",
    ),
    (
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "text", "text": w} for w in "ab"]},
        },
        "a\nb",
    ),
    (
        {
            "type": "search_result",
            "source": "http://s",
            "title": "t",
            "content": [{"type": "text", "text": "a"}],
        },
        "t\nhttp://s\na",
    ),
    ({"type": "compaction", "content": "a"}, "a"),
]


@pytest.mark.parametrize(("block", "text"), TEXTS, ids=lambda value: str(value)[:40])
def test_blocks_of_text(server: Server, block: dict[str, Any], text: str) -> None:
    plain = {"role": "user", "content": text}
    assert prompt(server, {"role": "user", "content": [block]}) == prompt(server, plain)
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block, block]}
    whole = {"type": "tool_result", "tool_use_id": "1", "content": f"{text}\n{text}"}
    turns = [[USER, used, {"role": "user", "content": [each]}] for each in (result, whole)]
    assert prompt(server, *turns[0]) == prompt(server, *turns[1])


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
        {"type": "document", "source": {"type": "url", "url": "http://169.254.169.254/"}},
        {"type": "document", "source": {"type": "base64", "data": "aaaa"}},
        {"type": "document"},
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
        {"type": "container_upload", "file_id": "a"},
        {"type": "search_result"},
    ],
    ids=lambda block: str(block)[:50],
)
def test_blocks_of_other_kinds_are_refused(server: Server, block: dict[str, Any]) -> None:
    for path in (PATH, COUNT):
        answer = server.request(path, GOOD | {"messages": [{"role": "user", "content": [block]}]})
        assert answer.status == 400 and answer.error["param"] == "messages"
        assert f"content of type {block['type']!r} is not supported" in answer.error["message"]


def test_context_management_changes_nothing(server: Server) -> None:
    managed = {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}
    answer, plain = ask(server, **managed), ask(server)
    assert answer["content"] == plain["content"] and "context_management" not in plain
    assert answer["context_management"] == {"applied_edits": []}
    counted = ask(server, COUNT, **managed)
    tokens = {"original_input_tokens": counted["input_tokens"]}
    assert counted["context_management"] == tokens
    headers = {"anthropic-beta": "context-management-2025-06-27,effort-2025-11-24"}
    answer = server.request(PATH, GOOD | {"betas": ["a"]}, headers)
    assert answer.json()["content"] == plain["content"]


def test_whole_calls_before_a_stop_sequence_are_run(server: Server) -> None:
    tool = {"name": "f", "type": "custom", "strict": True, "defer_loading": False}
    tool["input_schema"] = {"type": "object", "properties": {}, "additionalProperties": False}
    asked = {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    free = ask(server, **asked)
    assert free["stop_reason"] == "tool_use" and free["stop_sequence"] is None
    cut = ask(server, **asked, stop_sequences=["name"])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", "name")
    none = ask(server, tools=[tool], tool_choice={"type": "none"})
    assert none["content"] == ask(server)["content"]
