"""Logprobs over HTTP, against Transformers on the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.server.test_parameters import LONGEST, refuse
from tests.support.live_server import Server

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "The caf\u00e9 says: na\u00efve \U0001f600 one"
MESSAGES = [{"role": "user", "content": "Reverse: s-t-o-n-e"}]
TOLERANCE = {"rtol": 0, "atol": 1e-3}  # of float32, against float64


def check_best(best: list[tuple[str, float]], row: np.ndarray, k: int, tokenizer: Any) -> None:
    """Check the k best tokens of a distribution, in any order where rounding makes them equal."""
    top = np.sort(row)[::-1][:k]
    np.testing.assert_allclose([value for _, value in best], top, **TOLERANCE)
    for text, value in best:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 1:
            np.testing.assert_allclose(row[ids[0]], value, **TOLERANCE)


def test_echo_scores_the_prompt(server: Server, oracle: Callable, tokenizer: Any) -> None:
    asked = {"echo": True, "logprobs": 5, "return_token_ids": True, "n": 2, "temperature": 2.0}
    body = {"prompt": [PROMPT, "Hello"], "max_tokens": 12, "seed": 3} | asked
    for choice in server.request(TEXT, body).json()["choices"]:
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        expected, found = oracle(ids), choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        picked = expected[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(found["token_logprobs"][1:], picked, **TOLERANCE)
        for best, text, row in zip(
            found["top_logprobs"][1:], found["tokens"][1:], expected, strict=False
        ):
            assert text in best
            ranked = sorted(best.items(), key=lambda item: -item[1])[:5]
            if len(best) >= 5 and "\ufffd" not in best:
                check_best(ranked, row, 5, tokenizer)
        check_offsets(choice, tokenizer.decode(ids, skip_special_tokens=True))


def check_offsets(choice: dict[str, Any], text: str) -> None:
    """Check that each token's text stands at its offset, except for parts of characters."""
    found = choice["logprobs"]
    offsets = found["text_offset"]
    assert choice["text"] == text and offsets[0] == 0 and offsets == sorted(offsets)
    for token, offset in zip(found["tokens"], offsets, strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert text[offset : offset + len(token)] == token


@pytest.mark.parametrize("skip", [True, False])
def test_an_echo_shows_special_tokens_where_texts_do(
    server: Server, tokenizer: Any, skip: bool
) -> None:
    ids = [1, 2, 60, 61, 3]
    body = {"prompt": ids, "echo": True, "logprobs": 0, "skip_special_tokens": skip}
    # A drawn end is in no text.
    asked = body | {"max_tokens": 2, "allowed_token_ids": [60, 61], "return_token_ids": True}
    [choice] = server.request(TEXT, asked).json()["choices"]
    text = tokenizer.decode(ids + choice["token_ids"], skip_special_tokens=skip)
    check_offsets(choice, text)
    assert ("<|" in text) is not skip


@pytest.mark.parametrize("is_text", [True, False])
def test_an_echo_is_what_is_left_of_a_prompt(server: Server, tokenizer: Any, is_text: bool) -> None:
    prompt = PROMPT if is_text else tokenizer.encode(PROMPT)
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "truncate_prompt_tokens": 2}
    asked = body | {"max_tokens": 2, "temperature": 0, "return_token_ids": True}
    [choice] = server.request(TEXT, asked).json()["choices"]
    assert len(choice["prompt_token_ids"]) == 2
    check_offsets(choice, tokenizer.decode(choice["prompt_token_ids"] + choice["token_ids"]))


