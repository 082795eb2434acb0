"""The official openai client against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.clients.conftest import ANSWER, KEY, MODEL, QUESTION

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert (choice.finish_reason, choice.index) == ("stop", 0)
    assert answer.usage and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer._request_id


def test_chat_streams_what_it_would_answer(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    options: Any = {"include_usage": True}
    with client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options=options
    ) as stream:
        *chunks, last = stream
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert not last.choices and last.usage and whole.usage
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_the_stream_helper_gives_the_final_completion(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        said = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(said) == final.choices[0].message.content == ANSWER


def test_async_answers_do_not_mix(url: str) -> None:
    words = ["abc", "stone", "horse", "lamp", "grey", "book", "tree", "cloud"]

    async def ask_all() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=KEY) as client:

            async def one(word: str) -> str:
                content = "Reverse: " + "-".join(word)
                parts = await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": content}], stream=True
                )
                said = [chunk.choices[0].delta.content or "" async for chunk in parts]
                return "".join(said)

            return await asyncio.gather(*map(one, words))

    assert asyncio.run(ask_all()) == ["-".join(reversed(word)) for word in words]


def test_prompts_as_text_as_ids_and_as_lists(client: OpenAI) -> None:
    def complete(prompt: Any, **extra: Any) -> Any:
        return client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=8, temperature=0, extra_body=extra
        )

    texts = ["What is", "The code of"]
    alone = [complete(text, return_token_ids=True).choices[0] for text in texts]
    ids = [choice.prompt_token_ids for choice in alone]
    answers = [choice.text for choice in alone]
    assert [complete(one).choices[0].text for one in ids] == answers
    for prompts in (texts, ids):
        choices = complete(prompts).choices
        assert [choice.text for choice in choices] == answers
        assert [choice.index for choice in choices] == [0, 1]
    echoed = client.completions.create(
        model=MODEL, prompt=ids[0], max_tokens=8, temperature=0, echo=True
    )
    assert echoed.choices[0].text.endswith(answers[0]) and "What is" in echoed.choices[0].text


def test_two_choices_streamed_and_whole_are_equal(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "What", "max_tokens": 12}
    asked |= {"n": 2, "temperature": 1.0, "seed": 7}
    asked["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    whole: Any = client.completions.create(**asked)
    ids = {choice.index: choice.token_ids for choice in whole.choices}
    texts = {choice.index: choice.text for choice in whole.choices}
    assert set(ids) == {0, 1} and ids[0] != ids[1]
    assert [len(one) for one in ids.values()] == [12, 12]
    streamed: dict[int, list[int]] = {0: [], 1: []}
    pieces = {0: "", 1: ""}
    for chunk in client.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        streamed[choice.index] += choice.token_ids
        pieces[choice.index] += choice.text
    assert (streamed, pieces) == (ids, texts)


def test_logprobs(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 3}
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert choice.message.content == ANSWER
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(ANSWER)
    for entry in choice.logprobs.content:
        assert entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 3
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [e.token for e in choice.logprobs.content]
    scored = client.completions.create(
        model=MODEL, prompt="What", logprobs=2, echo=True, max_tokens=0
    ).choices[0]
    assert scored.logprobs is not None and scored.logprobs.token_logprobs is not None
    assert scored.text == "What" and scored.logprobs.token_logprobs[0] is None


@pytest.mark.parametrize("stream", [False, True])
def test_stop(client: OpenAI, stream: bool) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "stop": ["o-t", "zz"], "stream": stream}
    answer: Any = client.chat.completions.create(**asked)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        text = "".join(choice.delta.content or "" for choice in choices)
        last = choices[-1]
    else:
        [last] = answer.choices
        text = last.message.content
    assert text == ANSWER.partition("o-t")[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "o-t")


def test_length(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == 3


def test_models(client: OpenAI) -> None:
    [model] = client.models.list()
    assert model.id == MODEL == client.models.retrieve(MODEL).id


def test_responses(client: OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION)
    assert (answer.output_text, answer.status) == (ANSWER, "completed")
    with client.responses.stream(model=MODEL, input=QUESTION) as stream:
        events = list(stream)
        final = stream.get_final_response()
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(said) == final.output_text == ANSWER


class Plan(BaseModel):
    """An answer's form, which a small model can fill in briefly."""

    day: Literal["mon", "tue"]
    sure: bool


def test_parse(client: OpenAI) -> None:
    chat = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Plan)
    response = client.responses.parse(model=MODEL, input=QUESTION, text_format=Plan)
    for parsed in (chat.choices[0].message.parsed, response.output_parsed):
        assert isinstance(parsed, Plan)
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Plan
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Plan)


REFUSED: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str | None]] = {
    "range": ({"temperature": -1}, openai.BadRequestError, "temperature"),
    "type": ({"extra_body": {"top_k": "many"}}, openai.BadRequestError, "top_k"),
    "size": ({"extra_body": {"n": 10**9}}, openai.BadRequestError, "n"),
    "model": ({"model": "no-such-model"}, openai.NotFoundError, "model"),
    "messages": ({"messages": []}, openai.BadRequestError, "messages"),
    "key": ({"extra_headers": {"Authorization": "Bearer no"}}, openai.AuthenticationError, None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_the_right_exceptions(client: OpenAI, case: str, stream: bool) -> None:
    change, kind, param = REFUSED[case]
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "stream": stream} | change
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**asked)
    assert type(caught.value) is kind
    assert caught.value.param == param
    assert caught.value.request_id and caught.value.code


def test_a_full_queue_is_a_rate_limit_error(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "x", "n": 16, "max_tokens": 1000, "stream": True}
    # Eight run and eight wait, which is all that this server takes.
    full = client.completions.create(**asked, extra_body={"ignore_eos": True})
    with full, pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    # The stream was closed unread: the client's own retries find room.
    patient = client.with_options(max_retries=5)
    answer = patient.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER


def test_a_client_that_gives_up_is_no_trouble(client: OpenAI) -> None:
    # Eight long answers at once: no machine writes them in the time that the client waits.
    asked: Any = {"model": MODEL, "prompt": "x", "n": 8, "max_tokens": 1000, "timeout": 0.03}
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**asked, extra_body={"ignore_eos": True})
