"""Sequence: one completion being served, from arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.request import FinishReason, Request
from jaxserve.scheduling.logprobs import PromptLogprobs
from jaxserve.scheduling.page_keys import PrefixKeys

NO_SLOT = -1


@dataclass(eq=False, slots=True)
class Sequence:
    """A request's completion `index`, owned by the Scheduler until it has finished.

    While it holds a slot, its tokens and counters live in the slot table's columns, where a
    step over hundreds of sequences is a few array operations; `token_ids` is the state in
    which it waits: the prompt, and after a preemption what had been generated too.

    Attributes:
        arrival: position in the order of arrival, unique.
        token_ids: int32[tokens known], valid while waiting and after the end.
        prefix_keys: keys of the full pages of `token_ids`, once they were needed.
        slot: row of the slot table, or NO_SLOT.
        num_cached: prompt tokens found in the prefix cache when first admitted; -1 before.
        started: time of its first admission, by the scheduler's `now`; 0 before.
        num_preemptions: how often it was sent back to wait.
        num_failures: failed steps that it may have caused (see `engine.recovery`).
        precedence: sequences of higher precedence are served first, whatever their priority.
        prompt_logprobs: its prompt's log-probabilities as they come; None where none are requested.
        constraint: the form that bounds its text (see `text.grammars`), or None.
        blocked_at: the pool's `num_changes` when it last did not fit (see Scheduler).
    """

    request: Request
    arrival: int
    token_ids: np.ndarray
    index: int = 0
    seed: int = 0
    prefix_keys: PrefixKeys | None = None
    slot: int = NO_SLOT
    num_cached: int = -1
    started: float = 0.0
    num_preemptions: int = 0
    num_failures: int = 0
    precedence: int = 0
    blocked_at: int = -1
    prompt_logprobs: PromptLogprobs | None = None
    constraint: Any = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Return whether log-probabilities of its prompt are still to be computed."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete

    def output_token_ids(self) -> list[int]:
        """Return the generated tokens; only once it has finished."""
        return self.token_ids[self.num_prompt :].tolist()
