"""LaunchPlan: the slots of one launch and the tokens that it computes for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """The part of one sequence in a launch: its tokens [start, start + num_tokens)."""

    slot: int
    start: int
    num_tokens: int
    samples: bool


class StatePlan(NamedTuple):
    """The places of states in a launch, int32[R] each.

    Attributes:
        restored: place of the snapshot that a row starts from, or -1 for the row's own state.
        border: number of the row's tokens after which its state is saved, from the start of the
            sequence. 0 to save none.
        saved: place of the snapshot to be written.
    """

    restored: np.ndarray
    border: np.ndarray
    saved: np.ndarray


@dataclass(eq=False)
class LaunchPlan:
    """The rows of one launch, one per sequence, as arrays with one entry per row.

    In a launch of several steps each row has one token, samples in every step, and computes the
    sampled token in the next step.
    """

    slots: np.ndarray  # intp[R]. NumPy is several times faster with indices of this type.
    starts: np.ndarray  # int32[R], the number of tokens computed before this launch
    num_tokens: np.ndarray  # int32[R], the tokens of the first step, at least 1 per row
    # bool[R], whether the row reaches its last known token and samples the next one.
    samples: np.ndarray
    # int64[R], the generations of the slots. If a slot's generation has changed, the slot has
    # another sequence and the row's result is dropped.
    generations: np.ndarray
    num_steps: int = 1
    total_tokens: int = -1  # the sum of `num_tokens`, computed here if it is -1
    # int32[R], the most steps of each row, or None for one per row.
    row_steps: np.ndarray | None = None
    # The places of states, or None for a model without states and snapshots.
    states: StatePlan | None = None

    def __post_init__(self) -> None:
        if self.total_tokens < 0:
            self.total_tokens = int(self.num_tokens.sum())

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def lengths(self) -> np.ndarray:
        """int32[R]: for each row the tokens of its sequence up to the end of its first step."""
        return self.starts + self.num_tokens

    @property
    def ends(self) -> np.ndarray:
        """int32[R]: the computed tokens of each row's sequence after all steps of the launch.

        The true number is lower for a sequence that ends within the launch.
        """
        return self.starts + (self.num_tokens if self.row_steps is None else self.row_steps)

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the plan one by one, as Row tuples of Python numbers."""
        for row in zip(self.slots, self.starts, self.num_tokens, self.samples, strict=True):
            yield Row(int(row[0]), int(row[1]), int(row[2]), bool(row[3]))
