"""Changes of the prefix cache, for those who keep account of what it holds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class StoredPages(NamedTuple):
    """Pages that were not found before and can be found by their keys now.

    Those of a sequence follow each other.

    Attributes:
        keys: u64[n, WORDS].
        slots: intp[n], what tells their sequences apart.
        nth: i32[n], the number of each page within its sequence.
        parents: u64[n, WORDS], keys of the pages before, which may not be found; without meaning
            where nth is 0.
        tokens: i32[n, page_size].
        salts: cache salts of the pages whose nth is 0, one after the other.
    """

    keys: np.ndarray
    slots: np.ndarray
    nth: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray
    salts: list[str]


class RemovedPages(NamedTuple):
    """Pages that are found no more; keys: u64[n, WORDS]."""

    keys: np.ndarray


class ClearedPages(NamedTuple):
    """Nothing is found any more."""


Change = StoredPages | RemovedPages | ClearedPages
