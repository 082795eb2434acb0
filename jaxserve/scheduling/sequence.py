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
    """One completion of a request, from its arrival to its end, owned by the scheduler.

    While a sequence has a slot, its tokens and counters are in the slot table's columns, where a
    step over hundreds of sequences takes a few array operations.
    """

    request: Request
    arrival: int  # the position in the order of arrival, unique
    # int32[known tokens], valid while the sequence waits and after its end: the prompt and, after a
    # preemption, the generated tokens.
    token_ids: np.ndarray
    index: int = 0  # the number of the completion within the request
    seed: int = 0
    # The keys of the full pages of `token_ids`, once they have been computed.
    prefix_keys: PrefixKeys | None = None
    slot: int = NO_SLOT  # the row of the slot table, or NO_SLOT
    # The prompt tokens found in the prefix cache at the first admission, -1 before.
    num_cached: int = -1
    started: float = 0.0  # the time of the first admission by the scheduler's `now`, 0 before
    num_preemptions: int = 0
    # The failed steps that the sequence may have caused (see `engine.recovery`).
    num_failures: int = 0
    precedence: int = 0  # sequences of higher precedence are served first, regardless of priority
    # The pool's `num_changes` when the sequence last did not fit (see Scheduler).
    blocked_at: int = -1
    # The log-probabilities of the prompt, or None if they are not requested.
    prompt_logprobs: PromptLogprobs | None = None
    constraint: Any = None  # the grammar constraint of the text (see `text.grammars`), or None
    finish_reason: FinishReason | None = None  # the reason of the end, None before
    stop_token: int | None = None  # the stop token that ended the sequence, if one did

    @property
    def num_prompt(self) -> int:
        """Number of tokens of the sequence's prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are requested and not complete yet."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete

    def output_token_ids(self) -> list[int]:
        """Return the generated token ids of a sequence that has no slot (waiting or finished)."""
        return self.token_ids[self.num_prompt :].tolist()
