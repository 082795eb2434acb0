"""Changes of the prefix cache, from which KV events are made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class StoredPages(NamedTuple):
    """Pages that were added to the prefix cache. The pages of a sequence are adjacent."""

    keys: np.ndarray  # u64[n, WORDS]
    slots: np.ndarray  # intp[n], the slot of each page's sequence
    nth: np.ndarray  # i32[n], the number of each page within its sequence
    # u64[n, WORDS], the keys of the preceding pages, which may not be in the cache. Undefined where
    # `nth` is 0.
    parents: np.ndarray
    tokens: np.ndarray  # i32[n, page_size]
    salts: list[str]  # the cache salts of the pages whose `nth` is 0, in order


class RemovedPages(NamedTuple):
    """Pages that were evicted from the prefix cache, as keys u64[n, WORDS]."""

    keys: np.ndarray


class ClearedPages(NamedTuple):
    """All pages were removed from the prefix cache."""


Change = StoredPages | RemovedPages | ClearedPages
