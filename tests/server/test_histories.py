"""Histories: what a server has answered, and what other clients made of it, never ends a talk."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import msgspec
import pytest

from jaxserve.engine.text.messages import left_out, plain_messages
from jaxserve.errors import InvalidRequest
from jaxserve.server.api.conversations import as_template_messages, template_ids
from jaxserve.server.http.app import App
from jaxserve.server.kept.conversation_store import Conversation
from jaxserve.server.kept.response_store import Turn
from jaxserve.server.schema import anthropic, responses
from jaxserve.server.schema.arguments import MAX_DEPTH, given_arguments
from jaxserve.server.schema.functions import as_tools
from jaxserve.server.schema.openai import ChatRequest
from jaxserve.server.schema.response_items import shown_items
from jaxserve.server.served.models import ServedModel
from tests.server import histories
from tests.server.histories import IMAGE, TOOLS
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
    "qwen": calling(
        "{% set a = c.function.arguments %}{{ a if a is string else (a | tojson) }}"
    ),
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
        "{% for m in messages | rejectattr('role', 'equalto', 'tool') "
        "| selectattr('tool_calls', 'undefined') %}" + ALTERNATE + "{% endfor %}"
        "{% for m in messages %}{% set i = m.tool_call_id if m.role == 'tool' else "
        "(m.tool_calls[0].id if m.tool_calls else 'aaaaaaaaa') %}{% if i | length != 9 %}"
        "{{ raise_exception('nine letters') }}{% endif %}{{ m.role + m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    ),
    "gemma": "{% for m in messages %}" + ALTERNATE + "{{ m.role + (m.content | trim) }}{% endfor %}",
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


@pytest.fixture
def app_of(make_app: Callable[..., App]) -> Callable[[str], App]:
    """Applications by the name of their template."""
    made: dict[str, App] = {}

    def app(name: str) -> App:
        if name not in made:
            made[name] = make_app(chat_template=TEMPLATES.get(name, name))
        return made[name]

    return app


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
    for path, body in (
        ("/tokenize", {"messages": chat, "tools": TOOLS if is_told else None}),
        (f"{MESSAGES}/count_tokens", {"messages": messages, "tools": named}),
        (f"{MESSAGES}/count_tokens", {"messages": messages[:-1], "tools": named}),
        (f"{RESPONSES}/input_tokens", {"input": items, "tools": flat}),
        (f"{RESPONSES}/input_tokens", {"input": "Go on.", "previous_response_id": parent.id}),
        (f"{RESPONSES}/input_tokens", {"input": "Go on.", "conversation": kept.shown.id}),
    ):
        status, answer = post(app, path, body)
        assert status == 200, (seed, path, answer, body)


@pytest.mark.parametrize(
    "cases", [70, pytest.param(5000, marks=pytest.mark.long)], ids=["usual", "long"]
)
def test_every_answer_can_be_sent_back(app_of: Callable[[str], App], cases: int) -> None:
    names = list(TEMPLATES)
    for seed in range(cases):
        check_all(app_of(names[seed % len(names)]), seed)
