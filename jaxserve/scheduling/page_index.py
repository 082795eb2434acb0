"""PageIndex: a hash table of the cached pages by their keys, and changes of the set of pages."""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from jaxserve.scheduling.page_keys import WORDS

# Cells per bucket. With two buckets per page, one key in 2**24 finds its bucket full.
_CELLS = 8
# Up to this number, pages are added one by one: an array operation takes a microsecond.
_FEW = 2
# Position of the first word's upper half in a key viewed as 32-bit words.
_UPPER = 1 if sys.byteorder == "little" else 0


class PageIndex:
    """A hash table from page keys to pages of the KV cache that handles an array of keys per call.

    A step publishes, evicts and looks up hundreds of keys in memory that is not in the processor's
    cache. A dictionary takes 0.3 us for each of them. Here an array of keys takes a dozen array
    operations, whose loads overlap. Keys are random numbers, so parts of a key are its hash: the
    lower half of the first word selects the bucket, the upper half is the cell's tag.

    A key is not stored if its bucket is full, if its tag is 0, or if another key in the bucket has
    the same tag. The cost is a page that is not cached. A lookup never returns a wrong page.

    Args:
        num_pages: the number of pages, including page 0, which is never stored.
    """

    def __init__(self, num_pages: int) -> None:
        self._mask = (1 << (2 * num_pages).bit_length()) - 1
        # The tag of each cell, or 0 if the cell is empty, and the page of each used cell.
        self._buckets = np.zeros((self._mask + 1, _CELLS), np.uint32)
        self._page_of: np.ndarray = np.zeros(self._buckets.size, np.intp)
        # A flat view of the same cells, which NumPy indexes faster.
        self._tags: np.ndarray = self._buckets.ravel()
        self._cell_of = np.zeros(num_pages, np.intp)
        # One array per word of the key: an array of rows would take twice as long.
        self._first_of, self._second_of = np.zeros((WORDS, num_pages), np.uint64)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return intp[n]: the page of each key in `keys`, u64[n, WORDS], or 0 if it has none."""
        pages_of_keys = np.zeros(len(keys), np.intp)
        bucket, tag = self._hash(keys)
        key, cell = (self._buckets.take(bucket, axis=0) == tag[:, None]).nonzero()
        if len(key):
            pages = self._page_of.take(bucket[key] * _CELLS + cell)
            pages_of_keys[key] = pages * self._have(pages, keys[key])
        return pages_of_keys

    def holds(self, key: np.ndarray) -> bool:
        """Return whether a page may be stored under a key, u64[WORDS].

        False is exact. True can be wrong if another key has the same bucket and tag.
        """
        first = int(key[0])
        return first >> 32 in self._buckets[first & self._mask].tolist()

    def _hash(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return keys[:, 0].view(np.intp) & self._mask, keys.view(np.uint32)[:, _UPPER]

    def _have(self, pages: np.ndarray, keys: np.ndarray) -> np.ndarray:
        is_first = self._first_of.take(pages) == keys[:, 0]
        return is_first & (self._second_of.take(pages) == keys[:, 1])

    def add(self, pages: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Store pages, intp[n], under their keys, u64[n, WORDS], and return the stored pages.

        A page is not stored if its key already has a page, or if the key's bucket has no room. Of
        equal keys in a call, the first is stored.
        """
        if len(pages) <= _FEW:
            return self._add_few(pages, keys)
        bucket, tag = self._hash(keys)
        tags_there = self._buckets.take(bucket, axis=0)
        is_known = tags_there == tag[:, None]
        cell = (tags_there == 0).argmax(axis=1)
        cell += bucket * _CELLS
        in_its_way = self._tags.take(cell)  # 0, unless the bucket is full
        if np.count_nonzero(is_known) or np.count_nonzero(in_its_way):
            is_in = ~is_known.any(axis=1) & (in_its_way == 0)
            pages, keys, cell, tag = pages[is_in], keys[is_in], cell[is_in], tag[is_in]
        # If several pages take one cell, NumPy stores the last write, here that of the first page.

        self._page_of[cell[::-1]] = pages[::-1]
        is_kept = self._page_of.take(cell) == pages
        if np.count_nonzero(is_kept) == len(pages):
            self._tags[cell] = tag
            self._cell_of[pages] = cell
            self._first_of[pages], self._second_of[pages] = keys[:, 0], keys[:, 1]
            return pages
        stored = self.add(pages[is_kept], keys[is_kept])
        return np.concatenate([stored, self.add(pages[~is_kept], keys[~is_kept])])

    def _add_few(self, pages: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Store a few pages one by one, with the arguments and the result of `add`.

        This is faster than array operations for one or two pages.
        """
        positions: list[int] = []
        for position, (page, (first, second)) in enumerate(
            zip(pages.tolist(), keys.tolist(), strict=True)
        ):
            bucket, tag = first & self._mask, first >> 32
            tags = self._buckets[bucket].tolist()
            if not tag or tag in tags or 0 not in tags:
                continue
            cell = bucket * _CELLS + tags.index(0)
            self._tags[cell], self._page_of[cell], self._cell_of[page] = tag, page, cell
            self._first_of[page], self._second_of[page] = first, second
            positions.append(position)
        return pages[positions]

    def keys(self, pages: np.ndarray) -> np.ndarray:
        """Return u64[n, WORDS]: the key under which each of the given stored pages is found."""
        return np.stack([self._first_of[pages], self._second_of[pages]], axis=1)

    def remove(self, pages: np.ndarray) -> None:
        """Remove pages, intp[n], from the hash table. All of them must be stored."""
        self._tags[self._cell_of.take(pages)] = 0

    def clear(self) -> None:
        """Remove all pages from the hash table."""
        self._tags[:] = 0

    def pages(self) -> np.ndarray:
        """Return all pages in the hash table that a lookup of their own key finds, ascending."""
        pages = np.sort(self._page_of[self._tags > 0])
        return pages[self.find(self.keys(pages)) == pages]


class StoredPages(NamedTuple):
    """An event of the prefix cache: pages were added. The pages of a sequence are adjacent."""

    keys: np.ndarray  # u64[n, WORDS]
    slots: np.ndarray  # intp[n], the slot of each page's sequence
    nth: np.ndarray  # i32[n], the number of each page within its sequence
    # u64[n, WORDS], the keys of the preceding pages, which may not be in the cache. Undefined where
    # `nth` is 0.
    parents: np.ndarray
    tokens: np.ndarray  # i32[n, page_size]
    salts: list[str]  # the cache salts of the pages whose `nth` is 0, in order


class RemovedPages(NamedTuple):
    """An event of the prefix cache: pages were evicted. It has their keys, u64[n, WORDS]."""

    keys: np.ndarray


class ClearedPages(NamedTuple):
    """An event of the prefix cache: all pages were removed."""


Change = StoredPages | RemovedPages | ClearedPages
