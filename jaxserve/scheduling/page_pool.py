"""PagePool: reference counts, cached keys and eviction order of the pages of the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from jaxserve.scheduling.page_index import Change, ClearedPages, PageIndex, RemovedPages

NULL_PAGE = 0
NO_PAGES = np.zeros(0, np.int32)
_NOWHERE = -1


class Snapshots(Protocol):
    """Snapshots of states that belong to cached pages and are dropped with them."""

    def drop(self, pages: np.ndarray) -> None: ...
    def clear(self) -> None: ...


class PagePool:
    """The allocator of the pages of the KV cache, with reference counts and a prefix cache.

    A page is free if no sequence holds it. `allocate` returns free pages without a cached key
    first, then cached free pages in the order of their release. Page 0 is the null page, the target
    of padding, and is never allocated. The cost of each operation is proportional to the number of
    its pages.

    Raises:
        ValueError: `num_pages` is below 2.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (one is the null page): {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
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
        # int32[P], the number of sequences that hold each page.
        self.ref_count = np.zeros(self.num_pages, np.int32)
        # bool[P], whether the index finds the page by its key.
        self.is_cached = np.zeros(self.num_pages, bool)
        self.index = PageIndex(self.num_pages)  # the cached pages by their keys
        # A stack whose top is its end. Low page ids are allocated first.
        self._blank = np.arange(self.num_pages - 1, 0, -1)
        self._num_blank = self.num_pages - 1
        # Free cached pages are in `_queue[_head:_tail]`, in the order of eviction. An entry is
        # valid only if `_place_of[page]` is its position. Changing that removes a page.
        self._queue = np.zeros(2 * self.num_pages, np.intp)
        self._place_of = np.full(self.num_pages, _NOWHERE, np.int64)
        self._head = self._tail = self._num_evictable = 0
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
        """Allocate pages with reference count 1 and return them, intp[count].

        The caller has checked that `count` is at most `num_free`. If there are too few free pages
        without a key, cached free pages are evicted from the prefix cache.
        """
        assert count <= self.num_free, "allocate beyond num_free"
        if count > self._num_blank:
            self._evict(count - self._num_blank)
        self._num_blank -= count
        pages = self._blank[self._num_blank : self._num_blank + count][::-1].copy()
        self.ref_count[pages] = 1
        return pages

    def _evict(self, count: int) -> None:
        # One in 64 of the remaining evictable pages is evicted too, as a call costs more than a
        # page.
        count += (self._num_evictable - count) // 64
        pages = self._next_evictable(count)
        self._place_of[pages] = _NOWHERE
        self._num_evictable -= count
        if self.on_change is not None:
            self.on_change(RemovedPages(self.index.keys(pages)))
        if self.snapshots is not None:
            self.snapshots.drop(pages)
        self.index.remove(pages)
        self.is_cached[pages] = False
        self.num_evictions += count
        self._add_blank(pages)

    def _add_blank(self, pages: np.ndarray) -> None:
        self._blank[self._num_blank : self._num_blank + len(pages)] = pages[::-1]
        self._num_blank += len(pages)

    def _next_evictable(self, count: int) -> np.ndarray:
        parts: list[np.ndarray] = []
        while count:
            end = min(self._head + count, self._tail)
            entries = self._queue[self._head : end]
            valid = entries[self._place_of[entries] == np.arange(self._head, end)]
            self._head = end
            parts.append(valid)
            count -= len(valid)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _make_evictable(self, pages: np.ndarray) -> None:
        if self._tail + len(pages) > len(self._queue):
            entries = self._queue[self._head : self._tail]
            valid_pages = entries[self._place_of[entries] == np.arange(self._head, self._tail)]
            self._queue[: len(valid_pages)] = valid_pages
            self._place_of[valid_pages] = np.arange(len(valid_pages))
            self._head, self._tail = 0, len(valid_pages)
        end = self._tail + len(pages)
        self._queue[self._tail : end] = pages
        self._place_of[pages] = np.arange(self._tail, end)
        self._tail = end
        self._num_evictable += len(pages)

    def _evictable(self) -> np.ndarray:
        # In the order of eviction.
        entries = self._queue[self._head : self._tail]
        return entries[self._place_of[entries] == np.arange(self._head, self._tail)]

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

    def num_evictable(self, pages: np.ndarray) -> int:
        """Return how many of the given cached pages no sequence holds."""
        return int(np.count_nonzero(self.ref_count[pages] == 0)) if len(pages) else 0

    def share(self, pages: np.ndarray) -> None:
        """Increment the reference counts of cached pages, so that they are not evicted.

        Args:
            pages: the pages that `match` returned for a sequence.
        """
        if not len(pages):
            return
        self._num_evictable -= self.num_evictable(pages)
        self._place_of[pages] = _NOWHERE
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
        if not len(idle):
            return
        self.num_changes += 1
        cached = self.is_cached[idle]
        if not np.count_nonzero(cached):
            self._add_blank(idle)
            return
        self._add_blank(idle[~cached])
        self._make_evictable(idle[cached][::-1])

    def publish(self, pages: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Add full, computed pages to the prefix cache, and return the added ones, intp[m].

        A page is not added if its key already has a page.

        Args:
            pages: i32[n], the pages.
            keys: u64[n, WORDS], their keys.
        """
        added = self.index.add(pages.astype(np.intp), keys)
        self.is_cached[added] = True
        self.num_changes += 1
        return added

    def clear_cache(self) -> None:
        """Remove all keys from the prefix cache. Pages that sequences hold stay allocated."""
        pages = self._evictable()
        self._add_blank(pages)
        self._place_of[pages] = _NOWHERE
        self._head = self._tail = self._num_evictable = 0
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
        assert self._num_evictable == len(evictable), "evictable pages are miscounted"
        assert np.array_equal(self.ref_count, num_holders), (
            "reference counts differ from the tables"
        )
        free = np.concatenate([blank, evictable])
        assert len(np.unique(free)) == len(free), "a page is free twice"
        assert NULL_PAGE not in free, "the null page is free"
        assert np.all(self.ref_count[free] == 0), "a free page is held"
        in_use = int(np.count_nonzero(self.ref_count))
        assert len(free) + in_use == self.num_usable, "pages were lost"
        assert not self.is_cached[blank].any(), "a blank page caches something"
        assert self.is_cached[evictable].all(), "an evictable page caches nothing"
        cached = np.flatnonzero(self.is_cached)
        assert np.array_equal(self.index.pages(), cached), "keys and cached pages differ"


def most_pages(length: int, page_size: int, window: int | None, chunk: int) -> int:
    """Return the most pages of the KV cache that a sequence of `length` tokens holds at once.

    Pages outside the attention window are freed when the results of a step are read. The next step
    has then been submitted already, so a sequence holds two chunks in addition to the window.

    Args:
        length: the tokens of the sequence.
        page_size: number of tokens per page.
        window: the positions that a token attends to, including its own. None for all.
        chunk: the most tokens of the sequence that a step computes.
    """
    pages = -(-length // page_size)
    if window is None:
        return pages
    return min(pages, -(-(window + 2 * chunk) // page_size) + 1)


def longest_held(
    num_pages: int, page_size: int, window: int | None, chunk: int, length: int
) -> int:
    """Return the length of the longest sequence that fits into `num_pages` pages of KV cache.

    It is at most `length`. The other arguments are those of `most_pages`.
    """
    if most_pages(length, page_size, window, chunk) <= num_pages:
        return length
    return num_pages * page_size
