"""The official openai client, unchanged, against SmolLM2 as `jaxserve serve` serves it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from scripts.lib.server_process import Server
from tests.real.conftest import Real
from tests.real.engines import SETTINGS
from tests.real.prompts import chats, texts
from tests.real.test_tokens import PACKED
from tests.support.own_programs import own_programs

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


def arguments(path: Path) -> list[str]:
    """Return the options of `jaxserve serve` for the settings of `tests.real.engines`."""
    said = [str(path), "--served-model-name", "smollm2"]
    for name, value in {**SETTINGS, "compilation_cache_dir": path.parent / "compiled"}.items():
        said.append("--" + name.replace("_", "-"))
        if value is not True:
            said.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return said


@pytest.fixture(scope="module")
def client(smollm2: Real) -> Iterator[openai.OpenAI]:
    with own_programs(), Server(*arguments(smollm2.path)) as server:
        url = server.url + "/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client


def ask(client: openai.OpenAI, messages: Any, **fields: Any) -> Any:
    fields = {"model": "smollm2", "temperature": 0, "max_tokens": 16, **fields}
    return client.chat.completions.create(messages=messages, **fields)


def test_answers_are_the_references(client: openai.OpenAI, smollm2: Real) -> None:
    tokenizer = smollm2.loaded.tokenizer
    assert tokenizer is not None
    wanted = smollm2.reference["prompts"][len(texts()) :]
    for chat, want in list(zip(chats(), wanted, strict=True))[::5]:
        answer = ask(client, chat)
        assert answer.choices[0].message.content == tokenizer.decode(want["greedy"]).rstrip(
            "\ufffd"
        )
        assert answer.usage.prompt_tokens == len(want["ids"])
        assert answer.usage.completion_tokens == len(want["greedy"])
        ended = want["greedy"][-1] == 2
        assert answer.choices[0].finish_reason == ("stop" if ended else "length")
        pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, chat, stream=True)]
        assert "".join(pieces) == answer.choices[0].message.content


def test_completions_continue_a_prompt(client: openai.OpenAI, smollm2: Real) -> None:
    tokenizer = smollm2.loaded.tokenizer
    assert tokenizer is not None
    want = smollm2.reference["prompts"][0]
    answer = client.completions.create(
        model="smollm2", prompt=texts()[0], temperature=0, max_tokens=16, logprobs=1
    )
    assert answer.choices[0].text == tokenizer.decode(want["greedy"])
    scores = answer.choices[0].logprobs
    assert scores is not None and scores.token_logprobs is not None
    assert scores.token_logprobs == pytest.approx(want["greedy_logprobs"], abs=PACKED)


def test_a_schema_and_a_tool_are_kept_to(client: openai.OpenAI) -> None:
    form = {"name": "weather", "schema": TOOL["function"]["parameters"], "strict": True}
    told = {"type": "json_schema", "json_schema": form}
    for temperature in (0, 1):
        answer = ask(client, QUESTION, max_tokens=80, temperature=temperature, response_format=told)
        assert set(json.loads(answer.choices[0].message.content)) == {"city", "unit"}
    named = {"type": "function", "function": {"name": "weather"}}
    fields = {"tools": [TOOL], "tool_choice": named, "max_tokens": 80}
    [call] = ask(client, QUESTION, **fields).choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    streamed = ""
    for chunk in ask(client, QUESTION, stream=True, **fields):
        for part in chunk.choices[0].delta.tool_calls or ():
            streamed += part.function.arguments or ""
    assert streamed == call.function.arguments


def test_stop_strings_and_seeds(client: openai.OpenAI) -> None:
    free = ask(client, QUESTION).choices[0].message.content
    stop = free[6:11]
    cut = ask(client, QUESTION, stop=[stop]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (free[: free.index(stop)], "stop")
    several = [
        [
            choice.message.content
            for choice in ask(client, QUESTION, temperature=1, seed=7, n=3).choices
        ]
        for _ in range(2)
    ]
    assert several[0] == several[1] and len(set(several[0])) > 1
