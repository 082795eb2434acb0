"""WindowPages: the pages of layers with an attention window, freed while a sequence runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.scheduling.page_kinds import RESERVE_DIVISOR, chunk_pages
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.publishing import DECODE_STEPS
from jaxserve.scheduling.slot_table import SlotTable, flat_ranges

# Blocks of its next tokens that are reserved for a row in layers without a window, if others have
# one.
NEXT_BLOCKS = 8


class WindowPages:
    """Frees blocks outside attention windows, and reserves pages for the chunks that need them.

    Args:
        pool: the page pool.
        slots: the slot table.
        max_tokens: the most tokens of a step.

    Attributes:
        kinds: numbers of the kinds of pages that have a window.
    """

    def __init__(self, pool: PagePool, slots: SlotTable, max_tokens: int) -> None:
        self._pool, self._slots, self._max_tokens = pool, slots, max_tokens
        self.kinds = tuple(
            number for number, kind in enumerate(slots.kinds) if kind.window is not None
        )
        self.reserve_divisor, self._steps = RESERVE_DIVISOR, 0
        # For each slot the blocks of its prompt of which the first kind was in the prefix cache.
        self._branch = np.zeros(slots.num_slots + 1, np.int32)

    def begin(self, slot: int, num_matched: int) -> None:
        """Record how many blocks of a slot's prompt were in the cache, in the first kind."""
        self._branch[slot] = num_matched

    def leave_reserve(self, free: int, num_known: int, running: np.ndarray) -> bool:
        """Return whether `free` pages are at least `reserve(num_known, running)`.

        The upper bound, which is faster to compute, usually suffices.
        """
        if self.upper_bound(running) <= free:
            return True
        return self.reserve(num_known, running) <= free

    def upper_bound(self, running: np.ndarray) -> int:
        """Return a number of pages that is at least `reserve`, for any number of known tokens.

        In each kind a row lacks at most the blocks of its tokens to compute, `NEXT_BLOCKS` further
        ones, and two that are partly filled.
        """
        table = self._slots
        blocks = (NEXT_BLOCKS + 2) * len(running) + self._to_compute(running) // table.page_size
        return blocks * table.num_parts + self._pool.num_usable // self.reserve_divisor

    def reserve(self, num_known: int, running: np.ndarray) -> int:
        """Return the free pages that running rows will need.

        These are the pages that prompts lack, the pages of each row's next tokens, and blocks
        outside the windows until two steps are read (see `chunk_pages`).

        Args:
            num_known: number of tokens of a waiting sequence.
            running: the slots of running rows.
        """
        table, size = self._slots, self._pool.page_size
        lengths, counts, pages = table.length[running], table.num_pages[running], 0
        for number, kind in enumerate(table.kinds):
            more = size * (NEXT_BLOCKS if kind.window is None else 1)
            ends = np.minimum(lengths + more, table.stop_length[running])
            held = counts - table.first_pages[number, running]
            lacking = np.maximum(kind.most_blocks(ends, size, size) - held, 0)
            pages += int(lacking.sum()) * kind.num_pages
        tokens = min(num_known + self._to_compute(running), 2 * self._max_tokens)
        longest = max(num_known, int(lengths.max(initial=0)))
        most = self._pool.num_usable // self.reserve_divisor
        return pages + chunk_pages(table.kinds, longest, tokens, size, most)

    def _to_compute(self, running: np.ndarray) -> int:
        return int(self._slots.length[running].sum() - self._slots.num_computed[running].sum())

    def is_due(self, plan: LaunchPlan) -> bool:
        """Count a launch that has been read, and return whether blocks should be given back now.

        That is so after a chunk of a prompt, and else after every eight decode steps: a decode
        leaves one block in about 16 steps, and a call costs more than a block.
        """
        self._steps += plan.num_steps
        if self._steps < DECODE_STEPS and plan.total_tokens == len(plan):
            return False
        self._steps = 0
        return True

    def has_outside(self, slots: np.ndarray, kind: int) -> np.ndarray:
        """Return bool[n]: whether slots hold blocks of a kind that are outside the window."""
        return self._num_outside(slots, kind) > self._slots.first_pages[kind, slots]

    def _num_outside(self, slots: np.ndarray, kind: int) -> Any:
        # A launch in flight attends only to later blocks.
        table = self._slots
        return table.kinds[kind].num_outside(table.num_committed[slots], self._pool.page_size)

    def give_back(self, slots: np.ndarray) -> None:
        """Release the blocks that are outside the windows of slots."""
        for kind in self.kinds:
            outside = self._num_outside(slots, kind)
            rows = (outside > self._slots.first_pages[kind, slots]).nonzero()[0]
            if not len(rows):
                continue
            blocks, owner, nth = self._slots.drop_pages(slots[rows], outside[rows], kind)
            has_others = len(self._slots.kinds) > 1
            if has_others and np.count_nonzero(is_end := self._ends_prefix(owner, nth, kind)):
                self._pool.give_up(blocks[is_end], is_spare=False)
                blocks = blocks[~is_end]
            self._pool.give_up(blocks, is_spare=has_others)

    def _ends_prefix(self, slots: np.ndarray, nth: np.ndarray, kind: int) -> np.ndarray:
        """Return bool[n]: whether blocks are at most two windows before a branch point.

        The branch points of a sequence are the end of its prompt, and the end of the prefix that
        was in the cache at its admission.

        Args:
            slots: for each block its slot.
            nth: for each block its index.
            kind: the kind of the blocks, which has a window.
        """
        most, prompts = self._most_before_end(kind), self._slots.num_prompt[slots]
        to_end, to_branch = prompts // self._pool.page_size - nth, self._branch[slots] - nth
        return ((to_end > 0) & (to_end <= most)) | ((to_branch > 0) & (to_branch <= most))

    def _most_before_end(self, kind: int) -> int:
        window = self._slots.kinds[kind].window
        assert window is not None
        return -(-2 * window // self._pool.page_size)

    def requeue(self, slots: list[int]) -> None:
        """Move the blocks before the branch points of slots to the end of the eviction order.

        They were given back while the sequences ran, so they would be evicted before the other
        blocks of the prefix. Call the method before the slots are released.
        """
        table, ended = self._slots, np.array(slots)
        ends = np.array([self._branch[ended], table.num_prompt[ended] // self._pool.page_size])
        for kind in self.kinds:
            # Later blocks are still held.
            last = np.minimum(ends, table.first_pages[kind, ended])
            first = np.maximum(ends - self._most_before_end(kind), 0)
            if not np.count_nonzero(last > first):
                continue
            owner, nth = flat_ranges(
                np.tile(ended, 2), first.ravel(), np.maximum(last, first).ravel()
            )
            self._pool.touch(self._pool.find(table.page_keys[owner, nth], kind)[::-1])
