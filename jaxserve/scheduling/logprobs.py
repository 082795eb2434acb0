"""Log-probabilities of sampled tokens and of prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from types import MappingProxyType
from typing import NamedTuple

import numpy as np


class TokenLogprobs(NamedTuple):
    """Log-probabilities and ranks of N tokens, and of K alternatives for each of them.

    By default they describe the model's distribution before sampling parameters are applied. Other
    values of `logprobs_mode` change that.
    """

    logprob: np.ndarray  # float[N], natural logarithms
    rank: np.ndarray  # int32[N], 1 for the most likely token
    # int32[N, K], the K most likely tokens in descending order, or the listed tokens.
    top_ids: np.ndarray
    top_logprobs: np.ndarray  # float[N, K], the log-probabilities of `top_ids`
    # int32[N, K], the ranks of listed tokens. None if the ranks are 1 to K.
    top_ranks: np.ndarray | None = None

    def ranks(self) -> np.ndarray:
        """Return int[N, K]: the rank of each alternative in `top_ids`, 1 for the most likely."""
        if self.top_ranks is not None:
            return self.top_ranks
        places = np.arange(1, self.top_ids.shape[1] + 1, dtype=np.int32)
        return np.tile(places, (len(self.top_ids), 1))

    def first(self, count: int) -> TokenLogprobs:
        """Return a view of the first `count` of the N tokens."""
        return TokenLogprobs(
            *(None if column is None else column[:count] for column in self)  # pyright: ignore
        )

    def part(self, rows: slice, width: int) -> TokenLogprobs:
        """Return a copy of some of the N tokens, with at most `width` alternatives each.

        Args:
            rows: slice of the tokens.
            width: most alternatives of a token.
        """
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
    """Compute in NumPy the log-probability and rank of one token per row, and alternatives.

    The host scores tokens if the device lacks room for the alternatives. The result of a row
    depends on that row only.

    Args:
        logits: float[N, V], -inf for excluded tokens.
        tokens: int[N], one token per row.
        width: K, the number of most likely tokens to return as alternatives, at most V. Ties go to
            the lower token id.
        listed: token ids to return as alternatives instead of the most likely tokens.
        as_logits: return logits instead of log-probabilities.
    """
    rows, width = np.arange(len(logits))[:, None], min(width, logits.shape[1])
    logit = logits[rows, tokens[:, None]]
    rank = 1 + (logits > logit).sum(axis=1, dtype=np.int32)
    total = np.zeros((len(logits), 1))
    if not as_logits:
        most = logits.max(axis=1, keepdims=True, initial=-np.inf).astype(np.float64)
        total = most + np.log(np.exp(logits - most).sum(axis=1, keepdims=True))
    if len(listed):
        ids = np.tile(np.array(listed, np.int32), (len(logits), 1))
    else:
        most_likely = [_most_likely(row, width) for row in logits]
        ids = np.array(most_likely, np.int32).reshape(len(logits), width)
    values = logits[rows, ids]
    ranks = None
    if len(listed):
        ranks = np.array([_ranks(*row) for row in zip(logits, values, strict=True)], np.int32)
        ranks = ranks.reshape(ids.shape)

    def scored(parts: np.ndarray) -> np.ndarray:
        return (parts - total).astype(logits.dtype)

    return TokenLogprobs(scored(logit)[:, 0], rank, ids, scored(values), ranks)


def _ranks(row: np.ndarray, values: np.ndarray) -> np.ndarray:
    # One plus the number of greater elements of `row`, for each value.
    return 1 + len(row) - np.searchsorted(np.sort(row), values, side="right")


def _most_likely(row: np.ndarray, width: int) -> np.ndarray:
    if 0 < width < len(row):
        least = np.partition(row, len(row) - width)[len(row) - width]
        # Elements equal to `least` are sorted by id, and the last of them are dropped.
        places = np.flatnonzero(row >= least)
        return places[np.argsort(-row[places], kind="stable")][:width]
    return np.argsort(-row, kind="stable")[:width]


class StepLogprobs(NamedTuple):
    """The log-probabilities that a launch computed for sampled tokens and prompts, by row.

    R is the number of rows of the launch, and T its number of tokens.
    """

    # int32[R], the number of alternatives that each row requests. -1 if a row requests no log-
    # probabilities.
    widths: np.ndarray
    ends: np.ndarray  # int32[R], for each row the position after its last element in `logprobs`
    # T elements, one for the successor of each token of the step. R elements for each step, one for
    # the sampled token of each row, if no row requests prompt scores. None if no row requests any.
    logprobs: TokenLogprobs | None
    # float[R, V], the logits of each row's sampled token if the host scores them.
    logits: np.ndarray | None = None
    # The log-probabilities of prompt tokens that the host computed, by row.
    prompts: Mapping[int, TokenLogprobs] = MappingProxyType({})
    of_step: int = 0  # the elements of `logprobs` of each step of a launch

    def of_draws(self, drawn: np.ndarray, counts: np.ndarray | None) -> DrawLogprobs:
        """Return the log-probabilities of the sampled tokens that sequences keep.

        Args:
            drawn: bool[R], the rows that keep a token.
            counts: int[N], the tokens that each of these N rows keeps. None if it is one for each.
        """
        rows = np.flatnonzero(drawn)
        where = self.ends[rows] - 1
        if counts is not None:
            firsts = (counts.cumsum() - counts).repeat(counts)
            steps = np.arange(len(firsts)) - firsts
            where = where.repeat(counts) + steps * self.of_step
        return DrawLogprobs(self.logprobs, where, self.widths[rows].tolist())


class DrawLogprobs:
    """The log-probabilities of the tokens of a launch that sequences keep, row by row.

    Args:
        logprobs: the log-probabilities of the launch, or None if no row requests any from the
            device.
        where: int[tokens], the place of each token in `logprobs`.
        widths: the number of alternatives that each row requests, -1 without a request.

    Attributes:
        by_host: the log-probabilities of the rows that the host has scored, by the number of the
            row.
    """

    def __init__(
        self, logprobs: TokenLogprobs | None, where: np.ndarray, widths: list[int]
    ) -> None:
        self.by_host: dict[int, TokenLogprobs] = {}
        self._logprobs = logprobs
        self._where = where
        self._places: list[int] = where.tolist()
        self._widths = widths
        self._gathered: TokenLogprobs | None = None

    def of_token(self, row: int, token: int) -> TokenLogprobs | None:
        """Return a copy of the log-probabilities of one token, or None without a request.

        Args:
            row: the number of the row among the rows that keep tokens.
            token: the number of the token among the tokens of all rows.
        """
        width, place = self._widths[row], self._places[token]
        if self._logprobs is None or width < 0:
            return self.by_host.get(row)
        return self._logprobs.part(slice(place, place + 1), width)

    def of_row(self, row: int, first: int, last: int) -> TokenLogprobs | None:
        """Return the log-probabilities of all tokens of a row, or None without a request.

        Args:
            row: see `of_token`.
            first, last: the range of the row's tokens among the tokens of all rows.
        """
        width = self._widths[row]
        if self._logprobs is None or width < 0:
            return self.by_host.get(row)
        if self._gathered is None:  # once for all rows
            columns = (column[self._where] for column in self._logprobs[:4])
            self._gathered = TokenLogprobs(*columns)
        logprob, rank, ids, values = self._gathered[:4]
        tokens = slice(first, last)
        return TokenLogprobs(
            logprob[tokens], rank[tokens], ids[tokens, :width], values[tokens, :width]
        )


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens except the first. `put` stores them chunk by chunk.

    They survive preemption. Chunks that are computed again are written again, with equal values.

    Args:
        num_prompt: number of tokens of the prompt.
        width: number of alternatives per token.
        by_host: whether the host computes them: the device has too little room for the
            alternatives, or logits were requested.
        as_logits: whether they are logits instead of log-probabilities.
    """

    def __init__(
        self, num_prompt: int, width: int, by_host: bool = False, as_logits: bool = False
    ) -> None:
        self.width = width
        self.by_host = by_host
        self.as_logits = as_logits
        self.is_sent = False  # whether `take` has returned them
        self._num_tokens = num_prompt - 1
        self._filled = 0
        self._logprobs: TokenLogprobs | None = None

    @property
    def is_complete(self) -> bool:
        return self._filled == self._num_tokens

    def start_anew(self) -> None:
        """Discard the values that `take` has not returned: other weights compute them again."""
        if not self.is_sent:
            self._filled = 0

    def put(self, start: int, part: TokenLogprobs) -> None:
        """Store the log-probabilities of the prompt tokens at positions start + 1, start + 2, ...

        Args:
            start: the first position, at most the number of tokens stored so far.
            part: the log-probabilities of a chunk.
        """
        if self._logprobs is None:
            shape = (self._num_tokens,)
            empty = [np.zeros(shape + column.shape[1:], column.dtype) for column in part[:4]]
            self._logprobs = TokenLogprobs(*empty)
        assert start <= self._filled, "a chunk of the prompt was skipped"
        end = start + len(part.logprob)
        for whole, piece in zip(self._logprobs[:4], part[:4], strict=True):
            whole[start:end] = piece
        self._filled = max(self._filled, end)

    def take(self) -> TokenLogprobs:
        """Return the log-probabilities of all tokens of the prompt but the first, and release them.

        The method can be called once, when all chunks have been stored.
        """
        assert self.is_complete and not self.is_sent
        logprobs, self._logprobs, self.is_sent = self._logprobs, None, True
        if logprobs is None:
            none = np.zeros((0, self.width))
            return TokenLogprobs(
                none.sum(axis=1), np.zeros(0, np.int32), none.astype(np.int32), none
            )
        return logprobs
