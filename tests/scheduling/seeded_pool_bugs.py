"""Bugs of the page pool and of page keys; and what a bug is."""

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
    """A name, a source file, and a text that occurs once in it, with its replacement.

    Attributes:
        only_slow: no result is wrong and every sequence ends, only later or at a greater cost.
            Unit tests measure that, random schedules do not.
        letter: of the bug in the list `STATE_FAULTS`, or "".
        tests: arguments of pytest for the tests that notice a bug on the device. Empty for bugs of
            the scheduler.
    """

    name: str
    file: str
    old: str
    new: str
    only_slow: bool = False
    letter: str = ""
    tests: tuple[str, ...] = ()


POOL = "jaxserve/scheduling/page_pool.py"
QUEUE = "jaxserve/scheduling/eviction_queue.py"
INDEX = "jaxserve/scheduling/page_index.py"
KEYS = "jaxserve/scheduling/page_keys.py"
SCHEDULER = "jaxserve/scheduling/scheduler.py"
FITTING = "jaxserve/scheduling/budget.py"
SIBLINGS = "jaxserve/scheduling/siblings.py"
RESULTS = "jaxserve/scheduling/commit_result.py"
PUBLISHING = "jaxserve/scheduling/publishing.py"
RAGGED = "jaxserve/scheduling/slot_table.py"
SLOTS = "jaxserve/scheduling/slot_table.py"
WAITING = "jaxserve/scheduling/waiting.py"
STATIC = "scripts/lib/static_scheduler.py"
BATCH = "jaxserve/execution/batch.py"
PAGE_TABLE = "jaxserve/execution/page_table.py"
EVENTS = "jaxserve/engine/kv_events.py"