@pytest.mark.parametrize("n", [1, 3])
def test_echo_alone_draws_nothing_that_shows(server: Server, n: int) -> None:
    body = {"prompt": [PROMPT, "ab"], "echo": True, "max_tokens": 0, "n": n, "logprobs": 1}
    whole = server.request(TEXT, body | {"return_token_ids": True}).json()
    assert [one["text"] for one in whole["choices"]] == [PROMPT] * n + ["ab"] * n
    assert whole["usage"]["completion_tokens"] == 0
    for one in whole["choices"]:
        assert one["token_ids"] == [] and one["finish_reason"] == "length"
        assert len(one["logprobs"]["tokens"]) == len(one["prompt_token_ids"])
    events = server.request(TEXT, body | {"stream": True}).events()[:-1]
    streamed = {event["choices"][0]["index"]: event["choices"][0] for event in events}
    assert len(events) == 2 * n
    for one in whole["choices"]:
        assert streamed[one["index"]]["text"] == one["text"]
        assert streamed[one["index"]]["logprobs"] == one["logprobs"]
    del body["logprobs"]
    assert server.request(TEXT, body).json()["choices"][0]["logprobs"] is None
    assert refuse(server, TEXT, {"max_tokens": 0})["param"] == "max_tokens"


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_of_the_whole_context_is_scored(
    server: Server, oracle: Callable, tokenizer: Any, n: int
) -> None:
    """Rolling windows of evaluations fill the context (lm-eval#2880)."""
    ids = np.random.default_rng(7).integers(5, 500, LONGEST).tolist()
    ids[-1] = 3  # even where the last token ends answers
    asked = {"echo": True, "max_tokens": 0, "logprobs": 2, "prompt_logprobs": 3, "n": n}
    body = {"prompt": [ids, ids[:9]], "return_token_ids": True, "temperature": 1.5} | asked
    whole = server.request(TEXT, body).json()
    assert whole["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": LONGEST + 9,
        "completion_tokens": 0,
        "total_tokens": LONGEST + 9,
        "prompt_tokens_details": None,
    }
    expected = oracle(ids)[np.arange(LONGEST - 1), ids[1:]]
    for one in whole["choices"][:n]:
        assert one["prompt_token_ids"] == ids and one["token_ids"] == []
        assert one["finish_reason"] == "length"
        found = one["logprobs"]
        assert len(found["tokens"]) == LONGEST and found["token_logprobs"][0] is None
        np.testing.assert_allclose(found["token_logprobs"][1:], expected, **TOLERANCE)
        assert len(found["top_logprobs"][-1]) in (2, 3)
        scored = [
            entry[str(token)]["logprob"]
            for entry, token in zip(one["prompt_logprobs"][1:], ids[1:], strict=True)
        ]
        np.testing.assert_allclose(scored, expected, **TOLERANCE)
        assert len(one["prompt_logprobs"][-1]) in (3, 4)
        assert one["text"] == tokenizer.decode(ids, skip_special_tokens=True)
    short = server.request(TEXT, body | {"prompt": ids[:9]}).json()["choices"][0]
    assert len(short["logprobs"]["tokens"]) == 9
    events = server.request(TEXT, body | {"stream": True}).events()[:-1]
    streamed = {event["choices"][0]["index"]: event["choices"][0] for event in events}
    for one in whole["choices"]:
        assert streamed[one["index"]]["logprobs"]["tokens"] == one["logprobs"]["tokens"]


OTHERS: list[dict[str, Any]] = [
    *({}, {"logprobs": 0}, {"prompt_logprobs": 0}, {"stop": "a", "ignore_eos": True}),
    *({"min_tokens": 0, "logit_bias": {"9": -100}}, {"allowed_token_ids": [8]}, {"top_p": 0}),
    *(
        {"bad_words": ["a"], "logprobs": 1},
        {"structured_outputs": {"regex": "b"}},
        {"n_predict": 0},
    ),
]


@pytest.mark.parametrize("fields", OTHERS, ids=str)
def test_no_setting_of_the_sampler_forbids_the_last_token_of_a_prompt(
    server: Server, fields: dict[str, Any]
) -> None:
    body = {"prompt": [9] * LONGEST, "echo": True, "max_tokens": 0, "return_token_ids": True}
    answer = server.request(TEXT, body | fields)
    assert answer.status == 200, answer.body
    [choice] = answer.json()["choices"]
    assert choice["prompt_token_ids"] == [9] * LONGEST and choice["token_ids"] == []
    assert (choice["logprobs"] is None) is ("logprobs" not in fields)


