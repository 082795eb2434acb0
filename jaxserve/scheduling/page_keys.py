"""Keys of full pages, by which equal prefixes find each other's pages."""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

LANES = 4
# A key is two words: u64[WORDS].
WORDS = 2


class PrefixKeys(NamedTuple):
    """Keys of a sequence's first full pages, and what extends them."""

    keys: np.ndarray  # u64[pages, WORDS]
    state: np.ndarray  # u64[LANES], after the last of those pages


class PageKeys:
    """The maker of keys for full pages of sequences.

    A page's key stands for all tokens up to its end and for the cache salt, not for its own
    tokens alone: equal tokens under another prefix, whose KV differs, have another key.

    It is a multilinear hash. Each of four lanes starts from a random number and adds, for every
    token, that token times its position's random number, modulo 2**64; the key is the high
    halves of the lanes. The family is strongly universal (Lemire and Kaser, "Strongly universal
    string hashing is fast", The Computer Journal 2014): two given prefixes share a key with
    probability 2**-128. The numbers come from the system's randomness and stay in the process, so
    nobody can search for two that do. A sum extends page by page, and a whole prompt is a
    handful of array operations, where a digest a page would cost a microsecond each.

    Args:
        max_tokens: longest sequence.
        page_size: tokens of a page.
    """

    def __init__(self, max_tokens: int, page_size: int) -> None:
        self._page_size = page_size
        pages = -(-max_tokens // page_size)
        self._of_tokens = _random(pages, LANES, page_size)
        self._of_salt = _random(LANES, LANES)
        self._start = _random(LANES)

    def prefix(self, salt: str, tokens: np.ndarray) -> PrefixKeys:
        """Return the keys of all full pages of a sequence; tokens: i32[n]."""
        start = self._start
        if salt:
            words = np.frombuffer(blake2b(salt.encode(), digest_size=16).digest(), np.uint32)
            start = start + (self._of_salt * words).sum(axis=1)
        pages = len(tokens) // self._page_size
        if not pages:
            return PrefixKeys(np.zeros((0, WORDS), np.uint64), start)
        rows = tokens[: pages * self._page_size].reshape(pages, self._page_size)
        states = _sums(self._of_tokens[:pages], rows)
        np.add.accumulate(states, axis=0, out=states)
        states += start
        return PrefixKeys(_keys(states), states[-1])

    def extend(
        self, states: np.ndarray, page: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add one page to each of several sequences; return their keys, u64[n, WORDS], and states.

        Args:
            states: u64[n, LANES], after the pages before.
            page: i32[n], the number of the page within its sequence.
            tokens: i32[n, page_size], its tokens.
        """
        states = states + _sums(self._of_tokens[page], tokens)
        return _keys(states), states


def _random(*shape: int) -> np.ndarray:
    """Return u64 of this shape, from the system's randomness."""
    return np.frombuffer(os.urandom(8 * int(np.prod(shape))), np.uint64).reshape(shape)


def _sums(factors: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Sum factors u64[n, LANES, S] times tokens i32[n, S], modulo 2**64; return u64[n, LANES].

    Tokens count from one: otherwise pages of token 0 would add nothing, and share a key.
    """
    return np.einsum("nls,ns->nl", factors, tokens.astype(np.uint64) + np.uint64(1))


def _keys(states: np.ndarray) -> np.ndarray:
    return (states >> np.uint64(32)).astype(np.uint32).view(np.uint64)
