"""Schedules that an engine serves: requests that make every kind of launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.request import SamplingParams
from jaxserve.structured import StructuredOutputsParams
from tests.machine_code.steps.models import VOCAB


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Request of a schedule, which comes before the step numbered `step`."""

    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    step: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Requests of a schedule.

    Steps of 32 tokens cut the longer prompts, and four slots make the last request wait.

    Attributes:
        arrivals: the requests.
        has_long_launches: whether launches take several decode steps.
        begins_with_padding: run each program once on padding first, as every start does.
        most_pages: pages that the host hands out, fewer than the cache has. None means all.
    """

    arrivals: tuple[Arrival, ...]
    has_long_launches: bool = False
    begins_with_padding: bool = False
    most_pages: int | None = None


def prompt(number: int, length: int) -> tuple[int, ...]:
    """Draw a prompt of tokens that are no special ones."""
    tokens = np.random.default_rng(number).integers(4, VOCAB, length)
    return tuple(int(token) for token in tokens)


def arrival(number: int, length: int, step: int, max_tokens: int, **settings: Any) -> Arrival:
    """Make a request. It goes on past the model's end unless a setting says otherwise."""
    settings = {"ignore_eos": True, "detokenize": False} | settings
    return Arrival(prompt(number, length), SamplingParams(max_tokens=max_tokens, **settings), step)


def greedy(has_long_launches: bool) -> Schedule:
    """Prompts that take several steps beside decodes, on both sides of a page's end."""
    return Schedule(
        (
            arrival(0, 5, 0, 6, temperature=0),
            arrival(1, 40, 0, 9, temperature=0),
            arrival(2, 16, 1, 8, temperature=0),
            arrival(3, 1, 2, 12, temperature=0),
            arrival(4, 33, 3, 3, temperature=0),
        ),
        has_long_launches,
    )


def drawn() -> Schedule:
    """Requests that draw with every threshold, and request log-probabilities."""
    return Schedule(
        (
            arrival(0, 5, 0, 6, temperature=0.9, top_k=20, top_p=0.9, seed=1, logprobs=5),
            arrival(1, 40, 0, 6, temperature=1.0, seed=2, prompt_logprobs=3),
            arrival(2, 16, 1, 7, temperature=0.7, min_p=0.1, seed=3, n=2),
            arrival(3, 1, 2, 8, temperature=2.0, top_p=0.5, seed=2**64 - 1, logprobs=0),
            arrival(4, 17, 3, 4, temperature=0.0),
        )
    )


def edited() -> Schedule:
    """Requests that change logits, and guided ones, two of which get new masks in one step."""
    few = [7, 11, 100, 200, 300, 480, 510]
    return Schedule(
        (
            arrival(0, 5, 0, 6, seed=1, repetition_penalty=1.6, presence_penalty=0.5),
            arrival(1, 40, 0, 6, temperature=0, frequency_penalty=1.5, bad_words=["a", "the"]),
            arrival(2, 16, 1, 7, seed=3, structured_outputs=form(regex="[ab]{3,30}c")),
            arrival(3, 1, 2, 6, seed=4, logit_bias={9: 5.0, 10: -100.0}, allowed_token_ids=few),
            arrival(4, 9, 2, 5, seed=5, structured_outputs=form(choice=["yes", "no", "perhaps"])),
            arrival(5, 7, 3, 5, seed=6, structured_outputs=form(regex="[0-9]{4}")),
            arrival(6, 7, 4, 5, seed=6, min_tokens=3, ignore_eos=False, stop_token_ids=[5, 6, 7]),
        )
    )


def form(**fields: Any) -> StructuredOutputsParams:
    """Describe the form of a guided answer."""
    return StructuredOutputsParams(**fields)


