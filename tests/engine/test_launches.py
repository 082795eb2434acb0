"""With any number of decode steps in a launch, every request gets its tokens of a run alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.scheduling.budget import LaunchLength
from jaxserve.start.loaded import Loaded

WORK = {
    "one": SamplingParams(temperature=0, max_tokens=14),
    "two": SamplingParams(temperature=0.9, seed=5, max_tokens=4, n=2),
    "three": SamplingParams(temperature=1.0, seed=7, max_tokens=14, min_tokens=6),
    "four": SamplingParams(temperature=1.2, top_p=0.8, seed=6, max_tokens=17, stop=["a", "e"]),
    "five": SamplingParams(temperature=1.0, seed=1, max_tokens=9, repetition_penalty=1.5),
    "six": SamplingParams(temperature=1.5, seed=2, max_tokens=30, bad_words=["b", "c"]),
    "seven": SamplingParams(temperature=0, max_tokens=6, logprobs=2),
    "eight": SamplingParams(temperature=1.3, seed=4, max_tokens=11, logprobs=0, n=3),
    "nine": SamplingParams(temperature=1.0, seed=8, max_tokens=18, logprobs=20, prompt_logprobs=3),
}
ALONE = {
    "listed": SamplingParams(temperature=0, max_tokens=6, logprob_token_ids=[3, 5]),
    "guided": SamplingParams(
        seed=3, max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[0-9]{4}")
    ),
}


def answers(llm: LLM, work: dict[str, SamplingParams]) -> list[Any]:
    outputs = [llm.generate(prompt, one, use_tqdm=False)[0] for prompt, one in work.items()]
    outputs += llm.generate(list(work), list(work.values()), use_tqdm=False)
    return [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs)
        for output in outputs
        for one in output.outputs
    ]


@pytest.fixture
def plans(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each submitted launch appends its number of steps."""
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    submit, steps = loaded.runner.submit, []

    def watched(plan, slots):
        steps.append(plan.num_steps)
        return submit(plan, slots)

    monkeypatch.setattr(loaded.runner, "submit", watched)
    return steps


def with_steps(loaded: Loaded, steps: int | None) -> LLM:
    return LLM(replace(loaded, config=replace(loaded.config, num_scheduler_steps=steps)))


def test_long_launches_change_nothing(loaded: Loaded, plans: list[int]) -> None:
    with with_steps(loaded, 1) as llm:
        expected = answers(llm, WORK | ALONE)
    assert set(plans) == {1}
    for steps in (3, 16, None):
        plans.clear()
        with with_steps(loaded, steps) as llm:
            assert answers(llm, WORK | ALONE) == expected
            llm.check()
            stats = llm.stats()
            assert stats.num_compiles == 0 and stats.pages_in_use == 0
        assert steps is None or max(plans) == steps


def test_what_the_host_must_see_is_taken_step_by_step(loaded: Loaded, plans: list[int]) -> None:
    with with_steps(loaded, 16) as llm:
        answers(llm, ALONE)
    assert set(plans) == {1}


def test_launches_are_as_long_as_nobody_notices() -> None:
    assert LaunchLength(16, 4).steps() == 4 and LaunchLength(2, 4).steps() == 2
    pace = LaunchLength(16, None)
    assert pace.steps() == 1
    pace.has_read(submitted=0.0, num_steps=10**9)  # within nanoseconds each
    assert pace.steps() == 16
    none = LaunchLength(16, None)
    none.has_read(submitted=0.0, num_steps=1, now=0.0)
    assert none.steps() == 16
    slow = LaunchLength(16, None)
    slow.has_read(submitted=-1e6, num_steps=1)
    assert slow.steps() == 1
