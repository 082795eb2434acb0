"""PageIndex: which page caches a key, as a hash table in arrays."""

from __future__ import annotations

import numpy as np

# Cells of a bucket. With two buckets a page, one in 2**24 keys finds its bucket full.
_CELLS = 8


class PageIndex:
    """Pages by their keys, a batch at a time.

    A step publishes, evicts and looks up hundreds of keys, scattered over memory that no cache
    holds. A dictionary waits for one after the other, 0.3 us each; here a batch is a dozen array
    operations, whose loads overlap. Keys are random numbers, so that a part of them is their hash.

    A key that finds its bucket full is not kept, nor one that has its first word in common with
    another: either costs a page of cache, and never returns a wrong one.

    Args:
        num_pages: page 0, which is never kept, included.
    """

    def __init__(self, num_pages: int) -> None:
        self._mask = (1 << (2 * num_pages).bit_length()) - 1
        # Pages; 0 where empty. The same cells once more in one row: numpy takes those faster.
        self._buckets = np.zeros((self._mask + 1, _CELLS), np.int32)
        self._cells = self._buckets.ravel()
        self._first = np.zeros(num_pages, np.uint64)
        self._second = np.zeros(num_pages, np.uint64)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """intp[n]: for each key, u64[n, WORDS], its page, or 0."""
        found = np.zeros(len(keys), np.intp)
        cells = self._buckets.take(self._bucket(keys[:, 0]), axis=0)
        key, cell = (self._first.take(cells) == keys[:, :1]).nonzero()
        if len(key):
            pages = cells[key, cell]
            found[key] = pages * (self._second.take(pages) == keys[key, 1])
        return found

    def holds(self, key: np.ndarray) -> bool:
        """Whether one key, u64[WORDS], may have a page: exact but for keys that share a word."""
        first = key[0]
        cells = self._buckets[int(first) & self._mask]
        return bool(np.count_nonzero(self._first[cells] == first))

    def _bucket(self, first: np.ndarray) -> np.ndarray:
        """intp[n]: the bucket of keys with these first words."""
        return first.view(np.intp) & self._mask

    def add(self, pages: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Keep pages, intp[n], under their keys, u64[n, WORDS]; returns those that are kept now.

        A key that has a page already stays with it, and of equal keys here the first counts.
        """
        bucket = self._bucket(keys[:, 0])
        pages_there = self._buckets.take(bucket, axis=0)
        is_known = self._first.take(pages_there) == keys[:, :1]
        cell = pages_there.argmin(axis=1)
        cell += bucket * _CELLS
        is_out = self._cells.take(cell) > 0  # its bucket is full
        if np.count_nonzero(is_known):
            is_out |= is_known.any(axis=1)
        if np.count_nonzero(is_out):
            pages, keys, cell = pages[~is_out], keys[~is_out], cell[~is_out]
        # Where several take one cell, the last is written: from back to front, the first of them.
        self._cells[cell[::-1]] = pages[::-1]
        is_kept = self._cells.take(cell) == pages
        if np.count_nonzero(is_kept) == len(pages):
            self._first[pages], self._second[pages] = keys[:, 0], keys[:, 1]
            return pages
        kept = pages[is_kept]
        self._first[kept], self._second[kept] = keys[is_kept, 0], keys[is_kept, 1]
        return np.concatenate([kept, self.add(pages[~is_kept], keys[~is_kept])])

    def remove(self, pages: np.ndarray) -> None:
        """Forget pages that are kept."""
        bucket = self._bucket(self._first.take(pages))
        cell = (self._buckets.take(bucket, axis=0) == pages[:, None]).argmax(axis=1)
        cell += bucket * _CELLS
        self._cells[cell] = 0

    def clear(self) -> None:
        """Forget all."""
        self._buckets[:] = 0

    def pages(self) -> np.ndarray:
        """Every page that is kept and found by its key, ascending."""
        pages = np.sort(self._buckets[self._buckets > 0])
        keys = np.stack([self._first[pages], self._second[pages]], axis=1)
        return pages[self.find(keys) == pages]
