"""LaunchPlan: what one launch computes, for which slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """A sequence's share of a launch: tokens [start, start + num_tokens) of its slot."""

    slot: int
    start: int
    num_tokens: int
    samples: bool


@dataclass(eq=False)
class LaunchPlan:
    """The rows of one launch, as arrays of one entry a row.

    A launch of several steps has rows of one token that draw in every step, and compute in the next
    one what they drew.

    Attributes:
        slots: intp[R]; numpy takes indices of this type several times faster than others.
        starts: int32[R], tokens computed before this launch.
        num_tokens: int32[R], tokens of the first step, at least 1 each.
        samples: bool[R], whether the row reaches its last token and so draws the next one.
        generations: int64[R]; a slot whose generation has changed since belongs to another
            sequence now, and the row's result to nobody.
        num_steps: steps of the launch.
        total_tokens: tokens of the first step in all; counted here where that is not given.
        row_steps: int32[R], steps that a row takes part in, if nothing ends it before; None for one
            each.
    """

    slots: np.ndarray
    starts: np.ndarray
    num_tokens: np.ndarray
    samples: np.ndarray
    generations: np.ndarray
    num_steps: int = 1
    total_tokens: int = -1
    row_steps: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.total_tokens < 0:
            self.total_tokens = int(self.num_tokens.sum())

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def lengths(self) -> np.ndarray:
        """int32[R]: known tokens of each row once its first step has run."""
        return self.starts + self.num_tokens

    @property
    def ends(self) -> np.ndarray:
        """int32[R]: tokens computed of each row once the launch has run, if nothing ends it."""
        return self.starts + (self.num_tokens if self.row_steps is None else self.row_steps)

    def rows(self) -> Iterator[Row]:
        """Yield the same rows one by one, for reading and for tests."""
        for row in zip(self.slots, self.starts, self.num_tokens, self.samples, strict=True):
            yield Row(int(row[0]), int(row[1]), int(row[2]), bool(row[3]))
