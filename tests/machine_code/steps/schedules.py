"""Schedules that an engine serves: requests that make every kind of launch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.request import SamplingParams
from jaxserve.structured import StructuredOutputsParams
from tests.machine_code.steps.engine import Arrival
from tests.machine_code.steps.models import VOCAB


def prompt(number: int, length: int) -> tuple[int, ...]:
    """Draw a prompt of tokens that are no special ones."""
    tokens = np.random.default_rng(number).integers(4, VOCAB, length)
    return tuple(int(token) for token in tokens)


def arrival(number: int, length: int, step: int, max_tokens: int, **settings: Any) -> Arrival:
    """Make a request; it goes on past the model's end unless a setting says otherwise."""
    sampling = SamplingParams(
        max_tokens=max_tokens, detokenize=False, **({"ignore_eos": True} | settings)
    )
    return Arrival(prompt(number, length), sampling, step)


def greedy() -> list[Arrival]:
    """Prompts that take several steps beside decodes, on both sides of a page's end."""
    return [
        arrival(0, 5, 0, 6, temperature=0),
        arrival(1, 40, 0, 9, temperature=0),
        arrival(2, 16, 1, 8, temperature=0),
        arrival(3, 1, 2, 12, temperature=0),
        arrival(4, 33, 3, 3, temperature=0),
    ]


def drawn() -> list[Arrival]:
    """Requests that draw with every threshold, and ask for log-probabilities."""
    return [
        arrival(0, 5, 0, 6, temperature=0.9, top_k=20, top_p=0.9, seed=1, logprobs=5),
        arrival(1, 40, 0, 6, temperature=1.0, seed=2, prompt_logprobs=3),
        arrival(2, 16, 1, 7, temperature=0.7, min_p=0.1, seed=3, n=2),
        arrival(3, 1, 2, 8, temperature=2.0, top_p=0.5, seed=2**64 - 1, logprobs=0),
        arrival(4, 17, 3, 4, temperature=0.0),
    ]


def edited() -> list[Arrival]:
    """Requests that change logits, and guided ones."""

    def form(**fields: Any) -> StructuredOutputsParams:
        return StructuredOutputsParams(**fields)

    few = [7, 11, 100, 200, 300, 480, 510]
    return [
        arrival(0, 5, 0, 6, seed=1, repetition_penalty=1.6, presence_penalty=0.5),
        arrival(1, 40, 0, 6, temperature=0, frequency_penalty=1.5, bad_words=["a", "the"]),
        arrival(2, 16, 1, 7, seed=3, structured_outputs=form(regex="[ab]{3,30}c")),
        arrival(3, 1, 2, 6, seed=4, logit_bias={9: 5.0, 10: -100.0}, allowed_token_ids=few),
        arrival(4, 9, 3, 5, seed=5, structured_outputs=form(choice=["yes", "no", "perhaps"])),
        arrival(5, 7, 4, 5, seed=6, min_tokens=3, ignore_eos=False, stop_token_ids=[5, 6, 7]),
    ]


SCHEDULES: Mapping[str, Any] = MappingProxyType(
    {"greedy": greedy, "drawn": drawn, "edited": edited}
)
