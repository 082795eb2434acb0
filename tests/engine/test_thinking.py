"""Thoughts with a budget through the engine: in any batch, in launches of many steps, preempted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve import AsyncLLM, EngineConfig, InvalidRequest, SamplingParams
from jaxserve.request import Request
from jaxserve.start.loaded import Loaded
from jaxserve.start.start import load
from jaxserve.structured import StructuredOutputsParams
from jaxserve.text.thinking import ThinkingMarks

pytestmark = pytest.mark.usefixtures("quick_code")

FORM = StructuredOutputsParams(regex="[ab]{6}")


@pytest.fixture
def marks(loaded: Loaded) -> ThinkingMarks:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    end = tuple(tokenizer.encode_word("}"))
    decode = lambda ids: tokenizer.decode(list(ids), False)  # noqa: E731
    return ThinkingMarks("{", "}", end, decode, tokenizer.encode_word("{")[0], is_open=True)


def serve(
    loaded: Loaded, marks: ThinkingMarks | None, work: list[tuple[str, SamplingParams]]
) -> list[list[int]]:
    """Serve requests together, and return their tokens."""

    async def run() -> list[list[int]]:
        llm = AsyncLLM(loaded)
        requests: list[Request] = [llm.requests.make(p, s, thinking=marks) for p, s in work]
        tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
        stream = llm.open(requests)
        while not stream.is_finished:
            for delta in await stream.take():
                assert delta.error is None, delta.error
                tokens[delta.request_id] += delta.token_ids
        await llm.check()
        assert (await llm.stats()).num_compiles == 0
        llm.close()
        return list(tokens.values())

    return asyncio.run(run())


def settings(seed: int, budget: int | None, form: bool = False, tokens: int = 30) -> SamplingParams:
    return SamplingParams(
        seed=seed,
        max_tokens=tokens,
        ignore_eos=True,
        thinking_token_budget=budget,
        structured_outputs=FORM if form else None,
    )


def test_budgets_hold_in_any_batch(
    loaded: Loaded, marks: ThinkingMarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    ahead = 2 * loaded.runner.max_steps
    work = [
        ("one", settings(1, 0)),
        ("two", settings(2, 1)),
        ("three", settings(3, 9)),
        ("four", settings(4, 9, form=True)),
        ("five", settings(5, None, form=True, tokens=60)),
        ("six", settings(6, ahead + 20, tokens=ahead + 40)),
        ("seven", settings(7, ahead + 50, tokens=40)),
        ("eight", settings(8, None)),
    ]
    together = serve(loaded, marks, work)
    alone = [serve(loaded, marks, [one])[0] for one in work]
    assert together == alone
    free = serve(loaded, None, [(p, settings(s.seed or 0, None, False, 250)) for p, s in work])
    [end] = marks.end_token_ids
    for (_, asked), tokens, others in zip(work, together, free, strict=True):
        budget = asked.thinking_token_budget
        thought = tokens.index(end) if end in tokens else len(tokens)
        assert budget is None or thought <= budget
        if asked.structured_outputs is None:
            assert tokens[:thought] == others[:thought]
            if budget is not None and thought < budget:
                assert tokens == others[: len(tokens)]
        elif end in tokens:
            assert loaded.tokenizer is not None
            said = loaded.tokenizer.decode(tokens[thought + 1 :])
            assert len(said) == 6 and set(said) <= set("ab")


def test_budgets_hold_in_launches_of_very_many_steps(
    checkpoint: Path, marks: ThinkingMarks
) -> None:
    config = EngineConfig(
        model=checkpoint,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        decode_sizes=(2,),
        token_sizes=(16,),
        num_gpu_blocks_override=40,
        num_scheduler_steps=100,
    )
    [end] = marks.end_token_ids
    unended = replace(settings(1, 150, tokens=250), logit_bias={end: -100})
    others = [("x", settings(seed, None, tokens=40)) for seed in range(3)]
    for work in ([("one", unended)], [("one", unended), *others]):
        thoughts = serve(load(config), marks, work)[0]
        assert thoughts.index(end) == 150


def test_a_budget_needs_marks(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    with pytest.raises(InvalidRequest, match="reasoning_parser"):
        serve(loaded, None, [("one", settings(1, 5))])
    with pytest.raises(InvalidRequest, match="thinking_token_budget must be from 0"):
        settings(1, -1)
