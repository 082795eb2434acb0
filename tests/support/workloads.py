"""Requests made to break a scheduler: repeats, page-aligned prompts, pages under two prefixes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxserve.request import SamplingParams
from jaxserve.structured import StructuredOutputsParams
from tests.support.letters import FORMS, TEXTS


@dataclass(frozen=True)
class Ask:
    """One request of a workload, and when it comes: before the step numbered `at_step`."""

    prompt: list[int]
    sampling: SamplingParams
    at_step: int
    salt: str
    priority: int
    abort_at: int | None


def adversarial_prompts(rng: random.Random, vocab: int, longest: int, page: int) -> list[list[int]]:
    """Return prompts that share, repeat and cut pages in every way."""
    base = [rng.randrange(vocab) for _ in range(longest)]
    aligned = page * max(1, rng.randrange(1, 1 + longest // page))
    middle = base[page : 2 * page] or base[:1]
    return [
        base[: rng.randrange(1, longest + 1)],
        base[:aligned],  # ends on a page: a full hit must still leave one token to compute
        base[:aligned],  # and again, exactly
        [*base[: aligned - 1], rng.randrange(vocab)],
        (middle * (longest // len(middle) + 1))[:longest],  # the same page under other prefixes
        base[: page - 1] or base[:1],
        base[: page + 1],
        [rng.randrange(vocab)],
        [rng.randrange(vocab) for _ in range(rng.randrange(1, longest + 1))],
    ]


def numbers(token_ids: list[int]) -> str:
    """Return the text in a vocabulary whose tokens are their numbers, with spaces between them."""
    return " ".join(map(str, token_ids))


def letters(token_ids: list[int]) -> str:
    """Return the text in the vocabulary of `tests.support.letters`."""
    return "".join(TEXTS[token] for token in token_ids)


def random_edits(
    rng: random.Random, vocab: int, spell: Callable[[list[int]], str] = numbers
) -> dict[str, Any]:
    """Draw a mix of settings that change logits: mostly defaults, often strong on few tokens."""
    few = [rng.randrange(vocab) for _ in range(rng.choice([2, 3, 20]))]
    one, other = few[0], few[1]
    banned = [word for word in map(spell, ([one, one], [other, one, one])) if word.strip()]
    choices: dict[str, list[Any]] = {
        "presence_penalty": [0.0, 2.0, -1.5, 0.3],
        "frequency_penalty": [0.0, 2.0, -2.0, 0.7],
        "repetition_penalty": [1.0, 1.3, 0.6, 5.0],
        "logit_bias": [None, {few[0]: 5.0, few[1]: -100.0}, dict.fromkeys(few, 1.5)],
        "allowed_token_ids": [None, few],
        "bad_words": [None, [spell([one]) if spell([one]).strip() else "a"], banned or None],
    }
    if rng.random() < 0.4:
        return {}
    return {
        name: rng.choice(values) if rng.random() < 0.4 else values[0]
        for name, values in choices.items()
    }


def random_ends(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Stop strings, among them some that lie across tokens and some that begin another."""
    if rng.random() < 0.6:
        return {"detokenize": rng.random() < 0.5}
    texts = [text for text in TEXTS[:vocab] if text]
    pairs = [rng.choice(texts) + rng.choice(texts) for _ in range(3)]
    stops = [rng.choice(texts), *pairs, *(pair[:-1] or pair for pair in pairs)]
    return {
        "stop": rng.sample(stops, rng.randrange(1, 5)),
        "include_stop_str_in_output": rng.random() < 0.5,
    }


def random_scores(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Draw the requested scores: a number of most likely tokens, or tokens by name."""
    if rng.random() < 0.85:
        return {"logprobs": rng.choice([None, None, None, 0, 1, 5, 20, -1])}
    listed = rng.sample(range(vocab), rng.randrange(1, 9))
    return {"logprob_token_ids": listed, "logprobs": rng.choice([None, len(listed)])}


def random_sampling(rng: random.Random, vocab: int, longest: int) -> SamplingParams:
    """Draw a mix of settings."""
    max_tokens = rng.randrange(1, longest + 1)
    form = rng.choice(FORMS) if rng.random() < 0.35 else None
    return SamplingParams(
        n=rng.choice([1, 1, 1, 1, 2]),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 3.0]),
        top_k=rng.choice([0, 0, 1, 5, vocab]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        seed=rng.choice([0, rng.randrange(2**64)]),
        max_tokens=max_tokens,
        min_tokens=rng.randrange(0, max_tokens + 1) if rng.random() < 0.3 else 0,
        stop_token_ids=[rng.randrange(vocab) for _ in range(rng.choice([0, 0, 1, 6]))],
        ignore_eos=rng.random() < 0.2,
        **random_scores(rng, vocab),
        prompt_logprobs=rng.choice([None, None, None, None, 0, 3, 20, -1]),
        structured_outputs=None if form is None else StructuredOutputsParams(**form),
        **random_ends(rng, vocab),
        **random_edits(rng, vocab, letters),
    )


def adversarial_workload(
    rng: random.Random,
    *,
    count: int,
    vocab: int,
    page: int,
    longest_prompt: int,
    longest_output: int,
) -> list[Ask]:
    """Return `count` requests over a few prompts that arrive while others run. Some are aborted."""
    prompts = adversarial_prompts(rng, vocab, longest_prompt, page)
    asks = []
    for _ in range(count):
        at_step = rng.choice([0, 0, rng.randrange(30)])
        asks.append(
            Ask(
                prompt=rng.choice(prompts),
                sampling=random_sampling(rng, vocab, longest_output),
                at_step=at_step,
                salt=rng.choice(["", "", "", "other"]),
                priority=rng.randrange(3),
                abort_at=at_step + rng.randrange(25) if rng.random() < 0.15 else None,
            )
        )
    return asks
