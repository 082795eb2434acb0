"""PageIndex: a hash table, in arrays, from keys to the pages that cache them."""

from __future__ import annotations

import sys

import numpy as np

from jaxserve.scheduling.page_keys import WORDS

# Cells of a bucket. With two buckets a page, one in 2**24 keys finds its bucket full.
_CELLS = 8
# Most pages that are added one by one: array operations cost a microsecond each.
_FEW = 2
# Where a word's upper half is among the halves of a key.
_UPPER = 1 if sys.byteorder == "little" else 0


class PageIndex:
    """A table of pages by their keys, for a batch of keys at a time.

    A step publishes, evicts and looks up hundreds of keys, scattered over memory that no cache
    holds. A dictionary waits for one after the other, 0.3 us each; here a batch is a dozen array
    operations, whose loads overlap. Keys are random numbers, so that parts of them are their hash:
    the lower half of the first word chooses the bucket, its upper half is the tag of the cell.

    A key that finds its bucket full is not kept, nor one whose tag is there already or is 0:
    each costs a page of cache, and never returns a wrong one.

    Args:
        num_pages: page 0, which is never kept, included.
    """

    def __init__(self, num_pages: int) -> None:
        self._mask = (1 << (2 * num_pages).bit_length()) - 1
        # The tag in each cell, 0 where it is empty, and the page where it is not.
        self._buckets = np.zeros((self._mask + 1, _CELLS), np.uint32)
        self._page_of: np.ndarray = np.zeros(self._buckets.size, np.intp)
        # The same cells once more in one row: numpy takes those faster.
        self._tags: np.ndarray = self._buckets.ravel()
        self._cell_of = np.zeros(num_pages, np.intp)
        # Word by word: rows of two would take twice as long.
        self._first_of, self._second_of = np.zeros((WORDS, num_pages), np.uint64)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return intp[n]: for each key, u64[n, WORDS], its page, or 0."""
        found = np.zeros(len(keys), np.intp)
        bucket, tag = self._hash(keys)
        key, cell = (self._buckets.take(bucket, axis=0) == tag[:, None]).nonzero()
        if len(key):
            pages = self._page_of.take(bucket[key] * _CELLS + cell)
            found[key] = pages * self._have(pages, keys[key])
        return found

    def holds(self, key: np.ndarray) -> bool:
        """Return whether a key, u64[WORDS], may have a page: exact but for keys of one tag."""
        first = int(key[0])
        return first >> 32 in self._buckets[first & self._mask].tolist()

    def _hash(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return intp[n] and u32[n]: buckets and tags of keys."""
        return keys[:, 0].view(np.intp) & self._mask, keys.view(np.uint32)[:, _UPPER]

    def _have(self, pages: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return bool[n]: whether each page was kept last under its key."""
        is_first = self._first_of.take(pages) == keys[:, 0]
        return is_first & (self._second_of.take(pages) == keys[:, 1])

    def add(self, pages: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Keep pages, intp[n], under their keys, u64[n, WORDS]; returns those that are kept now.

        A key that has a page already stays with it, and of equal keys here the first counts.
        """
        if len(pages) <= _FEW:
            return self._add_few(pages, keys)
        bucket, tag = self._hash(keys)
        tags_there = self._buckets.take(bucket, axis=0)
        is_known = tags_there == tag[:, None]
        cell = (tags_there == 0).argmax(axis=1)
        cell += bucket * _CELLS
        in_its_way = self._tags.take(cell)  # none, unless its bucket is full
        if np.count_nonzero(is_known) or np.count_nonzero(in_its_way):
            is_in = ~is_known.any(axis=1) & (in_its_way == 0)
            pages, keys, cell, tag = pages[is_in], keys[is_in], cell[is_in], tag[is_in]
        # Where several take one cell, the last is written: from back to front, the first of them.
        self._page_of[cell[::-1]] = pages[::-1]
        is_kept = self._page_of.take(cell) == pages
        if np.count_nonzero(is_kept) == len(pages):
            self._tags[cell] = tag
            self._cell_of[pages] = cell
            self._first_of[pages], self._second_of[pages] = keys[:, 0], keys[:, 1]
            return pages
        kept = self.add(pages[is_kept], keys[is_kept])
        return np.concatenate([kept, self.add(pages[~is_kept], keys[~is_kept])])

    def _add_few(self, pages: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Do the work of `add` page by page."""
        kept: list[int] = []
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
            kept.append(position)
        return pages[kept]

    def keys(self, pages: np.ndarray) -> np.ndarray:
        """Return the keys, u64[n, WORDS], of pages that are kept."""
        return np.stack([self._first_of[pages], self._second_of[pages]], axis=1)

    def remove(self, pages: np.ndarray) -> None:
        """Forget pages that are kept."""
        self._tags[self._cell_of.take(pages)] = 0

    def clear(self) -> None:
        """Forget every page."""
        self._tags[:] = 0

    def pages(self) -> np.ndarray:
        """Return every page that is kept and found by its key, ascending."""
        pages = np.sort(self._page_of[self._tags > 0])
        return pages[self.find(self.keys(pages)) == pages]
