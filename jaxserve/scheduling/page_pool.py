"""PagePool: who holds each page, what it caches, and which page is evicted next."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any

import numpy as np

NULL_PAGE = 0
_KEY_BYTES = 16


def root_key(cache_salt: str) -> bytes:
    """The parent of a sequence's first page: pages are shared within one salt only."""
    return blake2b(cache_salt.encode(), digest_size=_KEY_BYTES, person=b"jaxserve-root").digest()


def page_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of a full page: a 128-bit digest over its parent's key and its own tokens.

    The chain makes it stand for the whole prefix, so equal tokens under another prefix, whose KV
    differs, have another key.
    """
    return blake2b(parent + tokens, digest_size=_KEY_BYTES).digest()


def extend_keys(keys: list[bytes], salt: str, tokens: np.ndarray, page_size: int) -> None:
    """Append the keys of the full pages of `tokens`, i32[n], that `keys` does not have yet."""
    first, last = len(keys), len(tokens) // page_size
    if first == last:
        return
    parent = keys[-1] if keys else root_key(salt)
    data = tokens[first * page_size : last * page_size].tobytes()
    width = page_size * tokens.itemsize
    for start in range(0, len(data), width):
        parent = page_key(parent, data[start : start + width])
        keys.append(parent)


class PagePool:
    """The pages of the KV cache: reference counts, cached keys and eviction order.

    A page is free when no sequence holds it. Free pages that cache nothing are handed out
    first; then cached ones, least recently released first. Page 0 is the null page: it is
    never handed out, and padding points to it. All operations cost O(pages concerned).

    Attributes:
        ref_count: int32[P], sequences holding each page.
        key_of: the key under which each page is cached, or None.
        page_of: the inverse of `key_of`.
        num_changes: grows whenever what did not fit may fit: pages became free, or are cached now.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (one is the null page): {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_changes = 0
        self.num_evictions = 0
        self.reset()

    def reset(self) -> None:
        """Forget every holder and every cached key."""
        self.ref_count = np.zeros(self.num_pages, np.int32)
        self.key_of: list[Any] = [None] * self.num_pages
        self.page_of: dict[bytes, int] = {}
        self._cached = np.zeros(self.num_pages, bool)
        # A stack whose top is its end; low page ids are handed out first.
        self._blank = np.arange(self.num_pages - 1, 0, -1, dtype=np.int32)
        self._num_blank = self.num_pages - 1
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self.num_changes += 1

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out."""
        return self._num_blank + len(self._evictable)

    @property
    def num_usable(self) -> int:
        """Pages that sequences can hold in all."""
        return self.num_pages - 1

    def allocate(self, count: int) -> np.ndarray:
        """`count` pages, each held once; int32[count]. The caller has checked `num_free`."""
        assert count <= self.num_free, "allocate beyond num_free"
        blank = min(count, self._num_blank)
        self._num_blank -= blank
        pages = self._blank[self._num_blank : self._num_blank + blank][::-1]
        if blank < count:
            pages = np.concatenate([pages, np.array(self._evict(count - blank), np.int32)])
        else:
            pages = pages.copy()
        self.ref_count[pages] = 1
        return pages

    def _evict(self, count: int) -> list[int]:
        """Take the `count` cached pages that were released first from the cache."""
        popitem, page_of, key_of = self._evictable.popitem, self.page_of, self.key_of
        pages = [popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            del page_of[key_of[page]]
            key_of[page] = None
        self._cached[pages] = False
        self.num_evictions += count
        return pages

    def match(self, keys: list[bytes]) -> list[int]:
        """Pages that cache the longest prefix of `keys`; nobody's hold on them changes."""
        pages = []
        page_of = self.page_of
        for key in keys:
            page = page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_evictable(self, pages: list[int]) -> int:
        """How many of these cached pages are free now, and would not be once shared."""
        return int(np.count_nonzero(self.ref_count[pages] == 0)) if pages else 0

    def share(self, pages: list[int]) -> None:
        """Hold cached pages once more."""
        if not pages:
            return
        for page in pages:
            self._evictable.pop(page, None)
        self.ref_count[pages] += 1

    def release(self, pages: np.ndarray) -> None:
        """Let go of a sequence's pages, given in the order of its tokens.

        The last page becomes the first to be evicted: a prefix is worth more than its tail.
        """
        self.ref_count[pages] -= 1
        idle = pages[self.ref_count[pages] == 0]
        if not len(idle):
            return
        self.num_changes += 1
        cached = self._cached[idle]
        blank = idle[~cached]
        self._blank[self._num_blank : self._num_blank + len(blank)] = blank[::-1]
        self._num_blank += len(blank)
        if len(blank) < len(idle):
            self._evictable.update(dict.fromkeys(reversed(idle[cached].tolist())))

    def publish(self, pages: list[int], keys: list[bytes]) -> None:
        """Offer full, computed pages to later prefixes; a key already cached stays as it is."""
        page_of, key_of = self.page_of, self.key_of
        for page, key in zip(pages, keys, strict=True):
            if page_of.setdefault(key, page) == page:
                key_of[page] = key
        self._cached[pages] = [key_of[page] is not None for page in pages]
        self.num_changes += 1

    def clear_cache(self) -> None:
        """Forget what unheld pages cache, and every key; held pages stay held."""
        for page in self._evictable:
            self._blank[self._num_blank] = page
            self._num_blank += 1
        self._evictable.clear()
        self.page_of.clear()
        self.key_of = [None] * self.num_pages
        self._cached[:] = False
        self.num_changes += 1

    def check(self, held: np.ndarray) -> None:
        """Verify the pool against `held`, int32[P]: how many sequences list each page.

        Raises:
            AssertionError: naming the invariant that does not hold.
        """
        blank = self._blank[: self._num_blank]
        evictable = np.fromiter(self._evictable, np.int32, len(self._evictable))
        assert self.ref_count[NULL_PAGE] == 0, "the null page is held"
        assert self.key_of[NULL_PAGE] is None, "the null page is cached"
        assert np.array_equal(self.ref_count, held), "reference counts differ from the tables"
        free = np.concatenate([blank, evictable])
        assert len(np.unique(free)) == len(free), "a page is free twice"
        assert NULL_PAGE not in free, "the null page is free"
        assert np.all(self.ref_count[free] == 0), "a free page is held"
        in_use = int(np.count_nonzero(self.ref_count))
        assert len(free) + in_use == self.num_usable, "pages were lost"
        assert not self._cached[blank].any(), "a blank page caches something"
        assert self._cached[evictable].all(), "an evictable page caches nothing"
        keyed = {page: key for page, key in enumerate(self.key_of) if key is not None}
        assert {key: page for page, key in keyed.items()} == self.page_of, "keys not inverse"
        assert np.array_equal(np.flatnonzero(self._cached), sorted(keyed)), "cached flags differ"
