"""Conversion of log-probabilities from arrays to the form of vLLM's Python API."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import Any

from jaxserve.engine.delta import Delta
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.request import Request
from jaxserve.scheduling.logprobs import TokenLogprobs


def logprob_dicts(
    scores: TokenLogprobs, token_ids: Listing[int], decode: Callable[[int], str | None]
) -> list[dict[int, Logprob]]:
    """Return for each token a dict of Logprobs by token id: the token, then its alternatives.

    Args:
        scores: the log-probabilities of the tokens and of their alternatives.
        token_ids: one token per row of `scores`.
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


class LogprobReader:
    """A reader of one request's deltas that adds their log-probabilities to its outputs.

    Args:
        tokenizer: the tokenizer that decodes token texts, or None.
    """

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self._request = request
        self._tokenizer = tokenizer if request.sampling.detokenize else None

    def _text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token], False)

    def add(self, output: RequestOutput, completion: CompletionOutput, delta: Delta) -> None:
        """Append the log-probabilities of a delta to `completion`, and its prompt's to `output`.

        Both are changed in place. Text and tokens are not touched.
        """
        if delta.logprobs is not None:
            completion.logprobs = completion.logprobs or []
            completion.logprobs += logprob_dicts(delta.logprobs, delta.token_ids, self._text)
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + float(
                delta.logprobs.logprob.sum()
            )
        if delta.prompt_logprobs is not None:
            following = self._request.prompt_token_ids[1:].tolist()
            output.prompt_logprobs = [
                None,
                *logprob_dicts(delta.prompt_logprobs, following, self._text),
            ]
