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


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, as arrays of one entry a row.

    Attributes:
        slots: int32[R].
        starts: int32[R], tokens computed before this step.
        num_tokens: int32[R], at least 1 each.
        samples: bool[R], whether the row reaches its last token and so draws the next one.
        generations: int64[R]; a slot whose generation has changed since belongs to another
            sequence now, and the row's result to nobody.
    """

    slots: np.ndarray
    starts: np.ndarray
    num_tokens: np.ndarray
    samples: np.ndarray
    generations: np.ndarray

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())

    def rows(self) -> Iterator[Row]:
        """The same rows one by one, for reading and for tests."""
        for row in zip(self.slots, self.starts, self.num_tokens, self.samples, strict=True):
            yield Row(int(row[0]), int(row[1]), int(row[2]), bool(row[3]))
