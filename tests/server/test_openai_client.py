"""The official client, unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.conftest import KEYS
from tests.support.live_server import Server

USER: Any = [{"role": "user", "content": "Reverse: s-t-o-n-e"}]
MODEL = "demo_model"


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as one:
        yield one


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=USER)
    assert whole.choices[0].message.content == "e-n-o-t-s"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage and whole.usage.completion_tokens == 10
    assert whole.usage.prompt_tokens_details
    with client.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "e-n-o-t-s"
    assert chunks[-1].usage and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    with client.chat.completions.stream(model=MODEL, messages=USER) as stream:
        assert stream.get_final_completion().choices[0].message.content == "e-n-o-t-s"


def test_several_choices(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=USER, n=2, temperature=1.5, seed=4, max_completion_tokens=12
    )
    assert [choice.index for choice in whole.choices] == [0, 1]
    again = client.chat.completions.create(
        model=MODEL, messages=USER, n=2, temperature=1.5, seed=4, max_completion_tokens=12
    )
    assert [c.message for c in again.choices] == [c.message for c in whole.choices]


def test_completions(client: openai.OpenAI) -> None:
    ids = client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=4)
    lists = client.completions.create(model=MODEL, prompt=[[5, 6, 7], [8, 9]], max_tokens=4)
    assert lists.choices[0].text == ids.choices[0].text
    assert [choice.index for choice in lists.choices] == [0, 1]
    with client.completions.create(model=MODEL, prompt="ab", max_tokens=9, stream=True) as stream:
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == client.completions.create(model=MODEL, prompt="ab", max_tokens=9).choices[0].text
    stopped = client.chat.completions.create(model=MODEL, messages=USER, stop=["-o", "zzz"])
    assert stopped.choices[0].message.content == "e-n"


def test_extras_go_through(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="a",
        max_tokens=6,
        extra_body={"top_k": 1, "min_tokens": 6, "ignore_eos": True, "return_token_ids": True},
    )
    assert len(answer.choices[0].model_dump()["token_ids"]) == 6


def test_responses(client: openai.OpenAI) -> None:
    assert (
        client.responses.create(model=MODEL, input="Reverse: s-t-o-n-e").output_text == "e-n-o-t-s"
    )
    with client.responses.stream(model=MODEL, input=USER) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "e-n-o-t-s"
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_the_asynchronous_client(server: Server) -> None:
    async def scene() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="any", max_retries=0
        ) as client:

            async def ask() -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=USER, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            assert await asyncio.gather(*[ask() for _ in range(12)]) == ["e-n-o-t-s"] * 12

    asyncio.run(scene())


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=USER, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nothing", messages=USER)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 2000)
    assert long.value.code == "context_length_exceeded"


def test_keys_have_their_class(narrow: Server) -> None:
    for key, good in (("wrong", False), (KEYS[1], True)):
        with openai.OpenAI(base_url=f"{narrow.url}/v1", api_key=key, max_retries=0) as client:
            if good:
                assert client.models.list()
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()


def test_a_full_queue_has_its_class(narrow: Server) -> None:
    body = {"prompt": [5], "max_tokens": 600, "ignore_eos": True, "n": 3}
    with (
        narrow.open_stream(body),
        openai.OpenAI(base_url=f"{narrow.url}/v1", api_key=KEYS[0], max_retries=0) as client,
    ):
        narrow.wait_for("num_requests_waiting", lambda value: value == 2)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="a")
