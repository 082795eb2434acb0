"""Log-probabilities of tokens that were drawn, or that a prompt consists of."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from types import MappingProxyType
from typing import NamedTuple

import numpy as np


class TokenLogprobs(NamedTuple):
    """N tokens under the model's distribution, before any setting of the sampler changes it, or in
    another `logprobs_mode` of the engine.

    Attributes:
        logprob: float[N], natural logarithms.
        rank: int32[N], 1 for the most likely token.
        top_ids: int32[N, K], the K most likely tokens, best first; or those that were listed.
        top_logprobs: float[N, K].
        top_ranks: int32[N, K] of listed tokens; None where they follow from the order.
    """

    logprob: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    top_ranks: np.ndarray | None = None

    def ranks(self) -> np.ndarray:
        """Return int[N, K], the ranks of `top_ids`."""
        if self.top_ranks is not None:
            return self.top_ranks
        places = np.arange(1, self.top_ids.shape[1] + 1, dtype=np.int32)
        return np.tile(places, (len(self.top_ids), 1))

    def part(self, rows: slice, width: int) -> TokenLogprobs:
        """Copy a slice of the rows, with at most `width` alternatives each."""
        return TokenLogprobs(
            self.logprob[rows].copy(),
            self.rank[rows].copy(),
            self.top_ids[rows, :width].copy(),
            self.top_logprobs[rows, :width].copy(),
            None if self.top_ranks is None else self.top_ranks[rows, :width].copy(),
        )


def score_tokens(
    logits: np.ndarray,
    tokens: np.ndarray,
    width: int,
    listed: Listing[int] = (),
    as_logits: bool = False,
) -> TokenLogprobs:
    """Compute what the device would, and what it keeps no room for, from whole rows of logits.

    A row's numbers depend on nothing but the row.

    Args:
        logits: float[N, V]; -inf where a token is excluded.
        tokens: int[N], one a row.
        width: K, alternatives a row, or V if that is less; of equals the lower id comes first.
        listed: K token ids in place of the most likely ones.
        as_logits: return logits themselves instead of log-probabilities.
    """
    rows, width = np.arange(len(logits))[:, None], min(width, logits.shape[1])
    own = logits[rows, tokens[:, None]]
    rank = 1 + (logits > own).sum(axis=1, dtype=np.int32)
    total = np.zeros((len(logits), 1))
    if not as_logits:
        most = logits.max(axis=1, keepdims=True, initial=-np.inf).astype(np.float64)
        total = most + np.log(np.exp(logits - most).sum(axis=1, keepdims=True))
    if len(listed):
        ids = np.tile(np.array(listed, np.int32), (len(logits), 1))
    else:
        found = [_most_likely(row, width) for row in logits]
        ids = np.array(found, np.int32).reshape(len(logits), width)
    values = logits[rows, ids]
    ranks = None
    if len(listed):
        ranks = np.array([_ranks(*row) for row in zip(logits, values, strict=True)], np.int32)
        ranks = ranks.reshape(ids.shape)

    def scored(parts: np.ndarray) -> np.ndarray:
        return (parts - total).astype(logits.dtype)

    return TokenLogprobs(scored(own)[:, 0], rank, ids, scored(values), ranks)


def _ranks(row: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the rank of each of some values among float[V]: 1, and how many are greater."""
    return 1 + len(row) - np.searchsorted(np.sort(row), values, side="right")


def _most_likely(row: np.ndarray, width: int) -> np.ndarray:
    """Return the ids of the `width` greatest of float[V], the greatest first."""
    if 0 < width < len(row):
        least = np.partition(row, len(row) - width)[len(row) - width]
        # Those that equal the least one come in the order of their ids, and the last ones leave.
        places = np.flatnonzero(row >= least)
        return places[np.argsort(-row[places], kind="stable")][:width]
    return np.argsort(-row, kind="stable")[:width]


class StepLogprobs(NamedTuple):
    """Log-probabilities that a launch computed for the rows of its plan that request them.

    Attributes:
        widths: int32[R], alternatives for each token that a row draws; -1 for no
            log-probabilities.
        ends: int32[R], for each row the position in `logprobs` after its last.
        logprobs: [T], of the token that follows each of the step's tokens; or, where no prompt's
            are requested, [R], of the token that each row draws; None if no row takes them.
        logits: float[R, V], of each row's draw, for rows that the host scores; None for none.
        prompts: what the host scored of prompts, by row.
    """

    widths: np.ndarray
    ends: np.ndarray
    logprobs: TokenLogprobs | None
    logits: np.ndarray | None = None
    prompts: Mapping[int, TokenLogprobs] = MappingProxyType({})

    def of_draws(self, drawn: np.ndarray) -> list[TokenLogprobs | None]:
        """Return the log-probabilities of each token drawn, bool[R] marking its row, or None."""
        rows, logprobs = np.flatnonzero(drawn), self.logprobs
        if logprobs is None:
            return [None] * len(rows)
        return [
            logprobs.part(slice(end - 1, end), width) if width >= 0 else None
            for end, width in zip(self.ends[rows].tolist(), self.widths[rows].tolist(), strict=True)
        ]


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, the first excepted, filled chunk by chunk.

    They outlive preemption: what is computed again is written again, and is equal.

    Args:
        num_prompt: tokens of the prompt.
        width: alternatives for each token.
        by_host: the host computes them, since the device keeps no room for so many, or since they
            are logits.
        as_logits: they are logits.

    Attributes:
        is_sent: whether they have been handed to the receiver.
    """

    def __init__(
        self, num_prompt: int, width: int, by_host: bool = False, as_logits: bool = False
    ) -> None:
        self.width = width
        self.by_host = by_host
        self.as_logits = as_logits
        self.is_sent = False
        self._num_tokens = num_prompt - 1
        self._filled = 0
        self._logprobs: TokenLogprobs | None = None

    @property
    def is_complete(self) -> bool:
        return self._filled == self._num_tokens

    def put(self, start: int, part: TokenLogprobs) -> None:
        """Write the log-probabilities of the tokens after positions start, start + 1, ..."""
        if self._logprobs is None:
            self._logprobs = TokenLogprobs(
                *(
                    np.zeros((self._num_tokens, *column.shape[1:]), column.dtype)
                    for column in part[:4]
                )
            )
        assert start <= self._filled, "a chunk of the prompt was skipped"
        end = start + len(part.logprob)
        for whole, piece in zip(self._logprobs[:4], part[:4], strict=True):
            whole[start:end] = piece
        self._filled = max(self._filled, end)

    def take(self) -> TokenLogprobs:
        """Return all of them, once; they are not kept."""
        assert self.is_complete and not self.is_sent
        logprobs, self._logprobs, self.is_sent = self._logprobs, None, True
        if logprobs is None:
            none = np.zeros((0, self.width))
            return TokenLogprobs(
                none.sum(axis=1), np.zeros(0, np.int32), none.astype(np.int32), none
            )
        return logprobs
