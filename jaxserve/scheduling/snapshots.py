"""Snapshots: states of prefixes at page borders, for models whose layers keep a state.

The pages of a prefix are of use only with the states after its last token. A snapshot is a copy of
a sequence's states at the border of a page. It belongs to the cached page before the border, and is
evicted with it.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.plan import StatePlan
from jaxserve.scheduling.slot_table import SlotTable

NONE = -1


class SnapshotPool:
    """The snapshots, each free, pending for a slot, or attached to a cached page.

    When a snapshot is needed and none is free, the attached one that was used least recently is
    evicted. A snapshot that a planned launch reads is pinned.

    Args:
        num_snapshots: number of snapshots.
        num_pages: number of pages of the pool.
    """

    def __init__(self, num_snapshots: int, num_pages: int) -> None:
        self.num_snapshots = num_snapshots
        self.num_saved = self.num_restored = self.num_evicted = self.num_lost_pages = 0
        self._of_page = np.full(num_pages, NONE, np.int32)
        self._page_of = [NONE] * num_snapshots
        self._pins = [0] * num_snapshots
        self._free = list(range(num_snapshots - 1, -1, -1))
        # Attached snapshots without pins, in the order of eviction.
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Number of snapshots that a page has."""
        return int(np.count_nonzero(self._of_page >= 0))

    @property
    def has_free(self) -> bool:
        """Whether a snapshot can be written without an eviction."""
        return bool(self._free)

    def has_snapshot(self, pages: np.ndarray) -> np.ndarray:
        """Return bool[n]: whether each of the given pages has a snapshot."""
        return self._of_page[pages] >= 0

    def pin(self, page: int) -> int:
        """Return the snapshot of a page, which stays until `unpin`."""
        snapshot = int(self._of_page[page])
        self._pins[snapshot] += 1
        self._evictable.pop(snapshot, None)
        self.num_restored += 1
        return snapshot

    def unpin(self, snapshot: int) -> None:
        """Let a snapshot be evicted again, after the launch that reads it has been planned."""
        self._pins[snapshot] -= 1
        if not self._pins[snapshot]:
            if self._page_of[snapshot] == NONE:
                self._free.append(snapshot)
            else:
                self._evictable[snapshot] = None

    def acquire(self) -> int:
        """Return a snapshot to be written, or -1 if all are pending or pinned."""
        if not self._free:
            if not self._evictable:
                return NONE
            self.num_evicted += 1
            self._detach(next(iter(self._evictable)))
        self.num_saved += 1
        return self._free.pop()

    def release(self, snapshot: int) -> None:
        """Free a pending snapshot."""
        self._free.append(snapshot)

    def attach(self, snapshot: int, page: int) -> None:
        """Give a pending snapshot to a cached page, or free it if the page has one."""
        present = int(self._of_page[page])
        if present != NONE:
            if present in self._evictable:
                self._evictable.move_to_end(present)
            self.release(snapshot)
            return
        self._of_page[page], self._page_of[snapshot] = snapshot, page
        self._evictable[snapshot] = None

    def take_back(self, snapshot: int, page: int) -> bool:
        """Detach a snapshot from a page, for its slot to write it again, unless it is pinned."""
        if self._of_page[page] != snapshot or self._pins[snapshot]:
            return False
        self._detach(snapshot)
        self._free.pop()  # `_detach` has put it on top
        return True

    def demote(self, page: int) -> None:
        """Let the snapshot of a page, if it has one without pins, be evicted first."""
        snapshot = int(self._of_page[page])
        if snapshot in self._evictable:
            self._evictable.move_to_end(snapshot, last=False)

    def drop(self, pages: np.ndarray) -> None:
        """Free the snapshots of pages that are evicted."""
        snapshots = self._of_page[pages]
        for snapshot in snapshots[snapshots >= 0].tolist():
            self._detach(snapshot)

    def clear(self) -> None:
        """Free the snapshots of all pages."""
        self.drop(np.flatnonzero(self._of_page >= 0))

    def _detach(self, snapshot: int) -> None:
        self._of_page[self._page_of[snapshot]] = NONE
        self._page_of[snapshot] = NONE
        self._evictable.pop(snapshot, None)
        if not self._pins[snapshot]:
            self._free.append(snapshot)

    def check(self, pending: list[int], pinned: list[int], is_cached: np.ndarray) -> None:
        """Check all invariants.

        Args:
            pending: snapshots that slots hold for pages that are not cached yet.
            pinned: snapshots that admitted rows will read, once for each row.
            is_cached: bool[P], whether each page is cached.

        Raises:
            AssertionError: an invariant is broken. The message names it.
        """
        attached = [row for row, page in enumerate(self._page_of) if page != NONE]
        detached = [row for row in set(pinned) if self._page_of[row] == NONE]
        rows = sorted([*self._free, *pending, *attached, *detached])
        assert rows == list(range(self.num_snapshots)), "snapshots were lost or are held twice"
        counts = np.bincount(np.array(pinned, np.intp), minlength=self.num_snapshots)
        assert self._pins == counts.tolist(), "pins differ from the rows that will read"
        unpinned = [row for row in attached if not self._pins[row]]
        assert sorted(self._evictable) == unpinned, "evictable snapshots are miscounted"
        for row in attached:
            assert self._of_page[self._page_of[row]] == row, "page and snapshot disagree"
        assert is_cached[np.flatnonzero(self._of_page >= 0)].all(), (
            "a page has a snapshot and is not cached"
        )


