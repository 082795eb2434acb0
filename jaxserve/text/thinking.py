"""ThinkingConstraint: limits the thinking tokens of a sequence, and forces the end of thoughts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.scheduling.slot_table import NO_TOKEN

# Number of recent tokens in whose text a marker of several tokens is searched.
_TAIL = 16
# Maximum tokens (blank lines) before the marker that begins the thoughts.
_BEFORE_START = 3


@dataclass(frozen=True)
class ThinkingMarks:
    """Markers by which the engine recognizes the thoughts of a sequence, and forces their end."""

    start: str  # text that begins the thoughts
    end: str  # text that ends the thoughts
    end_token_ids: tuple[int, ...]  # tokens that are forced to end the thoughts
    decode: Callable[[Sequence[int]], str]  # function from token ids to text
    start_token_id: int = NO_TOKEN  # token of `start` if it is a single token, otherwise NO_TOKEN
    is_open: bool = False  # True if the prompt has begun the thoughts
    is_closed: bool = False  # True if the prompt has ended the thoughts
    # Pattern that ends the thoughts, if `end` is not their only end.
    end_pattern: re.Pattern[str] | None = None


class Inner(Protocol):
    """Interface of a constraint on the text after the thoughts, such as
    `text.grammars.Constraint`.
    """

    words: np.ndarray

    def advance(self, token: int) -> bool: ...

    def copy(self) -> Inner: ...


class ThinkingConstraint:
    """Constraint of a sequence that allows any thoughts up to a token budget, and then forces their
    end.

    Args:
        marks: markers around the thoughts.
        budget: maximum tokens of the thoughts, None for no limit.
        inner: constraint on the text after the thoughts, or None.
        vocab_size: number of the model's logits.
        ends: token ids that end a sequence, which thoughts must not contain if `inner` must follow.
        ahead: number of tokens that may be sampled before the host has seen the newest one. When
            the budget is that close to its end, each step waits for the token before it.
    """

    def __init__(
        self,
        marks: ThinkingMarks,
        budget: int | None,
        inner: Inner | None,
        vocab_size: int,
        ends: Sequence[int],
        ahead: int,
    ) -> None:
        self._marks = marks
        self._budget = budget
        self._ahead = ahead
        self._inner = inner
        self._free = _bits(vocab_size)
        if inner is not None:
            self._free = self._free & ~_bits(vocab_size, ends)
        self._anything = _bits(vocab_size)
        self._forced = [_bits(vocab_size, [token]) for token in marks.end_token_ids]
        self._tail: list[int] = []
        self._num_tokens = 0  # thinking tokens, or tokens before the thoughts
        self._num_forced = 0
        self._start_id = [] if marks.start_token_id == NO_TOKEN else [marks.start_token_id]
        self._phase = "thinking" if marks.is_open else "before"
        if marks.is_closed:
            self._phase = "after"
        # Thoughts may begin instead of the constrained text, but not after its first token.
        self._may_start = _bits(vocab_size, self._start_id)
        self._settle()

    def copy(self) -> ThinkingConstraint:
        """Return an independent copy of the constraint in the same state, for another
        completion.
        """
        copied = ThinkingConstraint.__new__(ThinkingConstraint)
        copied.__dict__.update(self.__dict__)
        copied._tail = list(self._tail)
        copied._inner = None if self._inner is None else self._inner.copy()
        return copied

    def advance(self, token: int) -> bool:
        """Update the constraint with the next token of the sequence.

        Return whether the text after the thoughts is complete, so that only an end token may
        follow.

        Raises:
            GrammarError: the constraint after the thoughts does not allow the token.
        """
        complete = False
        if self._phase == "after":
            complete = self._inner is not None and self._inner.advance(token)
        elif self._phase == "forcing":
            # Any other token restarts the forced end.
            is_forced = token == self._marks.end_token_ids[self._num_forced]
            self._num_forced = self._num_forced + 1 if is_forced else 0
            if self._num_forced == len(self._forced):
                self._phase = "after"
        elif self._phase == "thinking":
            self._num_tokens += 1
            if self._has_end(token):
                self._phase = "after"
        else:
            complete = self._before(token)
        self._settle()
        return complete

    def _before(self, token: int) -> bool:
        self._num_tokens += 1
        if self._has(token, self._marks.start, self._start_id):
            self._phase, self._num_tokens, self._tail = "thinking", 0, []
        elif self._inner is not None:
            self._phase = "after"
            return self._inner.advance(token)
        elif self._num_tokens >= (_BEFORE_START if self._start_id else _TAIL):
            self._phase = "after"
        return False

    def _has_end(self, token: int) -> bool:
        pattern = self._marks.end_pattern
        if pattern is None:
            return self._has(token, self._marks.end, self._marks.end_token_ids)
        self._tail = [*self._tail[1 - _TAIL :], token]
        return pattern.search(self._marks.decode(self._tail)) is not None

    def _has(self, token: int, mark: str, ids: Sequence[int]) -> bool:
        if len(ids) == 1:
            return token == ids[0]
        self._tail = [*self._tail[1 - _TAIL :], token]
        return mark in self._marks.decode(self._tail)

    def _settle(self) -> None:
        """Set the allowed tokens `words` and the flag `is_guided` according to the phase.

        The phase "thinking" becomes "forcing" first if the budget of thinking tokens is used up.
        """
        budget = self._budget
        if self._phase == "thinking" and budget is not None and self._num_tokens >= budget:
            self._phase = "forcing"
        inner, remaining = self._inner, (1 << 30 if budget is None else budget - self._num_tokens)
        if self._phase == "forcing":
            self.words, self.is_guided = self._forced[self._num_forced], True
        elif self._phase == "thinking":
            self.words, self.is_guided = self._free, inner is not None or remaining <= self._ahead
        elif self._phase == "before":
            # True if the tokens allowed after the next token depend on that token.
            self.is_guided = inner is not None or remaining <= self._ahead
            # u32[W], allowed tokens as in `Constraint`.
            self.words = self._anything if inner is None else inner.words | self._may_start
        else:
            self.is_guided = inner is not None
            self.words = self._anything if inner is None else inner.words


def _bits(vocab_size: int, tokens: Sequence[int] | None = None) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    if tokens is None:
        bits[:vocab_size] = True
    else:
        bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
