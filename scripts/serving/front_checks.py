"""Checks that a router answers a client as a replica does: one function for each subject."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import anthropic
import openai
from openai import OpenAI

from scripts.lib.server_process import read_metric
from scripts.serving.front_process import KEY, MODEL, Front

QUESTION, ANSWER = "Reverse: s-t-o-n-e", "e-n-o-t-s"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["mon", "tue"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
CHOICE: Any = {"type": "function", "function": {"name": "look_up"}}
_LONG: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
_WAIT_S = 30.0


def client(front: Front, retries: int = 0) -> OpenAI:
    """Return the openai client of a router. It repeats no request by itself."""
    return OpenAI(base_url=front.url + "/v1", api_key=KEY, max_retries=retries, timeout=60)


def check_answer(api: OpenAI) -> None:
    answer = api.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER


def refusal(call: Callable[..., Any], **fields: Any) -> openai.APIStatusError:
    """Return the error that a call must end with."""
    try:
        call(**fields)
    except openai.APIStatusError as error:
        return error
    raise AssertionError(f"{fields} was answered")


def check_chat(front: Front) -> None:
    """Check chat and completions, whole and streamed, with their usage."""
    with client(front) as api:
        whole = api.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert whole.choices[0].message.content == ANSWER and whole.usage
        *chunks, last = api.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
        assert last.usage and last.usage.completion_tokens == whole.usage.completion_tokens
        ask: dict[str, Any] = {"model": MODEL, "prompt": ["What is", "x"], "max_tokens": 8, **_LONG}
        texts = [choice.text for choice in api.completions.create(**ask).choices]
        streamed = ["", ""]
        for chunk in api.completions.create(**ask, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == texts and all(texts)


def check_token_ids(front: Front) -> None:
    """Check a prompt of token ids, and an answer that has them too."""
    with client(front) as api:
        answer = api.completions.create(
            model=MODEL,
            prompt=[5, 6, 7],
            max_tokens=8,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
    assert answer.choices[0].prompt_token_ids == [5, 6, 7]  # type: ignore[attr-defined]
    assert len(answer.choices[0].token_ids) == 8  # type: ignore[attr-defined]


def check_fields(front: Front) -> None:
    """Check tools, schemas, log-probabilities, and fields that only this engine and vLLM have."""
    ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
    with client(front) as api:
        [call] = (
            api.chat.completions.create(**ask, tools=[TOOL], tool_choice=CHOICE)
            .choices[0]
            .message.tool_calls
        )
        assert call.function.name == "look_up"
        assert json.loads(call.function.arguments)["day"] in ("mon", "tue")
        schema = TOOL["function"]["parameters"]
        answer = api.chat.completions.create(
            **ask,
            response_format={"type": "json_schema", "json_schema": {"name": "d", "schema": schema}},
        )
        assert json.loads(answer.choices[0].message.content)["day"] in ("mon", "tue")
        [choice] = api.chat.completions.create(
            **ask,
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_token_ids": True, "min_tokens": 2, "top_k": 1},
        ).choices
        assert choice.logprobs and len(choice.logprobs.content[0].top_logprobs) == 2
        assert len(choice.token_ids) == len(choice.logprobs.content)  # type: ignore[attr-defined]


def check_responses(front: Front) -> None:
    """Check POST /v1/responses, whole and streamed."""
    with client(front) as api:
        assert api.responses.create(model=MODEL, input=QUESTION).output_text == ANSWER
        events = list(api.responses.create(model=MODEL, input=QUESTION, stream=True))
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(said) == ANSWER


def check_messages(front: Front) -> None:
    """Check Anthropic's POST /v1/messages by its own client."""
    with anthropic.Anthropic(base_url=front.url, auth_token=KEY, max_retries=0) as api:
        answer = api.messages.create(model=MODEL, max_tokens=32, messages=MESSAGES)
    assert answer.content[0].text == ANSWER  # type: ignore[union-attr]


def check_models(front: Front) -> None:
    with client(front) as api:
        assert [model.id for model in api.models.list()] == [MODEL]