class StateSaver:
    """Chooses the borders at which the states of running sequences are saved.

    They are the page at which a prompt left the cached prefix of other prompts, the last full page
    of a prompt, and the last full page of an answer so far. A launch saves at most one border of a
    row. In a prompt without a cached page, a launch that reaches a multiple of 1,024 tokens saves
    the last one: the beginning of a long prompt is often a document or instructions that other
    prompts share, and the question after it is short. Prefixes of fewer than 256
    tokens evict no snapshot. The snapshot of a prompt's end is evicted first once the longer one of
    its answer exists, which the next turn of a chat uses.

    `python -m scripts.bench.prefix --part hits --part chats` measures these borders on Mooncake's
    trace, with 600,000 pages and one request at a time. With a snapshot for each 9,000 cached
    tokens, 11.9 % of the tokens are reused. A snapshot at every 1,024 tokens gives 2.5 %, and at
    every page 0.1 %. With a snapshot for each 1,024 cached tokens, these borders give 16.6 % and
    every 1,024 tokens 17.1 %: long prompts reach several multiples in a launch, which saves one.
    Chats reuse as many tokens as without states.

    Args:
        pool: the page pool, whose evictions drop snapshots.
        slots: the slot table.
        num_snapshots: number of snapshots.

    Attributes:
        interval: number of tokens between the borders within a prompt without cached pages.
        least: number of tokens below which a prefix evicts no snapshot.
    """

    interval = 1024
    least = 256

    def __init__(self, pool: PagePool, slots: SlotTable, num_snapshots: int) -> None:
        self.snapshots = SnapshotPool(num_snapshots, pool.num_pages)
        self._pool, self._slots = pool, slots
        pool.snapshots = self.snapshots
        rows = slots.num_slots + 1
        self._restored = np.full(rows, NONE, np.int32)
        self._is_cold = np.zeros(rows, bool)  # whether the prompt has no cached page
        self._branch = np.zeros(rows, np.int32)  # border at which the prompt left a cached prefix
        # Pending snapshots by slot: pairs of border and snapshot, in order.
        self._pending: dict[int, list[tuple[int, int]]] = {}
        # The newest snapshot of each slot's answer: border, snapshot, and its page, if attached.
        self._answers: dict[int, tuple[int, int, int]] = {}

    def begin(self, slot: int, hits: np.ndarray, num_matched: int) -> None:
        """Record the cached prefix of a slot, and pin its snapshot.

        Args:
            hits: pages of the prefix that the slot uses, with a snapshot at the end.
            num_matched: number of cached pages of its prompt, with and without snapshots.
        """
        self._is_cold[slot] = not num_matched
        if len(hits):
            self._restored[slot] = self.snapshots.pin(int(hits[-1]))
        if num_matched > len(hits):
            self.snapshots.num_lost_pages += num_matched - len(hits)
            self._branch[slot] = num_matched * self._pool.page_size

    def plan(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> StatePlan:
        """Return the places of states in a launch whose rows compute tokens [start, end).

        The snapshots that the launch reads are unpinned: later launches may write them.
        """
        size, first = self._pool.page_size, self._slots.num_slots + 1
        restored = self._restored[slots].copy()
        border = np.zeros(len(slots), np.int32)
        saved = np.zeros(len(slots), np.int32)
        for row in (ends // size > starts // size).nonzero()[0].tolist():
            slot = int(slots[row])
            chosen = self._border(slot, int(starts[row]), int(ends[row]))
            snapshot = self._to_write(slot, chosen) if chosen else NONE
            if snapshot != NONE:
                border[row], saved[row] = chosen, first + snapshot
        for row in (restored >= 0).nonzero()[0].tolist():
            self.snapshots.unpin(int(restored[row]))
            restored[row] += first
        self._restored[slots] = NONE
        return StatePlan(restored, border, saved)

    def _border(self, slot: int, start: int, end: int) -> int:
        """Return the border within the tokens of a launch at which to save a state, or 0."""
        size = self._pool.page_size
        prompt = int(self._slots.num_prompt[slot]) // size * size
        branch = int(self._branch[slot])
        if start < branch <= end:
            return branch
        grid = min(end, prompt) // self.interval * self.interval // size * size
        if self._is_cold[slot] and grid > start:
            return grid
        if start < prompt <= end:
            return prompt
        last = end // size * size
        return last if last > prompt else 0

    def _to_write(self, slot: int, border: int) -> int:
        """Return the snapshot for a border of a slot, or -1. It is pending from now on."""
        is_answer = border > int(self._slots.num_prompt[slot])
        snapshot = self._previous(slot) if is_answer else NONE
        if snapshot == NONE and (border >= self.least or self.snapshots.has_free):
            snapshot = self.snapshots.acquire()
        if snapshot == NONE:
            return NONE
        self._pending.setdefault(slot, []).append((border, snapshot))
        if is_answer:
            self._answers[slot] = border, snapshot, NONE
        return snapshot

    def _previous(self, slot: int) -> int:
        """Return the snapshot of the slot's answer so far, no longer pending or attached, or -1."""
        border, snapshot, page = self._answers.pop(slot, (0, NONE, NONE))
        if snapshot == NONE:
            return NONE
        if page != NONE:
            return snapshot if self.snapshots.take_back(snapshot, page) else NONE
        pending = self._pending.get(slot, [])
        if (border, snapshot) not in pending:
            return NONE
        pending.remove((border, snapshot))
        return snapshot

    def settle(self, slots: list[int]) -> None:
        """Attach pending snapshots to the pages that have been published."""
        table, size = self._slots, self._pool.page_size
        for slot in slots:
            pending = self._pending.get(slot)
            while pending and pending[0][0] <= table.num_published[slot] * size:
                border, snapshot = pending.pop(0)
                key = table.page_keys[slot, border // size - 1]
                page = int(self._pool.index.find(key[None])[0])
                if not page:
                    self.snapshots.release(snapshot)
                    continue
                self.snapshots.attach(snapshot, page)
                if self._answers.get(slot, (0, NONE, NONE))[:2] == (border, snapshot):
                    self._answers[slot] = border, snapshot, page

    @property
    def pending_slots(self) -> list[int]:
        """The slots with snapshots of pages that are not published yet."""
        return [slot for slot, pending in self._pending.items() if pending]

    def end(self, slots: list[int]) -> None:
        """Forget slots that are being released, after their last pages were published."""
        self.settle(slots)
        for slot in slots:
            if self._answers.get(slot, (0, NONE, NONE))[2] != NONE:
                self._demote_prompt(slot)
            for _, snapshot in self._pending.pop(slot, ()):
                self.snapshots.release(snapshot)
            self._answers.pop(slot, None)
            if self._restored[slot] != NONE:
                self.snapshots.unpin(int(self._restored[slot]))
                self._restored[slot] = NONE
            self._branch[slot] = 0

    def _demote_prompt(self, slot: int) -> None:
        last = int(self._slots.num_prompt[slot]) // self._pool.page_size - 1
        if last >= 0:
            key = self._slots.page_keys[slot, last]
            self.snapshots.demote(int(self._pool.index.find(key[None])[0]))

    def check(self) -> None:
        """Check all invariants (see `SnapshotPool.check`)."""
        pending = [snapshot for pairs in self._pending.values() for _, snapshot in pairs]
        pinned = self._restored[self._restored >= 0].tolist()
        self.snapshots.check(pending, pinned, self._pool.is_cached)
