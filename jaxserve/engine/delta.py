"""Delta, the increments of a completion that the engine sends, and their conversion to outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.engine.metrics import SequenceTimes
from jaxserve.errors import InvalidRequest
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats
from jaxserve.request import FinishReason, Request
from jaxserve.scheduling.logprobs import TokenLogprobs


@dataclass
class Delta:
    """New output of one completion since its previous delta: tokens, text and logprobs.

    The last delta of a completion has a finish_reason, and an error if the completion failed.
    """

    request_id: str  # the engine's id of the request
    index: int  # the number of the completion
    text: str
    token_ids: list[int]  # empty in a delta of arrays (see `tokens`)
    num_cached_tokens: int  # the prompt tokens that were found in the prefix cache
    version: str = ""  # the weights that computed the tokens, "" without tokens
    finish_reason: FinishReason | None = None  # the reason of the end, in the last delta
    # The stop token or text that ended the completion, if one did.
    stop_reason: int | str | None = None
    error: str | None = None  # the error that ended the completion, if one did
    parameter: str | None = None  # the invalid parameter if the request caused the error
    logprobs: TokenLogprobs | None = None  # one row per new token, if requested
    # One row per prompt token except the first, if requested. They come once, with the first token
    # of completion 0.
    prompt_logprobs: TokenLogprobs | None = None
    # The times of the sequence, in the last delta if a token ended the completion.
    times: SequenceTimes | None = None
    # int32, all new tokens of one launch, for a receiver of arrays. Otherwise None.
    tokens: np.ndarray | None = None

    def fail(self, error: str | InvalidRequest) -> None:
        """Set `error` to an error's message, and `parameter` to an InvalidRequest's field."""
        self.error = str(error)
        if isinstance(error, InvalidRequest):
            self.parameter = error.parameter


Sink = Callable[[Delta], None]


def logprob_dicts(
    scores: TokenLogprobs, token_ids: Listing[int], decode: Callable[[int], str | None]
) -> list[dict[int, Logprob]]:
    """Return for each token a dict of Logprobs by token id: the token, then its alternatives.

    Args:
        scores: log-probabilities and ranks of N tokens and their K alternatives.
        token_ids: the N tokens, one per row of `scores`.
        decode: returns the text of a token, or None.
    """
    texts: dict[int, str | None] = {}

    def text(token: int) -> str | None:
        if token not in texts:
            texts[token] = decode(token)
        return texts[token]

    ranks = scores.ranks()
    rows = zip(token_ids, *(part.tolist() for part in scores[:4]), ranks.tolist(), strict=True)
    return [
        {token: Logprob(logprob, rank, text(token))}
        | {
            other: Logprob(value, place, text(other))
            for other, value, place in zip(ids, values, places, strict=True)
            if other != token
        }
        for token, logprob, rank, ids, values, places in rows
    ]


class OutputReader:
    """Converter of the deltas of one request to vLLM's outputs, and of their times to `stats`.

    Args:
        tokenizer: decodes the texts of tokens in Logprobs, or None.
    """

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self._request = request
        self._tokenizer = tokenizer if request.sampling.detokenize else None
        since = time.monotonic() - request.arrival_time
        self._counts: dict[int, int] = {}  # the number of tokens of each completion so far
        # The combined times of the completions so far.
        self.stats = RequestStateStats(arrival_time=time.time() - since)

    def add(self, output: RequestOutput, completion: CompletionOutput, delta: Delta) -> None:
        """Append a delta's text, tokens and logprobs to outputs, and its times to `stats`.

        Args:
            output: the output of the request, changed in place. It gets the log-probabilities of
                the prompt, the number of cached tokens and the first error.
            completion: the completion of the delta, changed in place.
        """
        if delta.token_ids:
            self._add_version(completion, delta)
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        self._add_logprobs(output, completion, delta)
        self._add_times(delta)
        output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
        if delta.finish_reason is not None:
            completion.finish_reason = str(delta.finish_reason)
            completion.stop_reason = delta.stop_reason
            completion.error = delta.error
            output.error = output.error or delta.error

    def _add_version(self, completion: CompletionOutput, delta: Delta) -> None:
        count, versions = self._counts.get(delta.index, 0), completion.weight_versions
        if not versions or versions[-1][1] != delta.version:
            versions.append((count, delta.version))
        self._counts[delta.index] = count + len(delta.token_ids)

    def _add_times(self, delta: Delta) -> None:
        stats, times = self.stats, delta.times
        stats.num_generation_tokens += len(delta.token_ids)
        if times is None:
            return
        is_first = not stats.first_token_ts
        stats.queued_ts = times.arrived
        stats.num_preemptions += times.num_preemptions
        stats.last_token_ts = max(stats.last_token_ts, times.last_token)
        if is_first or times.started < stats.scheduled_ts:
            stats.scheduled_ts = times.started
        if is_first or times.first_token < stats.first_token_ts:
            stats.first_token_ts = times.first_token
            stats.first_token_latency = times.first_token - times.arrived

    def _text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token], False)

    def _add_logprobs(
        self, output: RequestOutput, completion: CompletionOutput, delta: Delta
    ) -> None:
        scores = delta.logprobs
        if scores is not None:
            completion.logprobs = completion.logprobs or []
            completion.logprobs += logprob_dicts(scores, delta.token_ids, self._text)
            total = completion.cumulative_logprob or 0.0
            completion.cumulative_logprob = total + float(scores.logprob.sum())
        if delta.prompt_logprobs is not None:
            following = self._request.prompt_token_ids[1:].tolist()
            rows = logprob_dicts(delta.prompt_logprobs, following, self._text)
            output.prompt_logprobs = [None, *rows]
