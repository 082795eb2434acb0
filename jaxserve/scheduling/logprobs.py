"""Log-probabilities of tokens that were drawn, or that a prompt consists of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TokenLogprobs(NamedTuple):
    """N tokens under the model's distribution, before any setting of the sampler changes it.

    Attributes:
        logprob: float[N], natural logarithms.
        rank: int32[N], 1 for the most likely token.
        top_ids: int32[N, K], the K most likely tokens, best first.
        top_logprobs: float[N, K].
    """

    logprob: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def part(self, rows: slice, width: int) -> TokenLogprobs:
        """Copy a slice of the rows, with at most `width` alternatives each."""
        return TokenLogprobs(
            self.logprob[rows].copy(),
            self.rank[rows].copy(),
            self.top_ids[rows, :width].copy(),
            self.top_logprobs[rows, :width].copy(),
        )


class StepLogprobs(NamedTuple):
    """Log-probabilities that a launch computed for the rows of its plan that request them.

    Attributes:
        widths: int32[R], alternatives for each token that a row draws; -1 for no
            log-probabilities.
        ends: int32[R], for each row the position in `logprobs` after its last.
        logprobs: [T], of the token that follows each of the step's tokens; or, where no prompt's
            are requested, [R], of the token that each row draws.
    """

    widths: np.ndarray
    ends: np.ndarray
    logprobs: TokenLogprobs

    def of_draws(self, drawn: np.ndarray) -> list[TokenLogprobs | None]:
        """Return the log-probabilities of each token drawn, bool[R] marking its row, or None."""
        rows = np.flatnonzero(drawn)
        return [
            self.logprobs.part(slice(end - 1, end), width) if width >= 0 else None
            for end, width in zip(self.ends[rows].tolist(), self.widths[rows].tolist(), strict=True)
        ]


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, the first excepted, filled chunk by chunk.

    They outlive preemption: what is computed again is written again, and is equal.

    Args:
        num_prompt: tokens of the prompt.
        width: alternatives for each token.

    Attributes:
        is_sent: whether they have been handed to the receiver.
    """

    def __init__(self, num_prompt: int, width: int) -> None:
        self.width = width
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
                *(np.zeros((self._num_tokens, *column.shape[1:]), column.dtype) for column in part)
            )
        assert start <= self._filled, "a chunk of the prompt was skipped"
        end = start + len(part.logprob)
        for whole, piece in zip(self._logprobs, part, strict=True):
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
