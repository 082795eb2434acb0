"""EvictionQueue: blocks in the order in which they are evicted."""

from __future__ import annotations

import numpy as np

_NOWHERE = -1
_NO_BLOCKS = np.zeros(0, np.intp)


class EvictionQueue:
    """A queue of blocks, from which any block can be removed.

    The cost of each operation is proportional to the number of its blocks.

    Args:
        num_pages: number of pages of the pool, which exceeds every block.
    """

    def __init__(self, num_pages: int) -> None:
        # The blocks are in `_queue[_head:_tail]`. An entry is valid only if `_place_of[block]` is
        # its position. Changing that removes a block.
        self._queue = np.zeros(2 * num_pages, np.intp)
        self._place_of = np.full(num_pages, _NOWHERE, np.int64)
        self._head = self._tail = 0

    def blocks(self) -> np.ndarray:
        """Return all blocks, the first to be evicted first."""
        entries = self._queue[self._head : self._tail]
        return entries[self._place_of[entries] == np.arange(self._head, self._tail)]

    def holds(self, blocks: np.ndarray) -> np.ndarray:
        """Return bool[n]: whether each of the given blocks is in the queue."""
        return self._place_of[blocks] != _NOWHERE

    def push(self, blocks: np.ndarray) -> None:
        """Add blocks at the end. None of them may be in the queue."""
        if self._tail + len(blocks) > len(self._queue):
            valid_blocks = self.blocks()
            self._queue[: len(valid_blocks)] = valid_blocks
            self._place_of[valid_blocks] = np.arange(len(valid_blocks))
            self._head, self._tail = 0, len(valid_blocks)
        end = self._tail + len(blocks)
        self._queue[self._tail : end] = blocks
        self._place_of[blocks] = np.arange(self._tail, end)
        self._tail = end

    def remove(self, blocks: np.ndarray) -> None:
        """Remove blocks. Those that are not in the queue are ignored."""
        self._place_of[blocks] = _NOWHERE

    def move_to_end(self, blocks: np.ndarray) -> None:
        """Move blocks to the end, in the given order. Those that are not in the queue are ignored.

        A block may occur several times. Its last place counts.
        """
        blocks = blocks[self.holds(blocks)]
        numbers = np.arange(len(blocks))
        # NumPy stores the last of several values for one index.
        self._place_of[blocks] = numbers
        blocks = blocks[self._place_of[blocks] == numbers]
        self.remove(blocks)
        self.push(blocks)

    def pop(self, count: int) -> np.ndarray:
        """Remove the first blocks and return them, intp[count], or all if they are fewer."""
        parts: list[np.ndarray] = []
        while count and self._head < self._tail:
            end = min(self._head + count, self._tail)
            entries = self._queue[self._head : end]
            valid = entries[self._place_of[entries] == np.arange(self._head, end)]
            self._head = end
            parts.append(valid)
            count -= len(valid)
        blocks = parts[0].copy() if len(parts) == 1 else np.concatenate([*parts, _NO_BLOCKS])
        self._place_of[blocks] = _NOWHERE
        return blocks

    def clear(self) -> None:
        """Remove all blocks."""
        self._place_of[self.blocks()] = _NOWHERE
        self._head = self._tail = 0