def test_a_prompt_longer_than_the_context_is_refused(server: Server) -> None:
    body = {"echo": True, "max_tokens": 0, "logprobs": 1}
    for prompt in ([9] * (LONGEST + 1), [9] * 1023):
        error = refuse(server, TEXT, body | {"prompt": prompt})
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    for prompt in ([9] * (LONGEST - 1) + [511], [9] * (LONGEST - 1) + [-1]):
        assert refuse(server, TEXT, body | {"prompt": prompt})["param"] == "prompt"
    for more in ({"max_tokens": 1}, {"echo": False, "max_tokens": 1}):
        asked = body | {"prompt": [9] * LONGEST} | more
        assert refuse(server, TEXT, asked)["code"] == "context_length_exceeded"
    rendered = {"prompt": [9] * LONGEST, "echo": True, "max_tokens": 0}
    assert server.request(f"{TEXT}/render", rendered).status == 400


def test_streamed_completions_score_as_whole_ones(server: Server) -> None:
    body = {"prompt": [PROMPT, "ab"], "echo": True, "logprobs": 2, "n": 2, "seed": 5}
    body |= {"max_tokens": 20, "stop": ["e", "o"], "temperature": 1.5}
    whole = server.request(TEXT, body).json()["choices"]
    for one in whole:
        found: dict[str, list] = {name: [] for name in one["logprobs"]}
        for event in server.request(TEXT, body | {"stream": True}).events()[:-1]:
            if event["choices"][0]["index"] == one["index"]:
                for name, values in event["choices"][0]["logprobs"].items():
                    found[name] += values
        for name in ("text_offset", "tokens"):
            assert found[name] == one["logprobs"][name]
        np.testing.assert_allclose(
            found["token_logprobs"][1:], one["logprobs"]["token_logprobs"][1:], **TOLERANCE
        )


def test_chats_score_their_tokens(server: Server, oracle: Callable, tokenizer: Any) -> None:
    asked = {"logprobs": True, "top_logprobs": 20, "return_token_ids": True, "seed": 7}
    body = {"messages": MESSAGES, "max_tokens": 24, "temperature": 1.5, "n": 2} | asked
    whole = server.request(CHAT, body).json()
    for choice in whole["choices"]:
        prompt, drawn = whole["prompt_token_ids"], choice["token_ids"]
        expected = oracle(prompt + drawn)[len(prompt) - 1 :]
        content = choice["logprobs"]["content"]
        assert choice["logprobs"]["refusal"] is None and len(content) == len(drawn)
        for token, entry, row in zip(drawn, content, expected, strict=False):
            np.testing.assert_allclose(entry["logprob"], row[token], **TOLERANCE)
            best = [(one["token"], one["logprob"]) for one in entry["top_logprobs"]]
            check_best(best, row, 20, tokenizer)
            assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        ends = tokenizer.all_special_ids
        shown = [e for t, e in zip(drawn, content, strict=True) if t not in ends]
        data = b"".join(bytes(entry["bytes"]) for entry in shown)
        assert data.decode(errors="replace") == choice["message"]["content"]
    events = server.request(CHAT, body | {"stream": True}).events()[:-1]
    for choice in whole["choices"]:
        found = [
            entry["token"]
            for event in events
            for one in event["choices"]
            if one["index"] == choice["index"] and one["logprobs"]
            for entry in one["logprobs"]["content"]
        ]
        assert found == [entry["token"] for entry in choice["logprobs"]["content"]]


