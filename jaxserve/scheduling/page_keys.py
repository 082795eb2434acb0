"""Keys of full pages, by which equal prefixes find each other's pages."""

from __future__ import annotations

import os
from hashlib import blake2b, shake_256
from typing import NamedTuple

import numpy as np

from jaxserve.settings.secret_files import SECRET_BYTES

LANES = 4
# A key is two words: u64[WORDS].
WORDS = 2
# What the numbers are derived under; another derivation takes another version.
_LABEL = b"jaxserve page keys, version 1"


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
    probability 2**-128. A sum extends page by page, and a whole prompt is a handful of array
    operations, where a digest a page would cost a microsecond each.

    The numbers are the output of SHAKE-256 (FIPS 202) for a secret, by default 32 bytes of the
    system's randomness. Neither leaves the process, so nobody can search for prefixes that share a
    key. Engines of one secret give equal prefixes equal keys, whatever their longest sequence. The
    page size enters, since pages of 16 and of 32 tokens hold different content for one prefix. The
    model does not: its files have other paths on other machines, and keys only ever find pages of
    the engine that made them. Whatever shares pages between engines has to name the model itself.

    Args:
        max_tokens: longest sequence.
        page_size: tokens of a page.
        secret: at least SECRET_BYTES; None for one that no other process has.
    """

    def __init__(self, max_tokens: int, page_size: int, secret: bytes | None = None) -> None:
        self._page_size = page_size
        pages = -(-max_tokens // page_size)
        fixed = LANES * LANES + LANES
        secret = os.urandom(SECRET_BYTES) if secret is None else secret
        numbers = _numbers(secret, page_size, fixed + pages * LANES * page_size)
        self._start, self._of_salt = numbers[:LANES], numbers[LANES:fixed].reshape(LANES, LANES)
        # Last, and page by page: a longer sequence changes none of those before.
        self._of_tokens = numbers[fixed:].reshape(pages, LANES, page_size)

    def prefix(self, salt: str, tokens: np.ndarray) -> PrefixKeys:
        """Return the keys of all full pages of a sequence; tokens: i32[n]."""
        start = self._start
        if salt:
            words = np.frombuffer(blake2b(salt.encode(), digest_size=16).digest(), "<u4")
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


def _numbers(secret: bytes, page_size: int, count: int) -> np.ndarray:
    """Return u64[count], derived from a secret; a larger count begins with the same numbers."""
    source = shake_256(_LABEL + page_size.to_bytes(4, "little") + secret)
    return np.frombuffer(source.digest(8 * count), "<u8").astype(np.uint64, copy=False)


def _sums(factors: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Sum factors u64[n, LANES, S] times tokens i32[n, S], modulo 2**64; return u64[n, LANES].

    Tokens count from one: otherwise pages of token 0 would add nothing, and share a key.
    """
    return np.einsum("nls,ns->nl", factors, tokens.astype(np.uint64) + np.uint64(1))


def _keys(states: np.ndarray) -> np.ndarray:
    return (states >> np.uint64(32)).astype(np.uint32).view(np.uint64)
