"""Fields of completions and chats: their effects on an answer, whole and streamed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.server.test_parameters import refuse
from tests.support.live_server import SMALL, Canary, Server

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Reverse: s-t-o-n-e"
MESSAGES = [{"role": "user", "content": PROMPT}]
TOLERANCE = {"rtol": 0, "atol": 1e-3}  # of float32, against float64
VOCABULARY = 511


@pytest.fixture(scope="module")
def open_server() -> Iterator[Server]:
    """Start a server that scores all of the vocabulary and reports times, with a cache to reset.

    Rows take few tokens of a step, so that other rows do not wait for a long prompt.
    """
    more = "--max-logprobs -1 --enable-per-request-metrics --server-dev-mode"
    more += " --long-prefill-token-threshold 16"
    with Server([*SMALL, *more.split()]) as server:
        yield server


@pytest.fixture(scope="module")
def open_canary(open_server: Server) -> Canary:
    return Canary(open_server)


@pytest.fixture
def wide(open_server: Server, open_canary: Canary) -> Iterator[Server]:
    """Return the open server, and check after each test that it is unchanged."""
    yield open_server
    open_canary.check()


def test_tokens_are_scored_by_name(server: Server, oracle: Callable, tokenizer: Any) -> None:
    listed = [70, 5, 300]
    asked = {"logprob_token_ids": listed, "max_tokens": 6, "temperature": 0}
    more = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    body = {"prompt": PROMPT, "logprobs": 1} | asked | more
    [choice] = server.request(TEXT, body).json()["choices"]
    prompt, drawn = choice["prompt_token_ids"], choice["token_ids"]
    expected = oracle(prompt + drawn)[len(prompt) - 1 :]
    for token, row, best in zip(drawn, expected, choice["logprobs"]["top_logprobs"], strict=False):
        assert set(best) == {f"token_id:{number}" for number in (*listed, token)}
        for name, value in best.items():
            np.testing.assert_allclose(value, row[int(name[9:])], **TOLERANCE)
    streamed = server.request(TEXT, body | {"stream": True}).events()[:-1]
    found = [best for e in streamed for best in e["choices"][0]["logprobs"]["top_logprobs"]]
    assert found == choice["logprobs"]["top_logprobs"]
    chat = {"messages": MESSAGES, "logprobs": True} | asked | more
    answer = server.request(CHAT, chat).json()
    [entry, *_] = answer["choices"][0]["logprobs"]["content"]
    row = oracle(answer["prompt_token_ids"])[-1]
    shown = [answer["choices"][0]["token_ids"][0], *listed]  # as vLLM, the drawn token too
    assert [scored["token"] for scored in entry["top_logprobs"]] == [f"token_id:{t}" for t in shown]
    values = [scored["logprob"] for scored in entry["top_logprobs"]]
    np.testing.assert_allclose(values, row[shown], **TOLERANCE)


def test_all_of_the_vocabulary_is_scored(wide: Server, oracle: Callable) -> None:
    more = {"max_tokens": 2, "temperature": 0, "return_token_ids": True, "prompt_logprobs": -1}
    ids = {"return_tokens_as_token_ids": True}
    [choice] = wide.request(TEXT, {"prompt": PROMPT, "logprobs": -1} | more | ids).json()["choices"]
    prompt, drawn = choice["prompt_token_ids"], choice["token_ids"]
    expected = oracle(prompt + drawn)
    [first, *others] = choice["prompt_logprobs"]
    assert first is None and len(others) == len(prompt) - 1
    for entry, row in zip(others, expected, strict=False):
        got = np.array([entry[str(token)]["logprob"] for token in range(VOCABULARY)])
        np.testing.assert_allclose(got, row, **TOLERANCE)
    best = choice["logprobs"]["top_logprobs"]
    assert [len(entry) for entry in best] == [VOCABULARY] * 2
    np.testing.assert_allclose(
        [best[0][f"token_id:{token}"] for token in range(VOCABULARY)],
        expected[len(prompt) - 1],
        **TOLERANCE,
    )
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1} | more
    answer = wide.request(CHAT, chat).json()
    [entry, *_] = answer["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == VOCABULARY
    assert len(answer["prompt_logprobs"][1]) == VOCABULARY


def test_prompts_side_by_side_are_scored_on_the_host(wide: Server, oracle: Callable) -> None:
    """Eight rows of 16 tokens fill a step, at whose end no 32 positions are left."""
    prompts = np.random.default_rng(1).integers(4, 500, (8, 40)).tolist()
    body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 21}
    for ids, choice in zip(prompts, wide.request(TEXT, body).json()["choices"], strict=True):
        scored = choice["prompt_logprobs"][1:]
        assert {len(entry) for entry in scored} <= {21, 22}
        found = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], scored, strict=True)]
        np.testing.assert_allclose(found, oracle(ids)[np.arange(39), ids[1:]], **TOLERANCE)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_scores_its_prompt_first(server: Server, n: int) -> None:
    more = {"max_tokens": 5, "prompt_logprobs": 2, "n": n, "seed": 1, "temperature": 1.0}
    body = {"prompt": [PROMPT, "ab"]} | more
    whole = server.request(TEXT, body).json()["choices"]
    first: dict[int, Any] = {}
    for event in server.request(TEXT, body | {"stream": True}).events()[:-1]:
        [choice] = event["choices"]
        assert ("prompt_logprobs" in choice) is (choice["index"] not in first)
        first.setdefault(choice["index"], choice)
    for choice in whole:
        same_scores(first[choice["index"]]["prompt_logprobs"], choice["prompt_logprobs"])
    chat = {"messages": MESSAGES} | more
    answer = server.request(CHAT, chat).json()
    events = server.request(CHAT, chat | {"stream": True}).events()[:-1]
    [found] = [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event]
    same_scores(found, answer["prompt_logprobs"])
    assert n > 1 or "prompt_logprobs" in events[0]
    texts = [""] * n
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]


def test_a_stream_waits_for_the_scores_of_its_prompt(wide: Server) -> None:
    """The second completion finds its prompt cached, so it is ahead of the prompt's scores."""
    body = {"prompt": [7] * 280, "n": 2, "max_tokens": 3, "seed": 1, "temperature": 1.0}
    wide.request(TEXT, body)
    scored = body | {"prompt_logprobs": 0, "stream": True}
    first: dict[int, Any] = {}
    for event in wide.request(TEXT, scored).events()[:-1]:
        [choice] = event["choices"]
        first.setdefault(choice["index"], choice)
    for choice in first.values():
        assert len(choice["prompt_logprobs"]) == 280
    del scored["prompt"]
    long = [{"role": "user", "content": "a" * 280}]
    wide.request(CHAT, scored | {"messages": long, "stream": False})
    events = wide.request(CHAT, scored | {"messages": long}).events()[:-1]
    [found] = [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event]
    drawn = [event for event in events if any(c["delta"].get("content") for c in event["choices"])]
    assert (
        len(found) > 30
        and events.index(drawn[0])
        >= [index for index, event in enumerate(events) if "prompt_logprobs" in event].pop()
    )


