"""Changes of the prefix cache, from which KV events are made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class StoredPages(NamedTuple):
    """Pages that were added to the prefix cache. The pages of a sequence are adjacent.

    Attributes:
        keys: u64[n, WORDS].
        slots: intp[n], the slot of each page's sequence.
        nth: i32[n], the number of each page within its sequence.
        parents: u64[n, WORDS], the keys of the preceding pages, which may not be in the cache.
            Undefined where `nth` is 0.
        tokens: i32[n, page_size].
        salts: the cache salts of the pages whose `nth` is 0, in order.
    """

    keys: np.ndarray
    slots: np.ndarray
    nth: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray
    salts: list[str]


class RemovedPages(NamedTuple):
    """Pages that were evicted from the prefix cache, as keys u64[n, WORDS]."""

    keys: np.ndarray


class ClearedPages(NamedTuple):
    """All pages were removed from the prefix cache."""


Change = StoredPages | RemovedPages | ClearedPages
