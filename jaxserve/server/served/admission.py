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
        num_coming: requests that are being read, each of which has a `Place`.
        num_prompt_tokens: prompt tokens that wait to be computed.
        refusals: requests refused so far, by the limit, under vLLM's names.
    """

    def __init__(self, num_slots: int, max_queued: int, max_prompt_tokens: int) -> None:
        self.num_slots = num_slots
        self.max_queued = max_queued
        self.max_prompt_tokens = max_prompt_tokens
        self.num_live = 0
        self.num_coming = 0
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

    @property
    def num_free(self) -> int:
        """Places for requests that begin now; 0 where `check` refuses each of one prompt token."""
        waiting = self.num_prompt_tokens
        if waiting > 0 and waiting >= self.max_prompt_tokens:
            return 0
        return max(0, self.num_slots + self.max_queued - self.num_live - self.num_coming)

    def check(self, completions: int, prompt_tokens: int = 0, *, is_new: bool = False) -> None:
        """Check that there is room for this many more.

        Args:
            completions: of a request.
            prompt_tokens: to be computed for them.
            is_new: whether it has no place yet, so that those that are being read come first.

        Raises:
            Overloaded: there is none now.
        """
        most = self.num_slots + self.max_queued
        taken = self.num_live + (self.num_coming if is_new else 0)
        if taken + completions > most:
            self.refusals[COMPLETIONS] += 1
            raise Overloaded(f"{taken} completions are being served or waiting, of {most}")
        # A prompt larger than the bound itself is admitted where no other waits.
        waiting = self.num_prompt_tokens
        if waiting and waiting + prompt_tokens > self.max_prompt_tokens:
            self.refusals[PROMPT_TOKENS] += 1
            raise Overloaded(
                f"{waiting} prompt tokens are waiting to be computed, of {self.max_prompt_tokens}"
            )


class Place:
    """Room kept for a request that is being read.

    Without it, all that comes while one place is free would be parsed and routed, and refused then.

    Args:
        admission: whose place it is.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission
        admission.num_coming += 1

    def leave(self) -> None:
        """Give it up: the request counts as a live one from now, or has ended."""
        if self._admission is not None:
            self._admission.num_coming -= 1
            self._admission = None


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