def test_prompts_are_scored_by_token_ids(server: Server, oracle: Callable) -> None:
    for path, body in (
        (TEXT, {"prompt": PROMPT, "max_tokens": 2}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2}),
    ):
        for _ in range(2):  # the second time its pages are in the prefix cache
            asked = {"prompt_logprobs": 3, "return_token_ids": True}
            answer = server.request(path, body | asked).json()
            where = answer["choices"][0] if path == TEXT else answer
            ids, found = where["prompt_token_ids"], where["prompt_logprobs"]
            assert found[0] is None and len(found) == len(ids)
            for token, entry, row in zip(ids[1:], found[1:], oracle(ids), strict=False):
                assert 3 <= len(entry) <= 4 and next(iter(entry)) == str(token)
                for other, one in entry.items():
                    np.testing.assert_allclose(one["logprob"], row[int(other)], **TOLERANCE)
                    better = (row > row[int(other)] + 1e-3).sum()
                    assert better < one["rank"] <= (row >= row[int(other)] - 1e-3).sum()


def test_responses_carry_logprobs(server: Server) -> None:
    body = {"input": "Reverse: a-b", "temperature": 0}
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    path = "/v1/responses"
    plain = server.request(path, body).json()["output"][0]["content"][0]
    assert plain["logprobs"] == []
    found = server.request(path, body | wanted).json()["output"][0]["content"][0]
    assert found["text"] == plain["text"]
    assert "".join(entry["token"] for entry in found["logprobs"]).startswith(plain["text"])
    assert all(len(entry["top_logprobs"]) == 2 for entry in found["logprobs"])
    events = server.request(path, body | wanted | {"stream": True}).events()
    streamed = [e for event in events if event["type"].endswith("delta") for e in event["logprobs"]]
    assert [e["token"] for e in streamed] == [e["token"] for e in found["logprobs"]]


def test_tokens_may_be_spelled_as_ids(server: Server) -> None:
    body = {"prompt": "ab", "logprobs": 1, "temperature": 0, "return_token_ids": True}
    one = server.request(TEXT, body | {"return_tokens_as_token_ids": True}).json()["choices"][0]
    assert one["logprobs"]["tokens"] == [f"token_id:{token}" for token in one["token_ids"]]
    assert all(
        list(best) == [token]
        for best, token in zip(
            one["logprobs"]["top_logprobs"], one["logprobs"]["tokens"], strict=True
        )
    )


def test_a_long_prompt_is_scored_within_bounds(server: Server, oracle: Callable) -> None:
    ids = np.random.default_rng(0).integers(4, 500, 600).tolist()
    body = {"prompt": ids, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}
    event = server.request(TEXT, body).events()[0]["choices"][0]
    picked = oracle(ids)[np.arange(599), ids[1:]]
    np.testing.assert_allclose(event["logprobs"]["token_logprobs"][1:600], picked, **TOLERANCE)


BAD: list[tuple[str, str, dict[str, Any]]] = [
    *((TEXT, "logprobs", {"logprobs": value}) for value in (-1, 21, 10**6, True, 1.5, "1")),
    *((TEXT, "logprobs", {"logprobs": value, "echo": True}) for value in (-1, 21)),
    *((CHAT, "logprobs", {"logprobs": value}) for value in (1, "true", [])),
    *((CHAT, "top_logprobs", {"logprobs": True, "top_logprobs": v}) for v in (-1, 21, True, 2.0)),
    (CHAT, "top_logprobs", {"top_logprobs": 3}),
    *((path, "prompt_logprobs", {"prompt_logprobs": v}) for path in (TEXT, CHAT) for v in (-1, 21)),
    ("/v1/responses", "top_logprobs", {"top_logprobs": 21}),
    ("/v1/responses", "include", {"include": ["file_search_call.colour"]}),
]


@pytest.mark.parametrize(("path", "name", "fields"), BAD, ids=str)
def test_bad_values_are_named(server: Server, path: str, name: str, fields: dict[str, Any]) -> None:
    assert refuse(server, path, fields)["param"] == name


def test_the_model_card_says_so(server: Server) -> None:
    [card] = json.loads(server.request("/v1/models").body)["data"]
    assert card["capabilities"]["logprobs"] is True
