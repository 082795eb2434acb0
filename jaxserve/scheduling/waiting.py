"""WaitingQueue: the order in which waiting sequences are admitted."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Literal

from jaxserve.scheduling.sequence import Sequence

Rank = tuple[int, int]
# Between two levels of precedence: more than any two priorities differ by.
_LEVEL = 1 << 33
# Rank and sequence in one flat tuple, which compares in half the time of a nested one.
_Entry = tuple[int, int, Sequence]


class WaitingQueue:
    """Waiting sequences, best rank first: arrival order, or priority and then arrival order.

    A preempted sequence keeps its arrival, so it returns ahead of all that came later; those of
    higher precedence come before all others.
    Removal is lazy: a sequence that ended while waiting is dropped when it comes to the top,
    or when such entries outnumber the live ones.
    """

    def __init__(self, policy: Literal["fcfs", "priority"]) -> None:
        self.by_priority = policy == "priority"
        # What comes in the order of its rank, as nearly all do, waits in a line; what must go in
        # front of others in a heap, each pop of which costs some twenty comparisons.
        self._line: deque[_Entry] = deque()
        self._heap: list[_Entry] = []
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._heap) - self._num_dead

    def rank(self, sequence: Sequence) -> Rank:
        """Return a sequence's sort key: smaller is served first. Unique, since arrivals are."""
        priority = sequence.request.priority if self.by_priority else 0
        return (priority - sequence.precedence * _LEVEL, sequence.arrival)

    def push(self, sequence: Sequence) -> None:
        entry = (*self.rank(sequence), sequence)
        if not self._line or entry > self._line[-1]:
            self._line.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def _jumps_line(self) -> bool:
        """Return whether the best entry is the heap's; only while there is any."""
        return bool(self._heap) and (not self._line or self._heap[0] < self._line[0])

    def peek(self) -> Sequence | None:
        """Return the next sequence to admit, or None."""
        while self._line or self._heap:
            sequence = (self._heap if self._jumps_line() else self._line)[0][-1]
            if sequence.finish_reason is None:
                return sequence
            self.pop()
            self._num_dead -= 1
        return None

    def pop(self) -> Sequence:
        """Remove the sequence that `peek` returned."""
        entry = heapq.heappop(self._heap) if self._jumps_line() else self._line.popleft()
        return entry[-1]

    def discard(self, sequence: Sequence) -> None:
        """Drop a waiting sequence that was given a finish_reason; it will not come up again."""
        assert sequence.finish_reason is not None
        self._num_dead += 1
        if self._num_dead > 64 and self._num_dead > len(self):
            self._line = deque(entry for entry in self._line if entry[-1].finish_reason is None)
            self._heap = [entry for entry in self._heap if entry[-1].finish_reason is None]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def rank_anew(self, precedence: Callable[[Sequence], int]) -> None:
        """Give every waiting sequence another precedence."""
        waiting = list(self)
        for sequence in waiting:
            sequence.precedence = precedence(sequence)
        self._line = deque(sorted((*self.rank(sequence), sequence) for sequence in waiting))
        self._heap, self._num_dead = [], 0

    def __iter__(self):
        return (s for *_, s in (*self._line, *self._heap) if s.finish_reason is None)
