"""Histories: neither a server's answer nor a client's change of it makes a conversation fail."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import httpx2
import msgspec
import pytest

from jaxserve import AsyncLLM
from jaxserve.errors import InvalidRequest, PromptTooLong
from jaxserve.server.api.conversations import as_tools, template_ids
from jaxserve.server.http.app import App
from jaxserve.server.kept.conversation_store import Conversation
from jaxserve.server.kept.response_store import Turn
from jaxserve.server.schema import anthropic, responses
from jaxserve.server.schema.decode import MAX_DEPTH, given_arguments
from jaxserve.server.schema.openai import ChatRequest
from jaxserve.server.schema.response_items import shown_items
from jaxserve.server.served.models import Models, ServedModel
from jaxserve.server.settings import ServerConfig
from jaxserve.server.tool_calls.custom_tools import CustomInput
from jaxserve.server.tool_calls.histories import plainer_histories
from jaxserve.start.loaded import Loaded
from jaxserve.text.messages import left_out, plain_messages
from tests.server import histories
from tests.server.histories import IMAGE, TOOLS
from tests.server.test_tools import SCHEMA, TOOL
from tests.support.live_server import Server

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER: Any = {"role": "user", "content": "Hi"}
HEAD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
TAIL = "{% endfor %}{% if tools %}{{ tools | length }}{% endif %}"
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
)


def calling(arguments: str, before: str = "") -> str:
    """Return a template that writes each call, its arguments as an expression says."""
    return (
        f"{HEAD}{{% if m.tool_calls %}}{before}{{% for c in m.tool_calls %}}"
        f"{{{{ c.function.name }}}}({arguments}){{% endfor %}}{{% endif %}}{TAIL}"
    )


# Each is as strict as templates of the models in its name.
TEMPLATES = {
    "qwen": calling("{% set a = c.function.arguments %}{{ a if a is string else (a | tojson) }}"),
    "hermes": calling("{{ c.function.arguments | tojson }}"),
    "qwen_coder": calling(
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | string }}{% endfor %}"
    ),
    "glm": calling("{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}"),
    "gemma4": calling(
        "{% macro w(x) %}{% if x is mapping %}{% for k, v in x | dictsort %}{{ k }}:{{ w(v) }}"
        "{% endfor %}{% elif x is sequence and x is not string %}{% for v in x %}{{ w(v) }}"
        "{% endfor %}{% else %}{{ x }}{% endif %}{% endmacro %}{{ w(c.function.arguments) }}"
    ),
    "deepseek": (
        "{% for message in messages %}{% if message['role'] == 'assistant' and "
        "message['tool_calls'] is defined %}{% for tool in message['tool_calls'] %}"
        "{% if message['content'] is none %}{{ '<|tool|>' + tool['function']['name'] + "
        "tool['function']['arguments'] + '\\n' }}{% else %}{{ message['content'] + "
        "tool['function']['name'] + tool['function']['arguments'] }}{% endif %}{% endfor %}"
        "{% else %}{{ message['role'] + message['content'] }}{% endif %}{% endfor %}"
    ),
    "functionary": (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ '<' + m['name'] + '>' + m.content }}"
        "{% else %}{{ m.role + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% endif %}{% endfor %}"
    ),
    "llama": calling(
        "{{ c.function.arguments | tojson }}",
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}",
    ),
    "mistral": (
        "{% set said = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% for m in said | rejectattr('role', 'equalto', 'tool') "
        "| selectattr('tool_calls', 'undefined') %}" + ALTERNATE + "{% endfor %}"
        "{% for m in messages %}{% set i = m.tool_call_id if m.role == 'tool' else "
        "(m.tool_calls[0].id if m.tool_calls else 'aaaaaaaaa') %}{% if i | length != 9 %}"
        "{{ raise_exception('nine letters') }}{% endif %}{{ m.role + m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    ),
    "gemma": "{% for m in messages %}"
    + ALTERNATE
    + "{{ m.role + (m.content | trim) }}{% endfor %}",
    "gemma_with_system": (
        "{% set said = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% for m in said %}" + ALTERNATE + "{% if m.role not in ('user', 'assistant') %}"
        "{{ raise_exception('no role ' + m.role) }}{% endif %}{{ m.role + m.content }}{% endfor %}"
    ),
    "minimax": calling(
        "{{ c.function.arguments | tojson }}",
    ).replace(
        HEAD,
        "{% set last = namespace(call=none) %}{% for m in messages %}{% if m.tool_calls %}"
        "{% set last.call = m.tool_calls[-1].function.name %}{% elif m.role == 'tool' %}"
        "{% if last.call is none %}{{ raise_exception('no call before') }}{% endif %}{% else %}"
        "{% set last.call = none %}{% endif %}<{{ m.role }}>{{ m.content }}",
    ),
    "gpt_oss": (
        "{{ '<|channel|>analysis to=functions.' }}{% for m in messages %}"
        "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call before') }}{% endif %}{{ m.role + m.content }}"
        "{{ m.tool_calls[0].function.arguments | tojson if m.tool_calls }}{% endfor %}"
    ),
    "words": HEAD + "{% endfor %}",
}


@pytest.fixture(scope="module")
def app_of(loaded: Loaded) -> Iterator[Callable[[str], App]]:
    """Yield a function from a template's name to an application that trusts requests' templates."""

    @cache
    def app(name: str) -> App:
        template = TEMPLATES.get(name, name)
        config = ServerConfig(chat_template=template, trust_request_chat_template=True)
        return App(Models([ServedModel(["demo"], "demo", llm, config, b"secret")]), config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded.runner, "close", lambda: None)
        llm = AsyncLLM(loaded)
        yield app
        llm.close()


def post(app: App, path: str, body: Any) -> tuple[int, Any]:
    async def scene() -> tuple[int, Any]:
        transport = httpx2.ASGITransport(app.asgi)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            content = body if isinstance(body, bytes) else json.dumps(body)
            kind = {"content-type": "application/json"}
            answer = await client.post(path, content=content, headers=kind)
            return answer.status_code, answer.json()

    return asyncio.run(scene())


def chat_of(path: str, body: dict[str, Any]) -> ChatRequest:
    """Return the chat that a request of an API stands for."""
    if path == CHAT:
        return as_tools(msgspec.convert(body, ChatRequest))
    if path == MESSAGES:
        return anthropic.as_chat(msgspec.convert(body, anthropic.CountRequest))
    asked = msgspec.convert(body, responses.ResponsesRequest)
    return responses.as_chat(asked, responses.items_of(asked))


def prompt(app: App, path: str, said: list[Any], **fields: Any) -> str:
    """Return the prompt of a conversation as text."""
    model: ServedModel = app.models.all[0]
    chat = chat_of(path, {"input" if path == RESPONSES else "messages": said, **fields})
    return model.tokenizer().decode(asyncio.run(template_ids(chat, model)), False)


def check_all(app: App, seed: int) -> None:
    """Check that a conversation of drawn answers goes on in every API."""
    rng, model = random.Random(seed), app.models.all[0]
    chat, messages, items = [USER], [USER], [USER]
    parent: Turn | None = None
    kept = Conversation(None, {})
    for _ in range(rng.choice((1, 1, 2))):
        drawn, streams = histories.draw(rng), rng.random() < 0.5
        chat += histories.chat_turns(histories.chat_answer(model, drawn, streams), rng)
        blocks = histories.messages_answer(model, drawn, streams, rng)
        messages += histories.messages_turns(blocks, rng)
        response = histories.response_answer(model, drawn, streams)
        own = shown_items(histories.as_items(items[-1:]))
        parent = Turn(response["id"], None, parent, own, msgspec.json.encode(response))
        kept.add(kept.show_new(histories.as_items(items[-1:])))
        kept.add(response["output"])
        items += histories.response_turns(response["output"], rng)
    assert parent is not None
    app.responses.add(parent)
    app.conversations.keep(kept)
    is_told = rng.random() < 0.5
    functions = [tool["function"] for tool in TOOLS] if is_told else []
    named = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    flat = [{"type": "function", **each} for each in functions]
    last = max(place for place, said in enumerate(chat) if said["role"] == "assistant")
    more = {"continue_final_message": not chat[last].get("tool_calls")}
    more["add_generation_prompt"] = False
    told = {"tools": TOOLS if is_told else None}
    for path, body in (
        ("/tokenize", {"messages": chat, **told}),
        ("/tokenize", {"messages": chat[: last + 1], **told, **more}),
        (f"{MESSAGES}/count_tokens", {"messages": messages, "tools": named}),
        (f"{MESSAGES}/count_tokens", {"messages": messages[:-1], "tools": named}),
        (f"{RESPONSES}/input_tokens", {"input": items, "tools": flat}),
        (f"{RESPONSES}/input_tokens", {"input": "Go on.", "previous_response_id": parent.id}),
        (f"{RESPONSES}/input_tokens", {"input": "Go on.", "conversation": kept.shown.id}),
    ):
        status, answer = post(app, path, body)
        assert status == 200, (seed, path, answer, body)


@pytest.mark.parametrize(
    "cases", [42, pytest.param(10_000, marks=pytest.mark.long)], ids=["usual", "long"]
)
def test_every_answer_can_be_sent_back(app_of: Callable[[str], App], cases: int) -> None:
    names = list(TEMPLATES)
    for seed in range(cases):
        check_all(app_of(names[seed % len(names)]), seed)


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "c1", "function": {"name": "f", "arguments": arguments}, **fields}


def with_call(path: str, arguments: Any, result: Any = "ok") -> list[Any]:
    """Return a conversation of an API that holds a call with its result."""
    if path == CHAT:
        said = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
        return [USER, said, {"role": "tool", "tool_call_id": "c1", "content": result}, USER]
    if path == MESSAGES:
        used = {"type": "tool_use", "id": "c1", "name": "f", "input": arguments}
        given = {"type": "tool_result", "tool_use_id": "c1", "content": result}
        return [
            USER,
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [given]},
        ]
    used = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}
    return [USER, used, {"type": "function_call_output", "call_id": "c1", "output": result}, USER]


NESTED: Any = {}
for _ in range(MAX_DEPTH - 1):
    NESTED = {"a": NESTED}
# By the form of a request: the object that templates see, and the text; None for the same object.
ARGUMENTS: list[tuple[Any, dict[str, Any], str | None]] = [
    ('{"a": 1}', {"a": 1}, None),
    ({"a": 1}, {"a": 1}, None),
    (' {"a": 1}\n', {"a": 1}, None),
    (None, {}, None),
    ("", {}, None),
    (" \n", {}, None),
    ('{"a": "x', {}, '{"a": "x'),
    ("{", {}, "{"),
    ('{"a": 1}}', {}, '{"a": 1}}'),
    ("[1]", {}, "[1]"),
    ([1], {}, "[1]"),
    ([], {}, "[]"),
    ("7", {}, "7"),
    (7, {}, "7"),
    (False, {}, "false"),
    ('"{}"', {}, '"{}"'),
    ("null", {}, "null"),
    ("plain words", {}, "plain words"),
    ('{"a": 1, "a": 2}', {"a": 2}, None),
    ('{"a": "\\ud83d"}', {"a": "\ufffd"}, None),
    ('{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}, None),
    ('{"a": "x\ny"}', {"a": "x\ny"}, None),
    (json.dumps(NESTED), NESTED, None),
    ('{"a": ' * 3000 + "1" + "}" * 3000, {}, '{"a": ' * 3000 + "1" + "}" * 3000),
    ('{"a": ' + "9" * 5000 + "}", {}, '{"a": ' + "9" * 5000 + "}"),
    ('{"a": ' + "[" * 90 + "]" * 90 + "}", {}, '{"a": ' + "[" * 90 + "]" * 90 + "}"),
]


@pytest.mark.parametrize(("given", "meant", "text"), ARGUMENTS, ids=lambda one: str(one)[:30])
def test_arguments_are_an_object_or_text_as_the_template_wants(
    app_of: Callable[[str], App], given: Any, meant: dict[str, Any], text: str | None
) -> None:
    assert given_arguments(given) == (meant if text is None else text)
    if len(str(given)) > 2000:
        return  # more than the model's context
    written = json.dumps(meant, ensure_ascii=False)
    for path in (CHAT, MESSAGES, RESPONSES):
        for name in ("hermes", "minimax", "llama"):
            assert f"f({written})" in prompt(app_of(name), path, with_call(path, given))
        for name in ("qwen_coder", "glm", "gpt_oss"):
            said = prompt(app_of(name), path, with_call(path, given))
            assert said == prompt(app_of(name), path, with_call(path, meant))
        for name in ("qwen", "deepseek", "functionary", "gemma4"):
            found = prompt(app_of(name), path, with_call(path, given))
            if text is not None:
                assert text in found
            elif name == "gemma4":
                assert found == prompt(app_of(name), path, with_call(path, meant))
            else:
                assert written in found


def test_a_template_of_a_request_has_its_own_form_of_arguments(
    app_of: Callable[[str], App],
) -> None:
    app = app_of("hermes")
    cut = with_call(CHAT, '{"a": "x')
    assert "f({})" in prompt(app, CHAT, cut)
    assert 'f({"a": "x)' in prompt(app, CHAT, cut, chat_template=TEMPLATES["qwen"])
    assert "f({})" in prompt(app, CHAT, cut, chat_template=TEMPLATES["hermes"])
    assert '"' not in prompt(app, CHAT, cut, chat_template=TEMPLATES["llama"])
    two = [USER, {"role": "assistant", "tool_calls": [call("{}"), call("{}")]}, USER]
    for name in ("llama", "mistral", "gemma", "deepseek"):
        assert prompt(app, CHAT, two, chat_template=TEMPLATES[name])


def test_calls_of_the_older_api_are_as_those_of_today(app_of: Callable[[str], App]) -> None:
    for given in ('{"a": "x', None, [1], {"a": 1}):
        function = {"name": "f", "arguments": given}
        said = {"role": "assistant", "content": None, "function_call": function}
        older = [USER, said, {"role": "function", "name": "f", "content": None}, USER]
        found = prompt(app_of("hermes"), CHAT, older)
        assert found == prompt(app_of("hermes"), CHAT, with_call(CHAT, given, None))
        assert post(app_of("hermes"), "/tokenize", {"messages": older}) == post(
            app_of("hermes"), "/tokenize", {"messages": with_call(CHAT, given, None)}
        )


def test_a_custom_call_may_have_input_of_any_form(app_of: Callable[[str], App]) -> None:
    app = app_of("hermes")
    given: tuple[tuple[dict[str, Any], str], ...] = (
        ({"input": "go"}, "go"),
        ({"input": None}, ""),
        ({}, ""),
        ({"input": {"a": 1}}, '{"a": 1}'),
        ({"input": [1]}, "[1]"),
    )
    for fields, text in given:
        shown = json.dumps({"input": text})
        called = {"id": "c", "type": "custom", "custom": {"name": "f", **fields}}
        said = [USER, {"role": "assistant", "tool_calls": [called]}, USER]
        assert f"f({shown})" in prompt(app, CHAT, said)
        item = {"type": "custom_tool_call", "call_id": "c", "name": "f", **fields}
        assert f"f({shown})" in prompt(app, RESPONSES, [USER, item, USER])
    function = {"name": "f", "arguments": "{}"}
    both = {"id": "c", "type": "function", "function": function, "custom": None}
    assert "f({})" in prompt(app, CHAT, [USER, {"role": "assistant", "tool_calls": [both]}, USER])


EMPTY: list[dict[str, Any]] = [{}, {"content": None}, {"content": []}]


@pytest.mark.parametrize("role", ["assistant", "system", "tool", "function", "developer", "user"])
def test_content_that_is_missing_is_an_empty_text(app_of: Callable[[str], App], role: str) -> None:
    app = app_of("words")
    plain = prompt(app, CHAT, [USER, {"role": role, "content": ""}, USER])
    for content in EMPTY:
        assert prompt(app, CHAT, [USER, {"role": role, **content}, USER]) == plain
    text_part = {"content": [{"type": "text", "text": None}]}
    assert prompt(app, CHAT, [USER, {"role": role, **text_part}, USER]) == plain


def test_an_answer_that_is_missing_is_an_empty_text(app_of: Callable[[str], App]) -> None:
    app = app_of("words")
    plain = prompt(app, CHAT, [USER, {"role": "assistant", "content": ""}, USER])
    for content in EMPTY:
        for path in (MESSAGES, RESPONSES):
            assert prompt(app, path, [USER, {"role": "assistant", **content}, USER]) == plain
    calls: list[dict[str, Any]] = [{"tool_calls": []}, {"tool_calls": None}]
    for more in calls:
        assert prompt(app, CHAT, [USER, {"role": "assistant", **more}, USER]) == plain
    for path in (CHAT, MESSAGES, RESPONSES):
        without = prompt(app, path, with_call(path, {}, ""))
        for result in (None, []):
            assert prompt(app, path, with_call(path, {}, result)) == without
    # Thoughts that reached the limit were all of the answer.
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]}
    for item in (thought, {"type": "reasoning", "encrypted_content": "a"}, {"type": "reasoning"}):
        assert prompt(app, RESPONSES, [USER, item, USER]) == plain
    blocks = ({"type": "thinking", "thinking": "Hm"}, {"type": "redacted_thinking", "data": "a"})
    for block in blocks:
        assert (
            prompt(app, MESSAGES, [USER, {"role": "assistant", "content": [block]}, USER]) == plain
        )


def test_a_refusal_is_what_was_said(app_of: Callable[[str], App]) -> None:
    app = app_of("words")
    plain = prompt(app, CHAT, [USER, {"role": "assistant", "content": "No."}, USER])
    part = {"type": "refusal", "refusal": "No."}
    for said in ({"content": None, "refusal": "No."}, {"content": [part]}):
        assert prompt(app, CHAT, [USER, {"role": "assistant", **said}, USER]) == plain
    item = {"type": "message", "role": "assistant", "content": [part]}
    assert prompt(app, RESPONSES, [USER, item, USER]) == plain


# Content besides text, by API, and a part of the sentence that replaces it.
PARTS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, IMAGE, "An image"),
    (CHAT, {"type": "input_audio", "input_audio": {"data": "a"}}, "An audio"),
    (CHAT, {"type": "video_url", "video_url": {"url": "a"}}, "A video"),
    (CHAT, {"type": "file", "file": {"file_id": "a"}}, "A file"),
    (CHAT, {"type": "thing"}, "Content of type thing"),
    (MESSAGES, {"type": "image", "source": {"type": "base64", "data": "a"}}, "An image"),
    (MESSAGES, {"type": "document", "source": {"type": "url", "url": "a"}}, "A document"),
    (MESSAGES, {"type": "server_tool_use", "id": "a", "name": "s", "input": {}}, "Content of type"),
    (MESSAGES, {"type": "web_search_tool_result", "content": {"error_code": "a"}}, "Content of"),
    (MESSAGES, {"type": "web_search_tool_result", "content": [{"type": "a"}]}, "Content of type"),
    (MESSAGES, {"type": "container_upload", "file_id": "a"}, "Content of type container_upload"),
    (RESPONSES, {"type": "input_image", "image_url": "a"}, "An image"),
    (RESPONSES, {"type": "input_file", "file_id": "a"}, "A file"),
]


@pytest.mark.parametrize(("path", "part", "words"), PARTS, ids=lambda one: str(one)[:40])
def test_content_besides_text_is_a_sentence_but_for_the_newest_message(
    app_of: Callable[[str], App], path: str, part: dict[str, Any], words: str
) -> None:
    app, text = app_of("words"), {"type": "input_text" if path == RESPONSES else "text"}
    text["text"] = "See:"
    user, said = ({"role": role, "content": [text, part]} for role in ("user", "assistant"))
    sentence = left_out(part["type"])
    assert sentence.startswith(f"[{words}") and sentence.endswith("]")
    answer = {"role": "assistant", "content": "A cat."}
    for turns in (
        [user, answer, USER],
        [USER, said, USER],
        [user, USER],
        with_call(path, {}, [part]),
    ):
        found = prompt(app, path, turns)
        assert sentence in found and found.count("[") == 1
    for turns in ([user], [USER, answer, user], [user, answer]):
        with pytest.raises(InvalidRequest, match=f"content of type '{part['type']}' is not supp"):
            prompt(app, path, turns)
    # The model called a tool because of the image before.
    if path == CHAT:
        assert sentence in prompt(app, path, [user, *with_call(CHAT, {})[1:3]])


def test_only_the_newest_message_of_a_user_must_say_something() -> None:
    nothing: Any
    for nothing in ("", None, []):
        [first, _] = plain_messages([{"role": "user", "content": nothing}, USER])
        assert first["content"] == ""
        with pytest.raises(InvalidRequest, match="content of a user's message is empty"):
            plain_messages([USER, {"role": "user", "content": nothing}])


def test_parts_without_text_are_no_text(app_of: Callable[[str], App]) -> None:
    app = app_of("words")
    for path, kind in ((CHAT, "text"), (RESPONSES, "output_text"), (MESSAGES, "text")):
        parts = [{"type": kind, "text": text} for text in ("", "a", None)]
        said = [{"role": "assistant", "content": each} for each in (parts, "a")]
        found = [prompt(app, path, [USER, each, USER]).replace("\n", "") for each in said]
        assert found[0] == found[1]


def test_an_empty_text_beside_results_says_nothing(app_of: Callable[[str], App]) -> None:
    app, [*before, given] = app_of("words"), with_call(MESSAGES, {})
    for block in ({"type": "text", "text": ""}, {"type": "text", "text": None}):
        both = given | {"content": [*given["content"], block]}
        assert prompt(app, MESSAGES, [*before, both]) == prompt(app, MESSAGES, [*before, given])


# Conversations whose results and calls do not belong together, as truncated ones do not.
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
WORDS = {"role": "assistant", "content": "a"}
CALLED = {"role": "assistant", "tool_calls": [call("{}")]}
TWICE = {"role": "assistant", "tool_calls": [call('{"a": 1}'), call("{}")]}
ODD: dict[str, list[dict[str, Any]]] = {
    "no call": [USER, RESULT, USER],
    "no call at the end": [USER, RESULT],
    "result first": [RESULT, USER],
    "result before its call": [USER, RESULT, CALLED, USER],
    "unknown id": [USER, CALLED, RESULT | {"tool_call_id": "x"}],
    "no id": [USER, {"role": "assistant", "tool_calls": [call("{}", id=None)]}, RESULT, USER],
    "result without an id": [USER, CALLED, {"role": "tool", "content": "ok"}],
    "two results": [USER, CALLED, RESULT, RESULT],
    "same ids": [USER, TWICE, RESULT, RESULT, USER],
    "no result": [USER, CALLED, USER],
    "no result at the end": [USER, CALLED],
    "one result of two": [USER, TWICE, RESULT, USER],
    "two answers": [USER, CALLED, CALLED, RESULT, {"role": "assistant", "content": "a"}, USER],
    "words after calls": [USER, CALLED, {"role": "assistant", "content": "a"}, RESULT, USER],
    "result after words": [USER, WORDS, RESULT, WORDS, USER],
    "words before calls": [USER, WORDS, CALLED, RESULT, WORDS, USER],
    "one result of two, then words": [USER, TWICE, RESULT, WORDS],
    "a null type": [USER, {"role": "assistant", "tool_calls": [call("{}", type=None)]}, USER],
    "an odd name": [
        USER,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "a", "function": {"name": "a b/\u00e9<|im_end|>", "arguments": "{"}}
            ],
        },
        RESULT,
        USER,
    ],
    "assistant first": [{"role": "assistant", "content": "Hello."}, USER],
    "users in a row": [USER, USER, {"role": "assistant", "content": "a"}, USER],
    "answers in a row": [USER, *[{"role": "assistant", "content": "a"}] * 2, USER],
    "system in between": [
        USER,
        {"role": "assistant", "content": "a"},
        {"role": "system", "content": "b"},
        USER,
    ],
}


@pytest.mark.parametrize("case", ODD)
def test_calls_and_results_need_not_belong_together(
    app_of: Callable[[str], App], case: str
) -> None:
    for name in TEMPLATES:
        if name == "gemma" and case == "system in between":
            continue  # it takes no system message at all
        found = prompt(app_of(name), CHAT, ODD[case])
        results = sum(message["role"] == "tool" for message in ODD[case])
        assert found.count("ok") == results, (name, found)


def test_a_refusal_of_the_newest_message_stays_one(app_of: Callable[[str], App]) -> None:
    for name, said in (
        ("gemma", [USER, USER]),
        ("gemma", [USER, {"role": "assistant", "content": "a"}, USER, USER]),
        ("gemma", [{"role": "assistant", "content": "a"}]),
        ("gemma_with_system", [USER, {"role": "critic", "content": "a"}]),
        ("gemma_with_system", [USER, {"role": "system", "content": "a"}]),
        ("mistral", [USER, USER]),
        ("{{ raise_exception('Hi') if 'Hi' in messages[0].content }}" + HEAD + TAIL, [USER]),
    ):
        with pytest.raises(InvalidRequest, match="the chat template refuses the messages"):
            prompt(app_of(name), CHAT, said)


def test_plainer_forms_say_the_same(app_of: Callable[[str], App]) -> None:
    two = {
        "role": "assistant",
        "content": "So.",
        "tool_calls": [call({"a": 1}), call({"b": 2}, id="c2")],
    }
    results = [{"role": "tool", "tool_call_id": n, "content": f"of {n}"} for n in ("c2", "c1")]
    found = prompt(app_of("llama"), CHAT, [USER, two, *results, USER])
    places = [found.index(text) for text in ('"b"', "of c2", '"a"', "of c1")]
    assert places == sorted(places) and found.count("So.") == 1
    found = prompt(app_of("mistral"), CHAT, [USER, two, *results, USER])
    assert found.count("call00001") == found.count("call00002") == 1
    found = prompt(app_of("gemma"), CHAT, [USER, two, *results, USER])
    for text in ("So.", '"b": 2', "of c2", '"a": 1', "of c1"):
        assert found.count(text) == 1
    # A template that takes the conversation renders it as it is.
    found = prompt(app_of("qwen"), CHAT, [USER, two, *results, USER])
    places = [found.index(text) for text in ('"a"', '"b"', "of c2", "of c1")]
    assert places == sorted(places)


def test_plainer_forms_take_time_in_proportion_to_a_conversation() -> None:
    def seconds(count: int) -> float:
        calls = [call({}, id=f"c{number}") for number in range(count)]
        said = {"role": "assistant", "content": "a", "tool_calls": calls}
        texts = [{"role": "user", "content": "x" * 999}] * count
        results = [{"role": "tool", "tool_call_id": "x", "content": "x" * 999}] * count
        before = time.thread_time()
        for reads_calls in (True, False):
            assert plainer_histories([*texts, said, *results, *results, USER], reads_calls)
        return time.thread_time() - before

    large, small = (min(seconds(count) for _ in range(3)) for count in (2000, 500))
    assert large < 8 * small


def test_half_a_character_ends_no_conversation(app_of: Callable[[str], App]) -> None:
    app = app_of("words")
    for path, field, said in (
        ("/tokenize", "messages", "user"),
        (f"{MESSAGES}/count_tokens", "messages", "user"),
        (f"{RESPONSES}/input_tokens", "input", "user"),
    ):
        whole = rb'{"%b": [{"role": "%b", "content": "a \ud83d\ude00 \\ud83d b%b"}]}'
        parts = (field.encode(), said.encode())
        plain = post(app, path, whole % (*parts, "\ufffd".encode()))
        assert plain[0] == 200
        for half in (rb"\ud83d", rb"\ude00", rb"\uD83D"):
            assert post(app, path, whole % (*parts, half)) == plain
        assert post(app, path, whole % (*parts, rb"\ud83d" + b"\xed"))[0] == 400


def test_a_call_with_half_a_character_is_answered(app_of: Callable[[str], App]) -> None:
    drawn = histories.read_as("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\ud83d"}}')
    app = app_of("hermes")
    for text, read in (("a\\ud83d", "a\ufffd"), ("\\ud83d b\\udc00", "\ufffd b\ufffd")):
        pieces = CustomInput()
        fed = "".join(pieces.feed(letter) for letter in '{"input": "%s"}' % text)  # noqa: UP031
        assert fed + pieces.finish() == read
    for streams in (False, True):
        blocks = histories.messages_answer(app.models.all[0], drawn, streams, random.Random(0))
        # A streamed call is as the model wrote it.
        assert blocks[0]["input"] == {"a": chr(0xD83D if streams else 0xFFFD)}
        said = [USER, {"role": "assistant", "content": blocks}, USER]
        assert post(app, f"{MESSAGES}/count_tokens", {"messages": said})[0] == 200


CUT: dict[str, Any] = {"temperature": 0, "tool_choice": "required"}
FLAT = {"type": "function", "name": "plan", "parameters": SCHEMA}


def ask(server: Server, path: str, streams: bool, **fields: Any) -> Any:
    """Return an answer, or the events of one."""
    answer = server.request(path, fields | {"stream": streams})
    assert answer.status == 200, answer.body
    return answer.events() if streams else answer.json()


def chat_message(answer: Any, streams: bool) -> dict[str, Any]:
    if not streams:
        return answer["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in answer if event != "[DONE]"]
    parts = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    text = "".join(part["function"].get("arguments") or "" for part in parts)
    function = {"name": parts[0]["function"]["name"], "arguments": text}
    return {"role": "assistant", "tool_calls": [{"id": parts[0]["id"], "function": function}]}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_calls_that_a_limit_cuts_are_sent_back_to_chats(server: Server, streams: bool) -> None:
    asked = {"messages": [USER], "tools": [TOOL], "max_tokens": 40}
    said = chat_message(ask(server, CHAT, streams, **asked, **CUT), streams)
    [one] = said["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(one["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": one["id"], "content": None}
    for more in ([result], [result, USER], [USER]):
        turns = [USER, said, *more]
        ask(server, CHAT, streams, messages=turns, max_tokens=2)
        ask(server, CHAT, streams, messages=turns, max_tokens=2, tools=[TOOL], tool_choice="none")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_calls_that_a_limit_cuts_are_sent_back_to_responses(server: Server, streams: bool) -> None:
    asked = {"input": "Hi", "tools": [FLAT], "max_output_tokens": 40, **CUT}
    first = ask(server, RESPONSES, streams, **asked)
    first = first[-1]["response"] if streams else first
    [item] = first["output"]
    assert first["status"] == "incomplete" and item["type"] == "function_call"
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": ""}
    turns = [{"role": "user", "content": "Hi"}, item, result]
    ask(server, RESPONSES, streams, input=turns, max_output_tokens=2)
    for more in ([result], "Go on."):
        before = {"previous_response_id": first["id"], "max_output_tokens": 2}
        ask(server, RESPONSES, streams, input=more, **before)
    talk = server.request("/v1/conversations", {"items": []}).json()["id"]
    ask(server, RESPONSES, streams, **asked, conversation=talk)
    for more in ([result], "Go on."):
        ask(server, RESPONSES, streams, input=more, conversation=talk, max_output_tokens=2)
    shown = server.request(f"/v1/conversations/{talk}/items?order=asc", method="GET").json()
    assert isinstance(shown["data"][1]["arguments"], str)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_calls_that_a_limit_cuts_are_sent_back_to_messages(server: Server, streams: bool) -> None:
    tool = {"name": "plan", "input_schema": SCHEMA}
    asked = {"messages": [USER], "tools": [tool], "max_tokens": 40, "temperature": 0}
    answer = ask(server, MESSAGES, streams, **asked, tool_choice={"type": "any"})
    block = answer[1]["content_block"] if streams else answer["content"][0]
    assert block["type"] == "tool_use" and block["input"] == {}
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": None}
    for given in ({}, None, '{"day": "m', [1]):
        said = {"role": "assistant", "content": [block | {"input": given}]}
        for more in ([{"role": "user", "content": [result]}], []):
            turns = [USER, said, *more]
            ask(server, MESSAGES, streams, messages=turns, max_tokens=2)


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "input_image", "image_url": "a"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_file"}]},
        {"role": "assistant", "content": [{"type": "input_audio"}]},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]},
    ],
    ids=str,
)
def test_conversations_are_made_of_text(app_of: Callable[[str], App], item: Any) -> None:
    app = app_of("words")
    talk = Conversation(None, {})
    app.conversations.keep(talk)
    for path in ("/v1/conversations", f"/v1/conversations/{talk.shown.id}/items"):
        status, answer = post(app, path, {"items": [USER, item]})
        assert status == 400 and answer["error"]["param"] == "items"
        assert "is not supported: only text is" in answer["error"]["message"]
    assert not talk.item_ids
    # In the input of a response, an image is refused in the newest message alone.
    asked = {"input": [item, USER], "conversation": talk.shown.id}
    assert post(app, f"{RESPONSES}/input_tokens", asked)[0] == 200


def test_tools_of_a_request_do_not_decide_how_arguments_are_printed(
    app_of: Callable[[str], App],
) -> None:
    # It reads no tools, so that they are described in a message.
    app, cut = app_of(TEMPLATES["qwen"].replace(TAIL, "{% endfor %}")), with_call(CHAT, '{"a": "x')
    huge = {"type": "function", "function": {"name": "g", "description": "x" * 100_000}}
    with pytest.raises(PromptTooLong):
        prompt(app, CHAT, cut, tools=[huge])
    assert 'f({"a": "x)' in prompt(app, CHAT, cut, tools=TOOLS)
