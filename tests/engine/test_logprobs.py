"""Logprobs as a caller gets them, against Transformers' log-softmax."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from jaxserve import LLM, AsyncLLM, Logprob, SamplingParams
from jaxserve.start.loaded import Loaded

TEXT = "a prompt that is longer than the thirty-two tokens of a step, and so comes in chunks"


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    """Map token ids to the next token's log-probabilities, float64[tokens, V]."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)

    def logprobs(token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(dim=-1).numpy()

    return logprobs


def check(entry: dict[int, Logprob] | None, token: int, want: np.ndarray, width: int) -> None:
    assert entry is not None
    own, *others = entry
    assert own == token
    best = np.argsort(-want)[:width].tolist()
    assert sorted([own, *others]) == sorted({token, *best})
    for other, found in entry.items():
        assert abs(found.logprob - want[other]) < 1e-4
        assert found.rank == 1 + (want > want[other]).sum()


@pytest.mark.parametrize("width", [0, 1, 5, 20])
def test_logprobs_equal_transformers(llm: LLM, reference: Any, width: int) -> None:
    """Scores are the model's own, also with settings that change the sampled distribution."""
    settings = [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 3, "presence_penalty": 1.5, "logit_bias": {9: 3}},
        {"temperature": 0, "allowed_token_ids": [20, 30, 40]},
    ]
    outputs = llm.generate(
        [TEXT] * 3,
        [SamplingParams(logprobs=width, prompt_logprobs=width, **one) for one in settings],
        use_tqdm=False,
    )
    for output in outputs:
        [one] = output.outputs
        prompt = output.prompt_token_ids
        want = reference(prompt + one.token_ids)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for at, entry in enumerate(output.prompt_logprobs[1:], 1):
            check(entry, prompt[at], want[at - 1], width)
        assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)
        for at, (entry, token) in enumerate(zip(one.logprobs, one.token_ids, strict=True)):
            check(entry, token, want[len(prompt) + at - 1], width)
        total = sum(e[t].logprob for e, t in zip(one.logprobs, one.token_ids, strict=True))
        assert one.cumulative_logprob == pytest.approx(total)


def test_nobody_gets_what_another_asked_for(llm: LLM) -> None:
    asking = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    plain = SamplingParams(temperature=0, max_tokens=6)
    one, two = llm.generate(["same"] * 2, [asking, plain], use_tqdm=False)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    assert one.outputs[0].logprobs is not None and one.prompt_logprobs is None
    assert two.outputs[0].logprobs is None and two.outputs[0].cumulative_logprob is None
    assert llm.stats().num_compiles == 0


def test_a_cached_prompt_is_scored_too(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=3)
    scored = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    [first] = llm.generate(TEXT, scored, use_tqdm=False)
    [cached] = llm.generate(TEXT, plain, use_tqdm=False)
    [again] = llm.generate(TEXT, scored, use_tqdm=False)
    assert cached.num_cached_tokens > 0 == again.num_cached_tokens
    assert again.prompt_logprobs == first.prompt_logprobs


def test_several_completions_and_prompts_of_one_token(llm: LLM, reference: Any) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=4, logprobs=1, prompt_logprobs=0)
    [output] = llm.generate([[77]], params, use_tqdm=False)
    assert output.prompt_logprobs == [None]
    for one in output.outputs:
        want = reference([77, *one.token_ids])
        assert one.logprobs is not None
        for at, (entry, token) in enumerate(zip(one.logprobs, one.token_ids, strict=True)):
            check(entry, token, want[at], 1)


def test_texts_of_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=1)
    [output] = llm.generate("ab", params, use_tqdm=False)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[1] is not None
    assert next(iter(output.prompt_logprobs[1].values())).decoded_token == "b"
    silent = SamplingParams(temperature=0, max_tokens=5, logprobs=3, detokenize=False)
    [output] = llm.generate("ab", silent, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    assert {one.decoded_token for one in output.outputs[0].logprobs[0].values()} == {None}


def test_streams_carry_their_tokens_logprobs(
    llm: LLM, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=2)
    [whole] = llm.generate(TEXT, params, use_tqdm=False)
    monkeypatch.setattr(loaded.runner, "close", lambda: None)

    async def stream() -> tuple[list[Any], list[Any]]:
        logprobs, prompts = [], []
        async with AsyncLLM(loaded) as engine:
            async for output in engine.generate(TEXT, params):
                prompts += [output.prompt_logprobs] if output.prompt_logprobs else []
                for one in output.outputs:
                    assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)
                    logprobs += one.logprobs
        return logprobs, prompts

    logprobs, prompts = asyncio.run(stream())
    assert logprobs == whole.outputs[0].logprobs
    assert prompts == [whole.prompt_logprobs]
