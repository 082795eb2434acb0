"""The official anthropic client against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.clients.conftest import ANSWER, KEY, MODEL, QUESTION

ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 64,
    "messages": [{"role": "user", "content": QUESTION}],
}


@pytest.fixture
def client(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_message(client: Anthropic) -> None:
    message = client.messages.create(**ASKED)
    [block] = message.content
    assert (block.type, block.text) == ("text", ANSWER)
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", MODEL)
    assert message.usage.output_tokens > 1
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"])
    usage = message.usage
    cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached


def test_stream(client: Anthropic) -> None:
    with client.messages.stream(**ASKED) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(**ASKED)
    assert said == ANSWER
    assert final.stop_reason == whole.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_async_stream(url: str) -> None:
    async def ask() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key=KEY) as client,
            client.messages.stream(**ASKED) as stream,
        ):
            return await stream.get_final_text()

    assert asyncio.run(ask()) == ANSWER


def test_stop_sequences_blocks_and_length(client: Anthropic) -> None:
    stopped = client.messages.create(**ASKED, stop_sequences=["o-t"])
    assert stopped.content[0].text == ANSWER.partition("o-t")[0]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "o-t")
    content = [{"type": "text", "text": QUESTION}]
    blocks = client.messages.create(**ASKED | {"messages": [{"role": "user", "content": content}]})
    assert blocks.content[0].text == ANSWER
    assert client.messages.create(**ASKED | {"max_tokens": 2}).stop_reason == "max_tokens"


REFUSED: dict[str, tuple[dict[str, Any], type[anthropic.APIStatusError]]] = {
    "range": ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError),
    "size": ({"max_tokens": -3}, anthropic.BadRequestError),
    "model": ({"model": "no-such-model"}, anthropic.NotFoundError),
    "messages": ({"messages": []}, anthropic.BadRequestError),
    "key": ({"extra_headers": {"Authorization": "Bearer no"}}, anthropic.AuthenticationError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_the_right_exceptions(client: Anthropic, case: str) -> None:
    change, kind = REFUSED[case]
    with pytest.raises(kind) as caught:
        client.messages.create(**ASKED | change)
    assert type(caught.value) is kind
    assert caught.value.body["type"] == "error"  # type: ignore[index]
