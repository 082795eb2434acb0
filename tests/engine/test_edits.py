"""Penalties, bias and exclusions as a caller meets them: on text, and when they are wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxserve import LLM, InvalidRequest, SamplingParams
from tests.support.shared_engine import GREEDY, Canary

LONG = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}


def tokens_of(llm: LLM, prompt: Any = "some text", **fields: Any) -> list[int]:
    [output] = llm.generate(prompt, SamplingParams(**LONG | fields), use_tqdm=False)
    assert output.error is None
    return output.outputs[0].token_ids


def test_bad_words_do_not_appear(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    letters = SamplingParams(**LONG, allowed_token_ids=tokenizer.encode("abcd"))
    [free] = llm.generate("some text", letters, use_tqdm=False)
    word = free.outputs[0].text[:3]
    assert len(word) == 3
    [output] = llm.generate("some text", replace(letters, bad_words=[word]), use_tqdm=False)
    [other] = llm.generate("some text", replace(letters, bad_words=[word[:1]]), use_tqdm=False)
    assert word not in output.outputs[0].text and word[:2] == output.outputs[0].text[:2]
    assert word[0] not in other.outputs[0].text


def test_bias_and_allowed_tokens_force_what_is_drawn(llm: LLM) -> None:
    assert set(tokens_of(llm, logit_bias={"77": 100})) == {77}
    assert set(tokens_of(llm, allowed_token_ids=[50, 60, 70])) <= {50, 60, 70}
    assert set(tokens_of(llm, temperature=3.0, allowed_token_ids=[259])) == {259}


def test_a_frequency_penalty_ends_repetition(llm: LLM) -> None:
    repeated = tokens_of(llm, allowed_token_ids=[50, 60, 70], frequency_penalty=-2)
    varied = tokens_of(llm, allowed_token_ids=[50, 60, 70], frequency_penalty=2)
    assert len(set(repeated)) == 1
    assert {varied.count(token) for token in (50, 60, 70)} <= set(range(7, 14))


def test_neighbours_keep_their_tokens(canary: Canary) -> None:
    """One that runs into its own exclusions ends with an error, and alone."""
    llm = canary.llm
    letter = llm.get_tokenizer().encode("a")[-1]
    stuck = SamplingParams(**LONG, allowed_token_ids=[letter], bad_words=["aa"])
    plain = [llm.generate(p, GREEDY, use_tqdm=False)[0] for p in ("one", "two", "three")]
    *others, last = llm.generate(
        ["one", "two", "three", "four"], [GREEDY] * 3 + [stuck], use_tqdm=False
    )
    assert [o.outputs[0].token_ids for o in others] == [o.outputs[0].token_ids for o in plain]
    assert last.outputs[0].finish_reason == "error" and last.outputs[0].token_ids == [letter]
    assert last.error == "allowed_token_ids, bad_words left no token to draw"
    canary.check()


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {260: 1.0}},
        {"allowed_token_ids": [5, 260]},
        {"allowed_token_ids": [1], "min_tokens": 1},
        {"allowed_token_ids": [0], "stop_token_ids": [0], "min_tokens": 2},
        {"bad_words": ["a" * 17]},
        {"bad_words": [f"w{number}" for number in range(1000)]},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_what_the_model_cannot_do_is_refused(canary: Canary, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        canary.llm.generate("x", SamplingParams(**fields), use_tqdm=False)
    assert caught.value.parameter in fields
    canary.check()


def test_why_a_completion_failed_can_be_read(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """A failing completion runs beside a good one, through `generate` and through `chat`."""
    [token] = llm.get_tokenizer().encode("q")
    dead_end = replace(GREEDY, allowed_token_ids=[token], bad_words=["qq"], n=2)
    why = "allowed_token_ids, bad_words left no token to draw"
    failed, served = llm.generate(["x", "x"], [dead_end, GREEDY], use_tqdm=False)
    assert (served.error, served.outputs[0].error) == (None, None)
    assert served.outputs[0].finish_reason == "length" and failed.finished
    assert failed.error == why
    for one in failed.outputs:
        assert (one.finish_reason, one.error, one.token_ids) == ("error", why, [token])
    assert caplog.text.count(f"request {failed.request_id} failed: {why}") == 2
    assert why in repr(failed.outputs[0])
    [chat] = llm.chat([{"role": "user", "content": "x"}], dead_end, use_tqdm=False)
    assert chat.error == chat.outputs[1].error == why
