"""StepPlan: what one step computes, for which slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """A sequence's share of one step: tokens [start, start + num_tokens) of its slot."""

    slot: int
    start: int
    num_tokens: int
    samples: bool


@dataclass(eq=False)
class StepPlan:
    """The rows of one step, as arrays of one entry a row.

    A launch of several steps has rows of one token that draw in every step and compute next what
    they drew; `num_tokens` is then how many steps a row takes part in, if it does not stop before.

    Attributes:
        slots: intp[R]; numpy takes indices of this type several times faster than others.
        starts: int32[R], tokens computed before this step.
        num_tokens: int32[R], at least 1 each.
        samples: bool[R], whether the row reaches its last token and so draws the next one.
        generations: int64[R]; a slot whose generation has changed since belongs to another
            sequence now, and the row's result to nobody.
        num_steps: decode steps of the launch.
        total_tokens: tokens of one step; counted here where that is not given.
    """

    slots: np.ndarray
    starts: np.ndarray
    num_tokens: np.ndarray
    samples: np.ndarray
    generations: np.ndarray
    num_steps: int = 1
    total_tokens: int = -1

    def __post_init__(self) -> None:
        if self.total_tokens < 0:
            several = self.num_steps > 1
            self.total_tokens = len(self.slots) if several else int(self.num_tokens.sum())

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def lengths(self) -> np.ndarray:
        """int32[R]: known tokens of each row once its first step has run."""
        return self.starts + (1 if self.num_steps > 1 else self.num_tokens)

    def rows(self) -> Iterator[Row]:
        """The same rows one by one, for reading and for tests."""
        for row in zip(self.slots, self.starts, self.num_tokens, self.samples, strict=True):
            yield Row(int(row[0]), int(row[1]), int(row[2]), bool(row[3]))
