"""Bugs that several kinds of pages could have (see mutants)."""

from __future__ import annotations

from tests.scheduling.seeded_pool_bugs import POOL, PUBLISHING, SCHEDULER, SLOTS, Bug

WINDOWS = "jaxserve/scheduling/window_pages.py"
KINDS = "jaxserve/scheduling/page_kinds.py"

KIND_BUGS = (
    Bug(
        "kinds: a block is given back one token early",
        KINDS,
        "return np.maximum(computed - self.window + 1, 0) // page_size",
        "return np.maximum(computed - self.window + 2, 0) // page_size",
    ),
    Bug(
        "kinds: a prefix is used without the blocks of its window",
        POOL,
        "            is_end &= last_missing <= ",
        "            last_missing <= ",
    ),
    Bug(
        "kinds: the blocks of a prefix are checked for a shorter window",
        POOL,
        "            tokens = numbers * self.page_size\n",
        "            tokens = (numbers + 1) * self.page_size\n",
    ),
    Bug(
        "kinds: keys are published for the first kind alone",
        PUBLISHING,
        "for kind in range(1, len(table.kinds)):",
        "for kind in range(1, 1):",
        only_slow=True,
    ),
    Bug(
        "kinds: all kinds share the keys of the first",
        POOL,
        "return keys ^ np.uint64(kind * _SALT % 2**64) if kind else keys",
        "return keys",
    ),
    Bug(
        "kinds: a sequence that ends releases the blocks of the first kind alone",
        SLOTS,
        "            pages.append(self.all_pages(slot))\n",
        "            pages.append(self.pages(slot))\n",
    ),
    Bug(
        "kinds: the first kind's blocks are sent for another",
        SLOTS,
        "            self.block_pages[blocks[number], : kind.num_pages].T\n",
        "            self.block_pages[blocks[0], : kind.num_pages].T\n",
    ),
    Bug(
        "kinds: the first kind's rows are sent for another",
        SLOTS,
        "pages = self.block_pages[self.page_tables[number, slots], : kind.num_pages]",
        "pages = self.block_pages[self.page_tables[0, slots], : kind.num_pages]",
    ),
    Bug(
        "kinds: hits of another kind are evicted while the first is allocated",
        SCHEDULER,
        "            self.pool.share(np.concatenate(shared))  # before an allocation could evict "
        "them\n"
        "            allocated = self.pool.allocate(fresh).reshape(len(hits), fresh)\n",
        "            allocated = self.pool.allocate(fresh).reshape(len(hits), fresh)\n"
        "            self.pool.share(np.concatenate(shared))\n",
    ),
    Bug(
        "kinds: only the first page of an evicted block becomes free",
        POOL,
        "        pages = self.pages_of(blocks)\n        self._blank",
        "        pages = blocks\n        self._blank",
    ),
    Bug(
        "kinds: a reserve of one step's tokens",
        WINDOWS,
        "tokens = min(num_known + self._to_compute(running), 2 * self._max_tokens)",
        "tokens = min(num_known + self._to_compute(running), self._max_tokens)",
        only_slow=True,
    ),
)