def check_errors(front: Front) -> None:
    """Check that refusals of a replica are the exceptions of the client."""
    ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
    cases: list[tuple[dict[str, Any], type[openai.APIStatusError]]] = [
        ({"temperature": -1}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
        ({"model": "no-such-model"}, openai.NotFoundError),
        ({"extra_headers": {"Authorization": "Bearer no"}}, openai.AuthenticationError),
    ]
    with client(front) as api:
        for change, kind in cases:
            for stream in (False, True):
                error = refusal(api.chat.completions.create, **(ask | change), stream=stream)
                assert type(error) is kind, f"{change}: {error.status_code} {error.message}"
                assert error.message and error.body, f"{change}: no error object"


def check_full_queue(front: Front) -> None:
    """Check that 429 and Retry-After reach the client, whose own retries find room."""
    ask: dict[str, Any] = {"model": MODEL, "prompt": "x", "n": 16, "max_tokens": 900}
    ask |= {"stream": True, "extra_body": {"ignore_eos": True}}
    with client(front) as api, ExitStack() as stack:
        for _ in front.replicas:  # eight completions run, and eight wait: no more is taken
            stack.enter_context(api.completions.create(**ask))
        error = refusal(api.chat.completions.create, model=MODEL, messages=MESSAGES)
        assert error.status_code == 429, f"{error.status_code} {error.message}"
        assert int(error.response.headers["retry-after"]) >= 1
    with client(front, retries=5) as api:
        check_answer(api)
    wait_until_idle(front)


def check_abort(front: Front) -> None:
    """Check that a replica ends the request of a client that leaves."""
    with (
        client(front) as api,
        api.completions.create(model=MODEL, prompt="x", max_tokens=900, stream=True, **_LONG) as it,
    ):
        next(iter(it))
    wait_until_idle(front)
    aborted = sum(read_metric(replica.url, "request_success_total") for replica in front.replicas)
    assert aborted >= 1


def check_prefixes(front: Front) -> None:
    """Check that requests with a common prefix reach one replica, and others both."""
    prefix = "the quick brown fox jumps over the lazy dog and runs away " * 4

    def queries() -> list[float]:
        return [read_metric(each.url, "prefix_cache_queries_total") for each in front.replicas]

    start = queries()
    with client(front) as api:
        api.completions.create(model=MODEL, prompt=prefix, max_tokens=1)
        before = queries()
        for number in range(6):
            api.completions.create(model=MODEL, prompt=f"{prefix}{number}", max_tokens=1)
        moved = [after - was for after, was in zip(queries(), before, strict=True)]
        assert sorted(map(bool, moved)) == [False, True], moved
    send_at_once(front)
    assert all(after > was for after, was in zip(queries(), start, strict=True))


def send_at_once(front: Front, count: int = 8) -> None:
    """Send prompts without a common prefix at once, so that routers balance them by load."""

    def send(number: int) -> None:
        prompt = f"{(time.monotonic_ns() + number) % 10**9:09} " * 8
        api.completions.create(model=MODEL, prompt=prompt, max_tokens=64, **_LONG)

    with client(front, retries=2) as api, ThreadPoolExecutor(count) as threads:
        list(threads.map(send, range(count)))


def check_drain(front: Front) -> None:
    """Check that after SIGTERM to a replica its stream goes on, and the other answers new requests.

    The replica is gone afterwards. Its stream may end before the router's next health check. Until
    then vLLM's router answers 500 for requests that it sends there. So the client repeats a request
    twice, which is its default.
    """
    wait_until_idle(front)  # of requests that a client has just abandoned

    def prompts() -> list[float]:
        return [read_metric(each.url, "prompt_tokens_total") for each in front.replicas]

    before = prompts()
    with client(front, retries=2) as api:
        stream = api.completions.create(
            model=MODEL, prompt="x", max_tokens=900, stream=True, **_LONG
        )
        chunks = iter(stream)
        next(chunks)
        # A counter, because on a busy machine the stream may have ended before metrics are read.
        [victim] = [
            replica
            for replica, after, was in zip(front.replicas, prompts(), before, strict=True)
            if after > was
        ]
        victim.process.send_signal(signal.SIGTERM)
        for _ in range(20):
            check_answer(api)
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
        victim.process.wait(_WAIT_S)
        for _ in range(20):
            check_answer(api)


CHECKS: dict[str, Callable[[Front], None]] = {
    "chat and completions, whole and streamed": check_chat,
    "prompts of token ids": check_token_ids,
    "tools, schemas, log-probabilities, fields of vLLM": check_fields,
    "Responses": check_responses,
    "Anthropic's Messages": check_messages,
    "GET /v1/models": check_models,
    "refusals are the client's exceptions": check_errors,
    "429 and Retry-After of a full queue": check_full_queue,
    "a client that leaves ends its request": check_abort,
    "one prefix to one replica, others to both": check_prefixes,
    "SIGTERM drains: its stream whole, no refusal": check_drain,
}


def wait_until_idle(front: Front) -> None:
    end = time.monotonic() + _WAIT_S
    while any(
        read_metric(replica.url, name)
        for replica in front.replicas
        for name in ("num_requests_running", "num_requests_waiting")
    ):
        assert time.monotonic() < end, "requests of a client that left run on"
        time.sleep(0.05)
