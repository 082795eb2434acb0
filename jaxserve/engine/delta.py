"""Delta: the engine's answers, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.engine.metrics import SequenceTimes
from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason
from jaxserve.scheduling.logprobs import TokenLogprobs


@dataclass
class Delta:
    """The news of one completion of a request.

    Where they are requested, `logprobs` has a row for each of `token_ids`, and `prompt_logprobs`
    one for each prompt token but the first, once: with the first token of completion 0. An `error`
    that the request itself has caused comes with the `parameter` to blame. The last delta of a
    completion that a token ended has its `times`.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    parameter: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    times: SequenceTimes | None = None

    def fail(self, error: str | InvalidRequest) -> None:
        """Say what went wrong; an InvalidRequest is the request's own fault."""
        self.error = str(error)
        if isinstance(error, InvalidRequest):
            self.parameter = error.parameter


Sink = Callable[[Delta], None]
