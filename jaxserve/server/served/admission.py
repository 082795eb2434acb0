"""Admission: counts unfinished requests, and refuses requests beyond the limits of the queue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.errors import Overloaded
from jaxserve.request import MAX_CHOICES, Request
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.config import EngineConfig

# Defaults of --max-num-queued-reqs and --max-queued-prompt-tokens, per slot and per step.
QUEUED_FOR_EACH_SLOT = 4
QUEUED_STEPS_OF_PROMPTS = 64
# Names of the limits in vLLM's `admission_rejections`.
COMPLETIONS, PROMPT_TOKENS = "max_num_queued_reqs", "max_num_queued_tokens"


@dataclass
class Lifecycle:
    """State of the server: `is_draining` is True once the server has begun to stop."""

    is_draining: bool = False


class Admission:
    """Counts of the completions and prompt tokens of one model, and the limits of its queue.

    Requests beyond a limit are refused.

    Args:
        num_slots: number of completions that run at a time.
        max_queued: maximum number of further completions that wait.
        max_prompt_tokens: maximum number of prompt tokens that wait to be computed.
    """

    def __init__(self, num_slots: int, max_queued: int, max_prompt_tokens: int) -> None:
        self.num_slots = num_slots
        self.max_queued = max_queued  # maximum number of further completions that wait
        self.max_prompt_tokens = max_prompt_tokens
        self.num_live = 0  # number of running and waiting completions
        self.num_coming = 0  # number of requests with a `Place`, which are being read
        self.num_prompt_tokens = 0  # number of prompt tokens that wait to be computed
        # Number of refused requests by limit, under vLLM's names.
        self.refusals = {COMPLETIONS: 0, PROMPT_TOKENS: 0}

    @property
    def num_refused(self) -> int:
        """Number of requests that the model's queue has refused since the server's start."""
        return sum(self.refusals.values())

    @property
    def is_full(self) -> bool:
        """Return whether the model's queue would refuse a request with a single completion."""
        return self.num_live >= self.num_slots + self.max_queued

    @property
    def num_free(self) -> int:
        """Number of free places in the queue, for requests with one completion and prompt token.

        Requests that are being read have taken theirs. It is 0 if the limit on waiting prompt
        tokens is reached.
        """
        waiting = self.num_prompt_tokens
        if waiting > 0 and waiting >= self.max_prompt_tokens:
            return 0
        return max(0, self.num_slots + self.max_queued - self.num_live - self.num_coming)

    def check(self, completions: int, prompt_tokens: int = 0, *, is_new: bool = False) -> None:
        """Check that the model's queue has room for a request. The request is not counted.

        A refusal is counted. A prompt larger than the limit on prompt tokens is admitted if no
        other prompt waits.

        Args:
            completions: number of the request's completions.
            prompt_tokens: number of its prompt tokens, counted for each completion.
            is_new: whether the request has no `Place`, so that the places of other requests count
                as taken.

        Raises:
            Overloaded: the number of completions or of waiting prompt tokens would exceed its
                limit.
        """
        most = self.num_slots + self.max_queued
        taken = self.num_live + (self.num_coming if is_new else 0)
        if taken + completions > most:
            self.refusals[COMPLETIONS] += 1
            raise Overloaded(f"{taken} completions are being served or waiting, of {most}")
        # A prompt larger than the limit is admitted if no other prompt waits.
        waiting = self.num_prompt_tokens
        if waiting and waiting + prompt_tokens > self.max_prompt_tokens:
            self.refusals[PROMPT_TOKENS] += 1
            raise Overloaded(
                f"{waiting} prompt tokens are waiting to be computed, of {self.max_prompt_tokens}"
            )


class Place:
    """Reserved place in a queue for a request whose body is being read.

    Creating it adds 1 to the queue's `num_coming`. Without places, all requests that arrive while
    one place is free would be parsed and routed, and then refused.

    Args:
        admission: the queue.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission
        admission.num_coming += 1

    def leave(self) -> None:
        """Return the place to the queue. Further calls have no effect.

        The request has been read, so that its completions are counted next, or it has ended.
        """
        if self._admission is not None:
            self._admission.num_coming -= 1
            self._admission = None


def make_admission(engine: EngineConfig, server: ServerConfig) -> Admission:
    """Return the `Admission` of an engine's queue, which is empty.

    Its limits are from the server's settings, or defaults from the engine's slots and step tokens.
    """
    slots, step_tokens = engine.max_num_seqs or 1, engine.max_num_batched_tokens or 1
    queued, tokens = server.max_num_queued_reqs, server.max_queued_prompt_tokens
    return Admission(
        slots,
        max(QUEUED_FOR_EACH_SLOT * slots, MAX_CHOICES) if queued is None else queued,
        QUEUED_STEPS_OF_PROMPTS * step_tokens if tokens is None else tokens,
    )


def prompt_tokens(requests: Iterable[Request]) -> int:
    """Return the total number of prompt tokens of requests. A prompt counts for each completion."""
    return sum(len(request.prompt_token_ids) * request.sampling.n for request in requests)
