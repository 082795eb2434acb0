"""PagePool: the holders of each page, its cached key, and the order of eviction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxserve.scheduling.page_changes import Change, ClearedPages, RemovedPages
from jaxserve.scheduling.page_index import PageIndex

NULL_PAGE = 0
NO_PAGES = np.zeros(0, np.int32)
_NOWHERE = -1


class PagePool:
    """The pages of the KV cache: reference counts, cached keys and eviction order.

    A page is free when no sequence holds it. Free pages that cache nothing are handed out
    first; then cached ones, least recently released first. Page 0 is the null page: it is
    never handed out, and padding points to it. All operations cost O(pages concerned).

    Attributes:
        ref_count: int32[P], sequences holding each page.
        is_cached: bool[P], whether the page's content can be found by its key.
        index: the cached pages by their keys.
        on_change: receives every change of what can be found, from `Publisher` for new pages; None
            where nobody keeps account.
        num_changes: grows whenever what did not fit may fit: pages became free, or are cached now.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (one is the null page): {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_changes = 0
        self.num_evictions = 0
        self.on_change: Callable[[Change], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget every holder and every cached key."""
        self.ref_count = np.zeros(self.num_pages, np.int32)
        self.is_cached = np.zeros(self.num_pages, bool)
        self.index = PageIndex(self.num_pages)
        # A stack whose top is its end; low page ids are handed out first.
        self._blank = np.arange(self.num_pages - 1, 0, -1)
        self._num_blank = self.num_pages - 1
        # Free cached pages wait in `_queue[_head:_tail]`, the first to be evicted first. An
        # entry is void unless `_place_of[page]` is its own place: pages leave by that alone.
        self._queue = np.zeros(2 * self.num_pages, np.intp)
        self._place_of = np.full(self.num_pages, _NOWHERE, np.int64)
        self._head = self._tail = self._num_evictable = 0
        self.num_changes += 1
        self._tell_cleared()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out."""
        return self._num_blank + self._num_evictable

    @property
    def num_usable(self) -> int:
        """Pages that sequences can hold in all."""
        return self.num_pages - 1

    def allocate(self, count: int) -> np.ndarray:
        """Hand out pages, intp[count], each held once. The caller has checked `num_free`."""
        assert count <= self.num_free, "allocate beyond num_free"
        if count > self._num_blank:
            self._evict(count - self._num_blank)
        self._num_blank -= count
        pages = self._blank[self._num_blank : self._num_blank + count][::-1].copy()
        self.ref_count[pages] = 1
        return pages

    def _evict(self, count: int) -> None:
        """Make blank the `count` cached pages that were released first.

        One in 64 of the others goes with them, since a call costs more than a page does.
        """
        count += (self._num_evictable - count) // 64
        pages = self._next_evictable(count)
        self._place_of[pages] = _NOWHERE
        self._num_evictable -= count
        if self.on_change is not None:
            self.on_change(RemovedPages(self.index.keys(pages)))
        self.index.remove(pages)
        self.is_cached[pages] = False
        self.num_evictions += count
        self._add_blank(pages)

    def _add_blank(self, pages: np.ndarray) -> None:
        self._blank[self._num_blank : self._num_blank + len(pages)] = pages[::-1]
        self._num_blank += len(pages)

    def _next_evictable(self, count: int) -> np.ndarray:
        """Move the queue's head past its first `count` pages; returns them."""
        found: list[np.ndarray] = []
        while count:
            end = min(self._head + count, self._tail)
            entries = self._queue[self._head : end]
            valid = entries[self._place_of[entries] == np.arange(self._head, end)]
            self._head = end
            found.append(valid)
            count -= len(valid)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _make_evictable(self, pages: np.ndarray) -> None:
        """Put pages at the end of the queue."""
        if self._tail + len(pages) > len(self._queue):
            entries = self._queue[self._head : self._tail]
            kept = entries[self._place_of[entries] == np.arange(self._head, self._tail)]
            self._queue[: len(kept)] = kept
            self._place_of[kept] = np.arange(len(kept))
            self._head, self._tail = 0, len(kept)
        end = self._tail + len(pages)
        self._queue[self._tail : end] = pages
        self._place_of[pages] = np.arange(self._tail, end)
        self._tail = end
        self._num_evictable += len(pages)

    def _evictable(self) -> np.ndarray:
        """Return the free cached pages, the first to be evicted first."""
        entries = self._queue[self._head : self._tail]
        return entries[self._place_of[entries] == np.arange(self._head, self._tail)]

    def match(self, keys: np.ndarray) -> np.ndarray:
        """Return the pages that cache the longest prefix of `keys`, u64[n, WORDS]; none is held."""
        # Most prompts share nothing, which a look at their first page decides.
        if not len(keys) or not self.index.holds(keys[0]):
            return NO_PAGES
        pages = self.index.find(keys)
        missing = (pages == 0).nonzero()[0]
        return pages[: missing[0]] if len(missing) else pages

    def num_evictable(self, pages: np.ndarray) -> int:
        """Count those of these cached pages that are free now, and would not be once shared."""
        return int(np.count_nonzero(self.ref_count[pages] == 0)) if len(pages) else 0

    def share(self, pages: np.ndarray) -> None:
        """Hold cached pages once more."""
        if not len(pages):
            return
        self._num_evictable -= self.num_evictable(pages)
        self._place_of[pages] = _NOWHERE
        self.ref_count[pages] += 1

    def release(self, *held: np.ndarray) -> None:
        """Let go of sequences' pages, one after the other, each in the order of its tokens.

        The last page becomes the first to be evicted: a prefix is worth more than its tail.
        """
        # Reversed below. As indices numpy takes intp much faster than others.
        pages = np.concatenate(held[::-1], dtype=np.intp)
        left = self.ref_count[pages] - 1
        idle = pages
        if np.count_nonzero(left):  # few pages are shared
            if len(held) > 1:  # two of these lists may share a page
                for pages_of_one in held:
                    self.release(pages_of_one)
                return
            idle = pages[left == 0]
        self.ref_count[pages] = left
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
        """Offer full, computed pages, i32[n], to later prefixes under their keys, u64[n, WORDS].

        A key that is cached already stays with its page. Return those that are found now, intp[m].
        """
        kept = self.index.add(pages.astype(np.intp), keys)
        self.is_cached[kept] = True
        self.num_changes += 1
        return kept

    def clear_cache(self) -> None:
        """Forget what unheld pages cache, and every key; held pages stay held."""
        pages = self._evictable()
        self._add_blank(pages)
        self._place_of[pages] = _NOWHERE
        self._head = self._tail = self._num_evictable = 0
        self.index.clear()
        self.is_cached[:] = False
        self.num_changes += 1
        self._tell_cleared()

    def _tell_cleared(self) -> None:
        if self.on_change is not None:
            self.on_change(ClearedPages())

    def check(self, held: np.ndarray) -> None:
        """Verify the pool against `held`, int32[P]: how many sequences list each page.

        Raises:
            AssertionError: naming the invariant that does not hold.
        """
        blank = self._blank[: self._num_blank]
        evictable = self._evictable()
        assert self.ref_count[NULL_PAGE] == 0, "the null page is held"
        assert not self.is_cached[NULL_PAGE], "the null page is cached"
        assert self._num_evictable == len(evictable), "evictable pages are miscounted"
        assert np.array_equal(self.ref_count, held), "reference counts differ from the tables"
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
