"""Routes of vLLM and llama.cpp beside the APIs: gaps, the tokenizer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.server.api.infill import MARKS, end_tokens, infill_prompt
from jaxserve.settings.config import bundled_model
from jaxserve.text.tokenizer import Tokenizer
from tests.server.conftest import Many
from tests.server.models import model_with
from tests.support.live_server import Server

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Reverse: s-t-o-n-e"}]
GOOD: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


@pytest.fixture
def coder(many: Many) -> tuple[Server, list[int]]:
    """Return a server of a model with marks for gaps, and the ids of these marks."""
    return many.server, many.marks


def tokens(server: Server, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    return server.request("/tokenize", body).json()["tokens"]


def test_a_gap_is_filled(coder: tuple[Server, list[int]]) -> None:
    server, (before, behind, middle, pad) = coder
    ids = [1, before, *tokens(server, "def f("), behind, *tokens(server, "): return 1"), middle]
    plain = GOOD | {"return_token_ids": True}
    expected = server.request(TEXT, plain | {"prompt": ids, "stop_token_ids": [pad]}).json()
    asked = plain | {"prompt": "def f(", "suffix": "): return 1"}
    found = server.request(TEXT, asked).json()
    assert found["choices"] == expected["choices"]
    assert found["choices"][0]["prompt_token_ids"] == ids
    texts = {"input_prefix": "def f(", "input_suffix": "): return 1", "n_predict": 8}
    answer = server.request("/infill", texts | {"temperature": 0}).json()
    text = found["choices"][0]["text"]
    assert (answer["content"], answer["model"], answer["stop"]) == (text, "coder", True)
    assert answer["tokens_evaluated"] == len(ids) and answer["tokens_predicted"] == 8
    assert answer["stop_type"] == "limit" and answer["stopping_word"] == ""
    streamed = server.request("/infill", texts | {"temperature": 0, "stream": True}).events()
    assert "".join(event["content"] for event in streamed) == text
    assert [event["stop"] for event in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1] | {"content": text} == answer


def test_the_end_of_what_fills_a_gap(coder: tuple[Server, list[int]]) -> None:
    server, (*_, pad) = coder
    texts = {"input_prefix": "a", "input_suffix": "b", "logit_bias": {str(pad): 100}}
    answer = server.request("/infill", texts).json()
    assert (answer["stop_type"], answer["tokens_predicted"]) == ("eos", 1)
    gap = {"prompt": "a", "suffix": "b", "logit_bias": {str(pad): 100}, "max_tokens": 3}
    [choice] = server.request(TEXT, gap).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", pad)
    begun = {"input_prefix": "a", "prompt": "cd", "input_extra": [{"filename": "e", "text": "f"}]}
    counted = server.request("/infill", begun | {"n_predict": 1}).json()["tokens_evaluated"]
    assert counted == 4 + len(tokens(server, "e\nf\na")) + len(tokens(server, "cd"))


INFILL: list[tuple[str, dict[str, Any]]] = [
    ("n_predict", {"n_predict": 0}),
    ("n", {"n": 2}),
    ("input_extra", {"input_extra": [5]}),
    ("input_suffix", {"input_suffix": 5}),
    ("stop", {"stop": [""]}),
    ("prompt_logprobs", {"prompt_logprobs": 1}),
    ("suffix", {"suffix": "a"}),
    ("input_prefix", {"input_prefix": "a" * 7_000_000}),
]


@pytest.mark.parametrize(("name", "fields"), INFILL, ids=lambda value: str(value)[:40])
def test_what_is_wrong_about_a_gap(
    coder: tuple[Server, list[int]], name: str, fields: dict[str, Any]
) -> None:
    answer = coder[0].request("/infill", {"input_prefix": "a", **fields})
    assert answer.status == 400 and answer.error["param"] == name, answer.body


def test_a_prompt_of_ids_has_no_suffix(coder: tuple[Server, list[int]]) -> None:
    answer = coder[0].request(TEXT, GOOD | {"prompt": [5], "suffix": "b"})
    assert answer.status == 400 and answer.error["param"] == "suffix"
    assert coder[0].request(TEXT, GOOD | {"prompt": [5], "suffix": ""}).status == 200


def test_a_model_without_marks_fills_no_gaps(server: Server) -> None:
    for path, field, body in (
        (TEXT, "suffix", {"prompt": "a", "suffix": "b"}),
        ("/infill", "input_suffix", {"input_prefix": "a", "input_suffix": "b"}),
    ):
        error = server.request(path, body).error
        assert error["param"] == field and "<|fim_prefix|>" in error["message"]
        assert error["message"].startswith(field)


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.before)
def test_marks_of_each_family(marks: Any, tmp_path: Path) -> None:
    texts = [text for text in marks[:3] if text]
    ids = model_with(tmp_path / "model", *texts)
    tokenizer = Tokenizer(tmp_path / "model", 511)
    found = infill_prompt(tokenizer, "ab", "")
    before = [ids[0], *tokenizer.encode("ab", False)]
    whole = [ids[1], *before] if marks.is_reversed else [*before, *ids[1:]]
    assert found == [1, *whole]  # it begins with <|bos|>, like every prompt
    assert end_tokens(tokenizer) == []


def test_no_marks(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="suffix needs a model"):
        infill_prompt(Tokenizer(bundled_model(), 511), "a", "b")


def test_what_the_tokenizer_is(server: Server, narrow: Server) -> None:
    info = server.request("/tokenizer_info").json()
    assert info["added_tokens_decoder"]["3"] == "<|im_end|>"
    assert "<|im_start|>" in info["chat_template"] and info["tokenizer_class"]
    assert info["special_tokens_map"]["eos_token"] == "<|im_end|>"
    assert server.request("/tokenizer_info?model=other").status == 404
    closed = narrow.request("/tokenizer_info")
    assert closed.status == 404
    assert re.search(r"is not served: .*--enable-tokenizer-info-endpoint", closed.error["message"])


def test_the_role_of_answers(coder: tuple[Server, list[int]]) -> None:
    answer = coder[0].request(CHAT, GOOD | {"messages": USER}).json()
    assert answer["choices"][0]["message"]["role"] == "critic"
    events = coder[0].request(CHAT, GOOD | {"messages": USER, "stream": True}).events()
    assert events[0]["choices"][0]["delta"]["role"] == "critic"


def test_special_tokens_before_a_conversation(coder: tuple[Server, list[int]]) -> None:
    """The template writes <|bos|> itself, so that there are two then, as in vLLM."""
    asked = GOOD | {"messages": USER, "return_token_ids": True}
    plain = coder[0].request(CHAT, asked).json()["prompt_token_ids"]
    more = coder[0].request(CHAT, asked | {"add_special_tokens": True}).json()["prompt_token_ids"]
    assert more == [1, *plain]
