"""WaitingQueue: the order in which waiting sequences are admitted."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Literal

from jaxserve.scheduling.sequence import Sequence

Rank = tuple[int, int]
# Distance between two levels of precedence, greater than any difference of priorities.
_LEVEL = 1 << 33
# A flat tuple of rank and sequence, which compares in half the time of a nested tuple.
_Entry = tuple[int, int, Sequence]


class WaitingQueue:
    """The queue of waiting sequences, ordered by precedence, priority (optional) and arrival.

    A preempted sequence keeps its arrival and returns ahead of later arrivals. A sequence that
    ended while waiting is dropped when it reaches the front, or when ended sequences outnumber the
    others.

    Args:
        policy: "priority" to order by priority, "fcfs" to ignore it.
    """

    def __init__(self, policy: Literal["fcfs", "priority"]) -> None:
        self.by_priority = policy == "priority"
        # Sequences that arrive in the order of their ranks, nearly all, are in a deque. Others are
        # in a heap, where a pop takes about twenty comparisons.
        self._line: deque[_Entry] = deque()
        self._heap: list[_Entry] = []
        self._num_dead = 0
        self._aside: list[Sequence] = []
        # Sequences that are not served until `release`. The length does not count them.
        self.held: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._line) + len(self._heap) - self._num_dead

    def rank(self, sequence: Sequence) -> Rank:
        """Return the unique sort key of a sequence in the queue. Smaller keys are served first."""
        priority = sequence.request.priority if self.by_priority else 0
        return (priority - sequence.precedence * _LEVEL, sequence.arrival)

    def push(self, sequence: Sequence) -> None:
        entry = (*self.rank(sequence), sequence)
        if not self._line or entry > self._line[-1]:
            self._line.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def _jumps_line(self) -> bool:
        return bool(self._heap) and (not self._line or self._heap[0] < self._line[0])

    def peek(self) -> Sequence | None:
        """Return the next sequence to admit without removing it, or None if no sequence waits."""
        while self._line or self._heap:
            sequence = (self._heap if self._jumps_line() else self._line)[0][-1]
            if sequence.finish_reason is None:
                return sequence
            self.pop()
            self._num_dead -= 1
        return None

    def pop(self) -> Sequence:
        """Remove the sequence that `peek` has just returned, and return it."""
        entry = heapq.heappop(self._heap) if self._jumps_line() else self._line.popleft()
        return entry[-1]

    def set_aside(self) -> None:
        """Remove the sequence that `peek` has just returned, until `restore` puts it back."""
        self._aside.append(self.pop())

    def restore(self) -> None:
        """Put the sequences that were set aside back into their places."""
        for sequence in self._aside:
            self.push(sequence)
        self._aside.clear()

    def discard(self, sequence: Sequence) -> None:
        """Remove a waiting sequence that has ended. Its finish_reason must be set."""
        assert sequence.finish_reason is not None
        if sequence in self.held:
            self.held.remove(sequence)
            return
        self._num_dead += 1
        if self._num_dead > 64 and self._num_dead > len(self):
            self._line = deque(entry for entry in self._line if entry[-1].finish_reason is None)
            self._heap = [entry for entry in self._heap if entry[-1].finish_reason is None]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def hold(self, is_held: Callable[[Sequence], bool]) -> None:
        """Serve the waiting sequences for which `is_held` is True only after `release`."""
        waiting = [entry for entry in (*self._line, *self._heap) if not entry[-1].finish_reason]
        self.held.update(entry[-1] for entry in waiting if is_held(entry[-1]))
        self._line = deque(sorted(entry for entry in waiting if entry[-1] not in self.held))
        self._heap, self._num_dead = [], 0

    def release(self) -> None:
        """Serve all sequences again that `hold` has held."""
        held, self.held = self.held, set()
        for sequence in held:
            self.push(sequence)

    def rank_anew(self, precedence: Callable[[Sequence], int]) -> None:
        """Give each waiting sequence a new precedence, and sort the queue by it.

        Args:
            precedence: function from a sequence to its precedence.
        """
        waiting = list(self)
        for sequence in waiting:
            sequence.precedence = precedence(sequence)
        self._line = deque(sorted((*self.rank(sequence), sequence) for sequence in waiting))
        self._heap, self._num_dead = [], 0

    def __iter__(self):
        return (s for *_, s in (*self._line, *self._heap) if s.finish_reason is None)
