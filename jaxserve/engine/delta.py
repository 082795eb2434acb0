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
    """An increment of one completion of a request."""

    request_id: str  # the engine's id of the request
    index: int  # the number of the completion
    text: str
    token_ids: list[int]
    num_cached_tokens: int  # the prompt tokens that were found in the prefix cache
    finish_reason: FinishReason | None = None  # the reason of the end, in the last delta
    # The stop token or text that ended the completion, if one did.
    stop_reason: int | str | None = None
    error: str | None = None  # the error that ended the completion, if one did
    parameter: str | None = None  # the invalid parameter if the request caused the error
    logprobs: TokenLogprobs | None = None  # one row per token in `token_ids`, if requested
    # One row per prompt token except the first, if requested. They come once, with the first token
    # of completion 0.
    prompt_logprobs: TokenLogprobs | None = None
    # The times of the sequence, in the last delta if a token ended the completion.
    times: SequenceTimes | None = None

    def fail(self, error: str | InvalidRequest) -> None:
        """Set `error`, and `parameter` if the error is an InvalidRequest."""
        self.error = str(error)
        if isinstance(error, InvalidRequest):
            self.parameter = error.parameter


Sink = Callable[[Delta], None]