POOL_BUGS = (
    Bug(
        "events: evicted pages are not told of",
        POOL,
        "            self.on_change(RemovedPages(self.index.keys(first)))\n",
        "            pass\n",
    ),
    Bug(
        "events: a cache that is cleared is not told of",
        POOL,
        "            self.on_change(ClearedPages())\n",
        "            pass\n",
    ),
    Bug(
        "events: pages whose key another page has are told of too",
        PUBLISHING,
        "        rows = rows[np.isin(pages[rows], added)]\n",
        "",
    ),
    Bug(
        "events: a slot that is named twice is told of twice",
        PUBLISHING,
        "np.sort(np.unique(pages, return_index=True)[1])",
        "np.arange(len(pages))",
    ),
    Bug(
        "events: a page is its own parent",
        PUBLISHING,
        "table.page_keys[owner, nth - 1]",
        "table.page_keys[owner, nth]",
    ),
    Bug(
        "events: tokens of the first page stand for all",
        PUBLISHING,
        "columns = nth[:, None] * size + np.arange(size)",
        "columns = np.arange(size) + 0 * nth[:, None]",
    ),
    Bug(
        "events: pages of several sequences count as one prefix",
        EVENTS,
        "(np.diff(change.slots) == 0) & (np.diff(change.nth) == 1)",
        "np.diff(change.nth) >= 1",
    ),
    Bug(
        "events: salts are left out",
        PUBLISHING,
        "s.request.cache_salt for s in",
        '"" for s in',
    ),
    Bug(
        "new pages: those of the slot's last sequence count as sent",
        SLOTS,
        "self.num_pages[slot] = self.first_pages[:, slot] = self.num_sent[slot] = 0",
        "self.num_pages[slot] = self.first_pages[:, slot] = 0",
    ),
    Bug(
        "new pages: of several, only the first is sent",
        SLOTS,
        "start + sent[rows], start + ends[rows])",
        "start + sent[rows], start + sent[rows] + 1)",
    ),
    Bug(
        "new pages: rows to be sent whole count as sent, and are not",
        PAGE_TABLE,
        "for first in range(0, len(whole), ROWS):",
        "for first in range(ROWS, len(whole), ROWS):",
    ),
    Bug(
        "new pages: there is less room than tokens can take",
        PAGE_TABLE,
        "max(2, bucket.num_rows + num_tokens // page_size)",
        "max(2, 1 + num_tokens // page_size)",
    ),
    Bug(
        "new pages: those of the first row count as sent, and are not",
        SLOTS,
        "rows = (ends > sent).nonzero()[0]",
        "rows = (ends > sent).nonzero()[0][1:]",
    ),
    Bug(
        "the null page is handed out",
        POOL,
        "np.arange(self.num_pages - 1, 0, -1)",
        "np.arange(self.num_pages - 2, -1, -1)",
    ),
    Bug(
        "the key of an evicted page stays",
        POOL,
        "        self.index.remove(blocks)\n",
        "",
    ),
    Bug(
        "an evicted page counts as cached",
        POOL,
        "self.is_cached[blocks] = False\n        self.num_evictions",
        "self.num_evictions",
    ),
    Bug(
        "a hit stays evictable",
        POOL,
        "        self._queue.remove(pages)\n        self._spare.remove(pages)\n",
        "",
    ),
    Bug(
        "hits still count as evictable",
        POOL,
        "        self._num_evictable -= self.num_evictable(pages)\n",
        "",
    ),
    Bug(
        "the queue keeps old places when it is tidied",
        QUEUE,
        "            self._place_of[valid_blocks] = np.arange(len(valid_blocks))\n",
        "",
    ),
    Bug(
        "a page is published under its neighbour's key",
        POOL,
        "self.index.add(pages.astype(np.intp), _keys_of(keys, kind))",
        "self.index.add(pages.astype(np.intp), _keys_of(keys, kind)[::-1])",
    ),
    Bug(
        "a page is found by its key's tag alone",
        INDEX,
        "pages * self._have(pages, keys[key])",
        "pages",
    ),
    Bug(
        "a full bucket loses a page for each that is added",
        INDEX,
        "in_its_way = self._tags.take(cell)",
        "in_its_way = np.zeros(len(cell), np.uint32)",
        only_slow=True,
    ),
    Bug(
        "of pages that would take one cell all but one are forgotten",
        INDEX,
        "return np.concatenate([stored, self.add(pages[~is_kept], keys[~is_kept])])",
        "return stored",
    ),
    Bug(
        "of equal keys the last counts",
        INDEX,
        "self._page_of[cell[::-1]] = pages[::-1]",
        "self._page_of[cell] = pages",
    ),
    Bug("a hit is not counted", POOL, "self.ref_count[pages] += 1", "pass"),
    Bug("allocated pages are not counted", POOL, "self.ref_count[pages] = 1", "pass"),
    Bug(
        "a shared page is freed by the first to leave",
        POOL,
        "idle = pages[counts == 0]",
        "idle = pages[counts <= 1]",
    ),
    Bug("release loses blank pages", POOL, "        self._add_blank(idle[~cached])\n", ""),
    Bug(
        "what is cached is lost beside blank pages",
        POOL,
        "if not np.count_nonzero(cached):",
        "if not cached.all():",
    ),
    Bug(
        "match jumps over a missing page",
        POOL,
        "return pages[: missing[0]] if len(missing) else pages",
        "return pages[pages > 0]",
        letter="i",
    ),
    Bug(
        "a key is published twice",
        INDEX,
        "~is_known.any(axis=1) & (in_its_way == 0)",
        "in_its_way == 0",
    ),
    Bug(
        "a key of a few is published twice",
        INDEX,
        "if not tag or tag in tags or 0 not in tags:",
        "if not tag or 0 not in tags:",
    ),
    Bug(
        "a page's key leaves out its parent",
        KEYS,
        "        np.add.accumulate(states, axis=0, out=states)\n",
        "",
    ),
    Bug(
        "a generated page's key leaves out its parent",
        KEYS,
        "states = states + _sums",
        "states = _sums",
    ),
    Bug("keys leave out the salt", KEYS, "if salt or self.serial:", "if False:"),
    Bug("keys leave out the position", KEYS, "self._of_tokens[page]", "self._of_tokens[0 * page]"),
    Bug(
        "a preempted sequence keeps the keys it came with",
        SLOTS,
        "prefix, sequence.prefix_keys = sequence.prefix_keys, None",
        "prefix = sequence.prefix_keys",
        only_slow=True,
    ),
    Bug("a lost cache keeps its keys", POOL, "self.index.clear()", "pass"),
    Bug(
        "a lost cache is not forgotten",
        POOL,
        "        pages = self._evictable()\n        self._add_blank",
        "        return\n        pages = self._evictable()\n        self._add_blank",
    ),
    Bug(
        "the head of a prefix is evicted first",
        POOL,
        "self._make_evictable(idle[cached][::-1], is_spare)",
        "self._make_evictable(idle[cached], is_spare)",
        only_slow=True,
    ),
    Bug(
        "released pages go ahead of those that wait",
        POOL,
        "        (self._spare if is_spare else self._queue).push(blocks)\n",
        "        queue = self._spare if is_spare else self._queue\n"
        "        later = queue.blocks()\n"
        "        queue.clear()\n"
        "        queue.push(blocks)\n"
        "        queue.push(later)\n",
        only_slow=True,
    ),
)