def whole() -> Schedule:
    """One request of each kind, side by side."""
    return Schedule(
        (
            arrival(0, 5, 0, 5, temperature=0, logprobs=20),
            arrival(1, 40, 0, 5, temperature=0.9, top_k=50, top_p=0.9, seed=2, prompt_logprobs=2),
            arrival(2, 16, 1, 5, seed=3, repetition_penalty=1.6, logit_bias={9: 5.0, 10: -100.0}),
            arrival(3, 9, 1, 4, seed=4, structured_outputs=form(regex="[ab]{3,30}c")),
            arrival(4, 7, 2, 3, seed=5, structured_outputs=form(choice=["yes", "no"])),
        ),
        begins_with_padding=True,
    )


def several() -> Schedule:
    """Launches of several steps, in which rows end: at a stop token, at their length, later."""
    stops = list(range(300, 332))
    return Schedule(
        (
            arrival(0, 5, 0, 9, temperature=0),
            arrival(1, 20, 0, 7, temperature=0.9, top_k=50, top_p=0.9, seed=2),
            arrival(2, 33, 0, 8, seed=3, presence_penalty=1.0, stop_token_ids=stops),
            arrival(3, 15, 0, 6, temperature=0.7, min_p=0.05, seed=4),
        ),
        has_long_launches=True,
        begins_with_padding=True,
    )


def pressed() -> Schedule:
    """Prompts with equal beginnings, and too few pages: some are shared, and rows preempted."""
    return Schedule(
        (
            arrival(0, 30, 0, 22, temperature=0),
            arrival(1, 14, 0, 22, temperature=0),
            arrival(0, 36, 4, 8, temperature=0),
        ),
        most_pages=7,
    )


def spoken() -> Schedule:
    """Prompts in words, for the bundled model."""
    prompts = {
        "Hello": 6,
        "add 3 4 and then tell me what the answer is, please, in words": 9,
        "reverse: abcdefghijklmnopqrstuvwxyz 0123456789 abcdefghij": 12,
        "x": 3,
        "copy: one two three": 8,
    }
    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    return Schedule(
        tuple(
            Arrival(text, SamplingParams(max_tokens=count, **greedy), 0)
            for text, count in prompts.items()
        )
    )


def scored(schedule: Schedule) -> Schedule:
    """Return the same schedule with all requests' log-probabilities requested."""
    arrivals = [
        dataclasses.replace(a, sampling=dataclasses.replace(a.sampling, logprobs=20))
        for a in schedule.arrivals
    ]
    return dataclasses.replace(schedule, arrivals=tuple(arrivals))


def few_greedy() -> Schedule:
    """A prompt in two chunks, the second beside a decode, and greedy decodes."""
    return Schedule((arrival(0, 5, 0, 4, temperature=0), arrival(1, 40, 0, 3, temperature=0)))


def few_edited() -> Schedule:
    """A guided request, and one that is penalized."""
    return Schedule(
        (
            arrival(0, 5, 0, 4, seed=3, structured_outputs=form(regex="[ab]{3,30}c")),
            arrival(1, 20, 0, 3, seed=2, top_p=0.9, repetition_penalty=1.6),
        )
    )


def few_several() -> Schedule:
    """Launches of several steps, with a row that ends before the others."""
    return Schedule(
        (
            arrival(0, 5, 0, 4, temperature=0),
            arrival(1, 12, 0, 4, temperature=0.9, top_p=0.9, seed=2),
            arrival(2, 15, 0, 3, seed=3, presence_penalty=1.0),
        ),
        has_long_launches=True,
    )


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "greedy": greedy(has_long_launches=False),
        "drawn": drawn(),
        "edited": edited(),
        "whole": whole(),
        "several": several(),
        "several-greedy": greedy(has_long_launches=True),
        "pressed": pressed(),
        "spoken": spoken(),
        "few-greedy": few_greedy(),
        "few-several": few_several(),
        "few-edited": few_edited(),
    }
)
EVERYWHERE = ("whole", "several")
"""Schedules that make every kind of launch; the others make more of them."""