def same_scores(found: list[Any], want: list[Any]) -> None:
    assert found[0] is want[0] is None and len(found) == len(want)
    for entry, other in zip(found[1:], want[1:], strict=True):
        assert entry.keys() == other.keys()
        for token, scored in entry.items():
            np.testing.assert_allclose(scored["logprob"], other[token]["logprob"], **TOLERANCE)


def test_128_completions_of_a_prompt(server: Server) -> None:
    body = {"prompt": PROMPT, "n": 128, "seed": 7, "max_tokens": 2, "best_of": 128}
    choices = server.request(TEXT, body | {"return_token_ids": True}).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(128))
    for index in (0, 77, 127):  # choice i equals a request alone with choice i's seed
        alone = {"prompt": PROMPT, "seed": 7 + index, "max_tokens": 2, "return_token_ids": True}
        [choice] = server.request(TEXT, alone).json()["choices"]
        assert choice["token_ids"] == choices[index]["token_ids"]
    chat = {"messages": MESSAGES, "n": 128, "seed": 7, "max_tokens": 1}
    assert len(server.request(CHAT, chat).json()["choices"]) == 128


def test_a_prompt_is_cut_on_either_side(server: Server, tokenizer: Any) -> None:
    ids = tokenizer.encode(PROMPT)
    more = {"truncate_prompt_tokens": 3, "max_tokens": 1, "return_token_ids": True}
    for side, kept in ((None, ids[-3:]), ("left", ids[-3:]), ("right", ids[:3])):
        asked = more | {"truncation_side": side}
        [choice] = server.request(TEXT, {"prompt": PROMPT} | asked).json()["choices"]
        assert choice["prompt_token_ids"] == kept
    plain = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    whole = server.request(CHAT, plain).json()["prompt_token_ids"]
    cut = server.request(CHAT, plain | more | {"truncation_side": "right"}).json()
    assert cut["prompt_token_ids"] == whole[:3]


def test_answers_carry_their_times(wide: Server, server: Server) -> None:
    names = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"}
    for path, body in ((TEXT, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})):
        body |= {"max_tokens": 4, "ignore_eos": True, "min_tokens": 4}
        metrics = wide.request(path, body).json()["metrics"]
        assert set(metrics) == names | {"tokens_per_second"}
        assert all(value >= 0 for value in metrics.values())
        assert math.isclose(metrics["generation_time_ms"], 3 * metrics["mean_itl_ms"])
        # the two choices have no common metrics
        assert wide.request(path, body | {"n": 2}).json()["metrics"] is None
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        *events, last, _ = wide.request(path, streamed).events()
        assert set(last["metrics"]) == set(metrics)
        assert not any("metrics" in event for event in events)
        assert "metrics" not in server.request(path, body).json()


def test_the_prefix_cache_is_reset(wide: Server, server: Server) -> None:
    body = {"prompt": "a" * 100, "max_tokens": 1}

    def cached() -> int:
        usage = wide.request(TEXT, body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    for query in ("", "?reset_running_requests=true&reset_external=false"):
        assert wide.request(f"/reset_prefix_cache{query}", {}).json() == {"success": True}
        assert cached() == 0 < cached()
    bad = wide.request("/reset_prefix_cache?reset_running_requests=maybe", {})
    assert (bad.status, bad.error["param"]) == (400, "reset_running_requests")
    assert server.request("/reset_prefix_cache", {}).status == 404


def test_lists_longer_than_the_vocabulary_are_refused_there_too(wide: Server) -> None:
    for value in (VOCABULARY + 1, 2**31):
        assert refuse(wide, TEXT, {"logprobs": value})["param"] == "logprobs"
