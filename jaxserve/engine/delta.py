"""Delta: the increments of a completion that the engine sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.engine.metrics import SequenceTimes
from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason
from jaxserve.scheduling.logprobs import TokenLogprobs


@dataclass
class Delta:
    """An increment of one completion of a request.

    Attributes:
        request_id: the engine's id of the request.
        index: the number of the completion.
        num_cached_tokens: the prompt tokens that were found in the prefix cache.
        finish_reason: the reason of the end, in the last delta.
        stop_reason: the stop token or text that ended the completion, if one did.
        error: the error that ended the completion, if one did.
        parameter: the invalid parameter if the request caused the error.
        logprobs: one row per token in `token_ids`, if requested.
        prompt_logprobs: one row per prompt token except the first, if requested. They come once,
            with the first token of completion 0.
        times: the times of the sequence, in the last delta if a token ended the completion.
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
        """Set `error`, and `parameter` if the error is an InvalidRequest."""
        self.error = str(error)
        if isinstance(error, InvalidRequest):
            self.parameter = error.parameter


Sink = Callable[[Delta], None]
