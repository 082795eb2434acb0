"""PagePool: reference counts, cached keys and eviction order of the pages of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.scheduling.eviction_queue import EvictionQueue
from jaxserve.scheduling.page_index import Change, ClearedPages, PageIndex, RemovedPages
from jaxserve.scheduling.page_kinds import ONE_KIND, PoolKind

NULL_PAGE = 0
NO_PAGES = np.zeros(0, np.int32)
# The keys of a kind's blocks are the keys of the tokens, modified by the number of the kind.
_SALT = 0x9E3779B97F4A7C15


class Snapshots(Protocol):
    """Snapshots of states that belong to cached pages and are dropped with them."""

    def drop(self, pages: np.ndarray) -> None: ...
    def clear(self) -> None: ...


class CachedPrefix(NamedTuple):
    """The cached blocks of a prefix.

    Attributes:
        blocks: for each kind of pages intp[n], the blocks in the order of their tokens, or 0 where
            a kind has no cached block. The first kind has all of them.
        is_end: bool[n], whether a sequence can start after each block, because every kind has all
            blocks within its window. None if it can start after each.
    """

    blocks: list[np.ndarray]
    is_end: np.ndarray | None = None

    def num_usable(self, has_snapshot: Callable[[np.ndarray], np.ndarray] | None) -> int:
        """Return the number of blocks of the longest part after which a sequence can start.

        Args:
            has_snapshot: returns whether blocks of the first kind have a snapshot, which a sequence
                needs then. None for a model without states.
        """
        is_end, first = self.is_end, self.blocks[0]
        if has_snapshot is not None:
            is_end = has_snapshot(first) if is_end is None else is_end & has_snapshot(first)
        if is_end is None:
            return len(first)
        ends = np.flatnonzero(is_end)
        return int(ends[-1]) + 1 if len(ends) else 0

    def first(self, count: int) -> list[np.ndarray]:
        """Return the first `count` blocks of each kind."""
        return [blocks[:count] for blocks in self.blocks]


class PagePool:
    """The allocator of the pages of the KV cache, with reference counts and a prefix cache.

    A page is free if no sequence holds it. `allocate` returns free pages without a cached key
    first, then cached free pages in the order of their release. Page 0 is the null page, the target
    of padding, and is never allocated. The cost of each operation is proportional to the number of
    its pages.

    All pages have equally many bytes. If the model has several kinds of pages (see `PoolKind`), a
    sequence holds blocks of several pages. A block is named by its first page, and belongs to one
    kind until it is free. Every method takes and returns blocks, which for one kind are pages.

    Args:
        num_pages: number of pages, the null page included.
        page_size: number of tokens of a block.
        kinds: the kinds of pages. One key stands for a block of each kind.

    Attributes:
        block_pages: int32[num_pages, most pages of a block], the pages of each block, its own
            number first. The others are undefined for pages that are not the first one of a block.
            Empty for one kind.

    Raises:
        ValueError: `num_pages` is below 2.
    """

    def __init__(
        self, num_pages: int, page_size: int, kinds: Sequence[PoolKind] = ONE_KIND
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (one is the null page): {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.kinds = tuple(kinds)
        counts = [kind.num_pages for kind in kinds]
        self._is_plain, self._most_of_block = counts == [1], max(counts)
        rows = 0 if self._is_plain else num_pages
        self._counts = np.array(counts)
        self._first_of_kind = np.cumsum([0, *counts[:-1]])
        self._kind_numbers, self._pages_of_all = np.arange(len(counts))[:, None], sum(counts)
        self._kind_of = np.zeros(rows, np.int8)
        self.block_pages = np.zeros((rows, self._most_of_block), np.int32)
        self.block_pages[:, 0] = np.arange(rows)
        # A counter that grows when pages become free or cached, so that a sequence that did not fit
        # before may fit.
        self.num_changes = 0
        self.num_evictions = 0
        # Called with each change of the set of cached pages, or None. `Publisher` calls it for new
        # pages.
        self.on_change: Callable[[Change], None] | None = None
        # The snapshots of cached pages, if the model's layers keep states.
        self.snapshots: Snapshots | None = None
        self.reset()

    def reset(self) -> None:
        """Free all pages and remove all keys from the prefix cache."""
        # int32[P], the number of sequences that hold each block.
        self.ref_count = np.zeros(self.num_pages, np.int32)
        # bool[P], whether the index finds the page by its key.
        self.is_cached = np.zeros(self.num_pages, bool)
        self.index = PageIndex(self.num_pages)  # the cached pages by their keys
        # A stack whose top is its end. Low page ids are allocated first.
        self._blank = np.arange(self.num_pages - 1, 0, -1)
        self._num_blank = self.num_pages - 1
        # Free cached blocks. Blocks outside a window are in `_spare`, and are evicted first.
        self._queue, self._spare = EvictionQueue(self.num_pages), EvictionQueue(self.num_pages)
        self._num_evictable = 0  # pages of these blocks
        self.num_changes += 1
        self._tell_cleared()

    @property
    def num_free(self) -> int:
        """Number of pages that no sequence holds, and that can be allocated."""
        return self._num_blank + self._num_evictable

    @property
    def num_usable(self) -> int:
        """Number of pages of the pool without the null page."""
        return self.num_pages - 1

    def allocate(self, count: int) -> np.ndarray:
        """Allocate `count` blocks of each kind with reference count 1.

        The caller has checked that their pages are at most `num_free`. If there are too few free
        pages without a key, cached free blocks are evicted from the prefix cache.

        Returns:
            intp[count], or intp[kinds, count] if there are several kinds or pages of a block.
        """
        if self._is_plain:
            pages = self._take(count)
            self.ref_count[pages] = 1
            return pages
        rows = self._take(count * self._pages_of_all).reshape(count, -1)
        blocks = rows.T
        if self._most_of_block > 1:
            blocks = blocks[self._first_of_kind]
            for number, kind in enumerate(self.kinds):
                first = self._first_of_kind[number]
                others = rows[:, first + 1 : first + kind.num_pages]
                self.block_pages[blocks[number], 1 : kind.num_pages] = others
        self._kind_of[blocks], self.ref_count[blocks] = self._kind_numbers, 1
        return blocks

    def _take(self, count: int) -> np.ndarray:
        assert count <= self.num_free, "allocate beyond num_free"
        if count > self._num_blank:
            self._evict(count - self._num_blank)
        self._num_blank -= count
        return self._blank[self._num_blank : self._num_blank + count][::-1].copy()

    def _evict(self, count: int) -> None:
        # One in 64 of the remaining evictable pages is evicted too, as a call costs more than a
        # page.
        count += (self._num_evictable - count) // 64
        blocks, size = self._next_evictable(count)
        self._num_evictable -= size
        if self.on_change is not None:
            first = blocks if self._is_plain else blocks[self._kind_of[blocks] == 0]
            self.on_change(RemovedPages(self.index.keys(first)))
        if self.snapshots is not None:
            self.snapshots.drop(blocks)
        self.index.remove(blocks)
        self.is_cached[blocks] = False
        self.num_evictions += size
        self._add_blank(blocks)

    def _add_blank(self, blocks: np.ndarray) -> None:
        pages = self.pages_of(blocks)
        self._blank[self._num_blank : self._num_blank + len(pages)] = pages[::-1]
        self._num_blank += len(pages)

    def pages_of(self, blocks: np.ndarray) -> np.ndarray:
        """Return the pages of blocks of any kinds, in their order."""
        if self._most_of_block == 1:
            return blocks
        is_page = np.arange(self._most_of_block) < self._counts[self._kind_of[blocks], None]
        return self.block_pages[blocks][is_page]

    def _size(self, blocks: np.ndarray) -> int:
        """Return the number of pages of blocks of any kinds."""
        if self._most_of_block == 1:
            return len(blocks)
        return int(self._counts[self._kind_of[blocks]].sum())

    def _next_evictable(self, count: int) -> tuple[np.ndarray, int]:
        """Remove blocks with `count` pages or more from the queues. Return them and their pages."""
        blocks, size = NO_PAGES, 0
        for queue in (self._spare, self._queue):
            while size < count and len(
                more := queue.pop(-(-(count - size) // self._most_of_block))
            ):
                blocks, size = np.concatenate([blocks, more]), size + self._size(more)
        return blocks, size

    def _make_evictable(self, blocks: np.ndarray, is_spare: bool = False) -> None:
        (self._spare if is_spare else self._queue).push(blocks)
        self._num_evictable += self._size(blocks)

    def _evictable(self) -> np.ndarray:
        # In the order of eviction.
        return np.concatenate([self._spare.blocks(), self._queue.blocks()])

    def match(self, keys: np.ndarray) -> np.ndarray:
        """Return the cached pages of the longest known prefix of page keys, intp[m] with m <= n.

        Reference counts do not change.

        Args:
            keys: u64[n, WORDS], the keys of a sequence's first pages, in order.
        """
        # Most prompts have no cached page, and a lookup of their first page shows that.
        if not len(keys) or not self.index.holds(keys[0]):
            return NO_PAGES
        pages = self.index.find(keys)
        missing = (pages == 0).nonzero()[0]
        return pages[: missing[0]] if len(missing) else pages

    def prefix(self, keys: np.ndarray) -> CachedPrefix:
        """Return the longest cached prefix of a sequence. Reference counts do not change.

        Args:
            keys: u64[n, WORDS], the keys of the sequence's first blocks, in order.
        """
        first = self.match(keys)
        if self._is_plain or not len(first):
            return CachedPrefix([first] * len(self.kinds))
        blocks, numbers = [first], np.arange(1, len(first) + 1)
        is_end = np.ones(len(first), bool)
        for kind in range(1, len(self.kinds)):
            cached = self.find(keys[: len(first)], kind)
            last_missing = np.maximum.accumulate(np.where(cached == 0, numbers, 0))
            tokens = numbers * self.page_size
            is_end &= last_missing <= self.kinds[kind].num_outside(tokens, self.page_size)
            blocks.append(cached)
        return CachedPrefix(blocks, is_end)

    def find(self, keys: np.ndarray, kind: int) -> np.ndarray:
        """Return intp[n]: the cached block of a kind for each key, or 0 where there is none."""
        return self.index.find(_keys_of(keys, kind))

    def num_evictable(self, blocks: np.ndarray) -> int:
        """Return the number of pages of the given cached blocks, without blocks in use."""
        if not len(blocks):
            return 0
        if self._most_of_block == 1:
            return int(np.count_nonzero(self.ref_count[blocks] == 0))
        return self._size(blocks[self.ref_count[blocks] == 0])

    def touch(self, blocks: np.ndarray) -> None:
        """Let cached blocks that no sequence holds be evicted last, in the given order.

        Args:
            blocks: blocks of any kinds. If a block occurs several times, its last place counts.
                Blocks in use, and spare blocks outside a window, are ignored.
        """
        self._queue.move_to_end(blocks)

    def used_by_kind(self) -> list[int]:
        """Return the number of pages of each kind that sequences hold."""
        held = np.flatnonzero(self.ref_count)
        if self._is_plain:
            return [len(held)]
        blocks = np.bincount(self._kind_of[held], minlength=len(self.kinds))
        return (blocks * self._counts).tolist()

    def by_page(self, values: np.ndarray) -> np.ndarray:
        """Return values of blocks, indexed by their first pages, as values of all their pages."""
        if self._is_plain:
            return values.copy()
        blocks = np.flatnonzero((self.ref_count > 0) | self.is_cached)
        spread = np.zeros_like(values)
        counts = self._counts[self._kind_of[blocks]]
        spread[self.pages_of(blocks)] = values[blocks].repeat(counts)
        return spread

    def cached(self, kind: int = 0) -> np.ndarray:
        """Return all cached blocks of a kind, ascending."""
        blocks = self.index.pages()
        return blocks if self._is_plain else blocks[self._kind_of[blocks] == kind]

    def share(self, pages: np.ndarray) -> None:
        """Increment the reference counts of cached pages, so that they are not evicted.

        Args:
            pages: the pages that `match` returned for a sequence.
        """
        if not len(pages):
            return
        self._num_evictable -= self.num_evictable(pages)
        self._queue.remove(pages)
        self._spare.remove(pages)
        self.ref_count[pages] += 1

    def release(self, *pages_of: np.ndarray) -> None:
        """Decrement the reference counts of the pages of sequences. Pages at zero become free.

        The last page of a sequence is evicted first, because a prefix is more useful than its tail.

        Args:
            pages_of: for each sequence its pages, in the order of its tokens.
        """
        # Reversed below. NumPy is much faster with indices of type intp.
        pages = np.concatenate(pages_of[::-1], dtype=np.intp)
        counts = self.ref_count[pages] - 1
        idle = pages
        if np.count_nonzero(counts):  # few pages are shared
            if len(pages_of) > 1:  # two sequences may share a page
                for pages_of_one in pages_of:
                    self.release(pages_of_one)
                return
            idle = pages[counts == 0]
        self.ref_count[pages] = counts
        self._add_idle(idle, is_spare=False)

    def _add_idle(self, idle: np.ndarray, is_spare: bool) -> None:
        if not len(idle):
            return
        self.num_changes += 1
        cached = self.is_cached[idle]
        if not np.count_nonzero(cached):
            self._add_blank(idle)
            return
        self._add_blank(idle[~cached])
        self._make_evictable(idle[cached][::-1], is_spare)

    def give_up(self, blocks: np.ndarray, is_spare: bool) -> None:
        """Decrement the reference counts of blocks of several sequences, which may share them.

        Args:
            blocks: the blocks, intp[n].
            is_spare: whether the blocks are evicted before others. This is for blocks outside a
                window, which are of use only for a prefix that ends there.
        """
        if np.count_nonzero(self.ref_count[blocks] - 1):
            np.subtract.at(self.ref_count, blocks, 1)
            idle = np.unique(blocks[self.ref_count[blocks] == 0])
        else:
            self.ref_count[blocks], idle = 0, blocks
        self._add_idle(idle, is_spare)

    def publish(self, pages: np.ndarray, keys: np.ndarray, kind: int = 0) -> np.ndarray:
        """Add full, computed blocks to the prefix cache, and return the added ones, intp[m].

        A block is not added if its key already has a block of this kind.

        Args:
            pages: i32[n], the blocks.
            keys: u64[n, WORDS], the keys of their tokens.
            kind: the kind of the blocks.
        """
        added = self.index.add(pages.astype(np.intp), _keys_of(keys, kind))
        self.is_cached[added] = True
        self.num_changes += 1
        return added

    def clear_cache(self) -> None:
        """Remove all keys from the prefix cache. Pages that sequences hold stay allocated."""
        pages = self._evictable()
        self._add_blank(pages)
        self._queue.clear()
        self._spare.clear()
        self._num_evictable = 0
        self.index.clear()
        self.is_cached[:] = False
        self.num_changes += 1
        self._tell_cleared()

    def _tell_cleared(self) -> None:
        if self.snapshots is not None:
            self.snapshots.clear()
        if self.on_change is not None:
            self.on_change(ClearedPages())

    def check(self, num_holders: np.ndarray) -> None:
        """Check the invariants of the pool's counts, queues and keys.

        Args:
            num_holders: int32[P], the number of sequences that list each page.

        Raises:
            AssertionError: an invariant is broken. The message names it.
        """
        blank = self._blank[: self._num_blank]
        evictable = self._evictable()
        assert self.ref_count[NULL_PAGE] == 0, "the null page is held"
        assert not self.is_cached[NULL_PAGE], "the null page is cached"
        assert self._num_evictable == self._size(evictable), "evictable pages are miscounted"
        assert np.array_equal(self.ref_count, num_holders), (
            "reference counts differ from the tables"
        )
        free = np.concatenate([blank, evictable])
        assert np.all(self.ref_count[free] == 0), "a free page is held"
        blocks = np.concatenate([evictable, np.flatnonzero(self.ref_count)])
        pages = np.concatenate([blank, self.pages_of(blocks)])
        assert len(np.unique(pages)) == len(pages), "a page is free or in a block twice"
        assert NULL_PAGE not in pages, "the null page is free"
        assert len(pages) == self.num_usable, "pages were lost"
        assert not self.is_cached[blank].any(), "a blank page caches something"
        assert self.is_cached[evictable].all(), "an evictable page caches nothing"
        cached = np.flatnonzero(self.is_cached)
        assert np.array_equal(self.index.pages(), cached), "keys and cached pages differ"


def _keys_of(keys: np.ndarray, kind: int) -> np.ndarray:
    return keys ^ np.uint64(kind * _SALT % 2**64) if kind else keys
