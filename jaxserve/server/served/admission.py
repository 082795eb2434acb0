"""Admission: counts what came in and has not ended, and refuses what the queue cannot hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.errors import Overloaded
from jaxserve.request import MAX_CHOICES, Request
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.config import EngineConfig

# Limits that --max-num-queued-reqs and --max-queued-prompt-tokens replace.
QUEUED_FOR_EACH_SLOT = 4
QUEUED_STEPS_OF_PROMPTS = 64
# Limits of the queue, as vLLM's `admission_rejections` calls them.
COMPLETIONS, PROMPT_TOKENS = "max_num_queued_reqs", "max_num_queued_tokens"


@dataclass
class Lifecycle:
    """State of the server between its start and its end."""

    is_draining: bool = False


class Admission:
    """Counts of completions and prompt tokens of one model, and their limits.

    Args:
        num_slots: completions that run at once.
        max_queued: completions that may wait besides.
        max_prompt_tokens: prompt tokens that may wait to be computed.

    Attributes:
        num_live: completions that run or wait.
        num_prompt_tokens: prompt tokens that wait to be computed.
        refusals: requests refused so far, by the limit, under vLLM's names.
    """

    def __init__(self, num_slots: int, max_queued: int, max_prompt_tokens: int) -> None:
        self.num_slots = num_slots
        self.max_queued = max_queued
        self.max_prompt_tokens = max_prompt_tokens
        self.num_live = 0
        self.num_prompt_tokens = 0
        self.refusals = {COMPLETIONS: 0, PROMPT_TOKENS: 0}

    @property
    def num_refused(self) -> int:
        """Requests refused so far."""
        return sum(self.refusals.values())

    @property
    def is_full(self) -> bool:
        """Return whether not even a single further completion would be admitted."""
        return self.num_live >= self.num_slots + self.max_queued

    def check(self, completions: int, prompt_tokens: int = 0) -> None:
        """Check that there is room for this many more.

        Args:
            completions: of a request.
            prompt_tokens: to be computed for them.

        Raises:
            Overloaded: there is none now.
        """
        most = self.num_slots + self.max_queued
        if self.num_live + completions > most:
            self.refusals[COMPLETIONS] += 1
            raise Overloaded(f"{self.num_live} completions are being served or waiting, of {most}")
        # A prompt larger than the bound itself is admitted where no other waits.
        waiting = self.num_prompt_tokens
        if waiting and waiting + prompt_tokens > self.max_prompt_tokens:
            self.refusals[PROMPT_TOKENS] += 1
            raise Overloaded(
                f"{waiting} prompt tokens are waiting to be computed, of {self.max_prompt_tokens}"
            )


def make_admission(engine: EngineConfig, server: ServerConfig) -> Admission:
    """Return the admission to an engine: limits of the server's settings, or their defaults."""
    slots, step_tokens = engine.max_num_seqs or 1, engine.max_num_batched_tokens or 1
    queued, tokens = server.max_num_queued_reqs, server.max_queued_prompt_tokens
    return Admission(
        slots,
        max(QUEUED_FOR_EACH_SLOT * slots, MAX_CHOICES) if queued is None else queued,
        QUEUED_STEPS_OF_PROMPTS * step_tokens if tokens is None else tokens,
    )


def prompt_tokens(requests: Iterable[Request]) -> int:
    """Count tokens to compute before every completion of these requests has its first token."""
    return sum(len(request.prompt_token_ids) * request.sampling.n for request in requests)
