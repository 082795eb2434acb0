"""Real chats get the same to the bit however they are scheduled."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from jaxserve import SamplingParams
from jaxserve.start.loaded import Loaded
from tests.equivalence import Got
from tests.real.conftest import Real
from tests.real.engines import load_real, make_engine, serve, serve_alone
from tests.real.prompts import chats, prose, turns

SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "chunks of 5, not overlapped": {
        "long_prefill_token_threshold": 5,
        "async_scheduling": False,
        "num_scheduler_steps": 3,
    },
    "17 tokens a step, apart": {"max_num_batched_tokens": 17, "apart": 2},
    "too few pages": {"pages": 14, "enable_prefix_caching": False},
}
LONG_SCHEDULES = {
    f"{budget} tokens a step, chunks of {chunk}, {steps} steps a launch, {pages} pages": {
        "max_num_batched_tokens": budget,
        "long_prefill_token_threshold": chunk,
        "num_scheduler_steps": steps,
        "pages": pages,
        "apart": chunk % 4,
    }
    for budget, chunk, steps, pages in (
        (8, 1, 1, 400),
        (64, 3, 2, 90),
        (256, 0, 16, 70),
        (33, 16, 7, 80),
        (256, 100, 4, 400),
        (256, 0, 16, 50),
    )
}
Alone = list[Got]


def workload(real: Real, is_long: bool) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and their settings: greedy and seeded in turns, all scored."""
    prompts = [entry["ids"] for entry in real.reference["prompts"][-len(chats()) :]]
    prompts = prompts[::2] if is_long else prompts[:4]
    if is_long:
        assert real.loaded.tokenizer is not None
        prompts.append(real.loaded.tokenizer.encode(prose())[:700])
    params = [
        SamplingParams(
            temperature=0.9 if index % 2 else 0,
            top_p=0.95,
            seed=index,
            max_tokens=40,
            ignore_eos=True,
            logprobs=2,
        )
        for index in range(len(prompts))
    ]
    return prompts, params


def run(
    loaded: Loaded,
    prompts: list[list[int]],
    params: list[SamplingParams],
    schedule: Mapping[str, Any],
) -> tuple[list[Got], int]:
    """Return the answers to prompts under a schedule, and the number of preemptions."""
    settings = dict(schedule)
    apart = settings.pop("apart", 0)
    engine = make_engine(loaded, **settings)
    return serve(engine, prompts, params, apart), engine.stats().num_preemptions


def alone(real: Real, is_long: bool = False) -> Alone:
    prompts, params = workload(real, is_long)
    return [serve_alone(real.loaded, *pair) for pair in zip(prompts, params, strict=True)]


@pytest.fixture(scope="module")
def smollm2_alone(smollm2: Real) -> Alone:
    return alone(smollm2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_chats_get_what_each_gets_alone(smollm2: Real, smollm2_alone: Alone, name: str) -> None:
    schedule = SCHEDULES[name]
    got, preemptions = run(smollm2.loaded, *workload(smollm2, is_long=False), schedule)
    assert got == smollm2_alone
    assert preemptions > 0 or "pages" not in schedule


@pytest.mark.long
def test_chats_of_gemma_get_what_each_gets_alone(gemma3: Real) -> None:
    """Gemma multiplies embeddings by a factor, which decodes of one row once rounded elsewhere.

    `tests/engine/test_equivalence.py` has schedules of a small model with such a factor.
    """
    assert run(gemma3.loaded, *workload(gemma3, is_long=False), {})[0] == alone(gemma3)


@pytest.mark.long
def test_schedules_of_both_models_with_other_pages(real: Real) -> None:
    for page in (16, 4):
        pages = {"block_size": page, "num_gpu_blocks_override": 9600 // page + 1}
        loaded = real.loaded if page == 16 else load_real(real.path, **pages)
        prompts, params = workload(real, is_long=True)
        want = alone(real, is_long=True)
        preemptions = 0
        for name, schedule in LONG_SCHEDULES.items():
            enough = {**schedule, "pages": schedule["pages"] * 16 // page}
            shuffled = random.Random(name).sample(range(len(prompts)), len(prompts))
            got, count = run(
                loaded, [prompts[i] for i in shuffled], [params[i] for i in shuffled], enough
            )
            assert got == [want[i] for i in shuffled], (page, name)
            preemptions += count
        assert preemptions > 0


def converse(real: Real, num_turns: int, **config: Any) -> tuple[list[Got], int]:
    """Return the answers of one conversation and how many tokens came from the prefix cache."""
    tokenizer = real.loaded.tokenizer
    assert tokenizer is not None
    engine = make_engine(real.loaded, **config)
    messages: list[dict[str, str]] = []
    params = SamplingParams(temperature=0, max_tokens=40 if num_turns > 6 else 10, logprobs=3)
    answers = []
    for turn in turns()[:num_turns]:
        messages.append({"role": "user", "content": turn})
        [answer] = serve(engine, [tokenizer.render_chat(messages)], params)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers, engine.stats().prefix_hits


def test_a_conversation_is_the_same_with_and_without_a_prefix_cache(
    smollm2: Real, is_long: bool
) -> None:
    num_turns = 30 if is_long else 6
    cached, hits = converse(smollm2, num_turns)
    plain, no_hits = converse(smollm2, num_turns, enable_prefix_caching=False)
    assert cached == plain
    assert hits > 50 * num_turns and no_hits == 0
    assert all(answer.text for answer in plain)
