"""Keys of full pages, which make the pages of equal prefixes equal."""

from __future__ import annotations

import os
from hashlib import blake2b, shake_256
from typing import NamedTuple

import numpy as np

from jaxserve.settings.secret_files import SECRET_BYTES

LANES = 4
# A key is two words: u64[WORDS].
WORDS = 2
# Label of the derivation of the hash's numbers. A changed derivation needs a new version.
_LABEL = b"jaxserve page keys, version 1"


class PrefixKeys(NamedTuple):
    """The keys of the full pages of a sequence, and the hash state from which later keys follow."""

    keys: np.ndarray  # u64[pages, WORDS]
    state: np.ndarray  # u64[LANES], after the last page


class PageKeys:
    """A keyed hash of token prefixes that gives each full page of a sequence a key.

    The key of a page covers all tokens up to its end and the cache salt. Equal tokens behind a
    different prefix, whose KV differs, have a different key.

    It is a multilinear hash of four lanes. Each lane starts from a random number and adds each
    token times the random number of the token's position, modulo 2**64. The key consists of the
    upper halves of the lanes. The family is strongly universal (Lemire and Kaser, "Strongly
    universal string hashing is fast", The Computer Journal 2014): two prefixes share a key with
    probability 2**-128. A sum extends page by page. A whole prompt takes a few array operations,
    whereas a digest per page would take a microsecond each.

    The random numbers are the output of SHAKE-256 (FIPS 202) for a secret. Secret and numbers stay
    in the process, so an attacker cannot search for prefixes that share a key. Engines with the
    same secret and page size give equal prefixes equal keys, for any `max_tokens`. The model is not
    an input: a component that shares pages between engines must identify the model itself.

    Args:
        max_tokens: the most tokens of a sequence.
        page_size: number of tokens per page.
        secret: at least SECRET_BYTES bytes, or None for a random secret of this process.
    """

    def __init__(self, max_tokens: int, page_size: int, secret: bytes | None = None) -> None:
        self._page_size = page_size
        # Number of the weights. Prefixes under different weights have different keys.
        self.serial = 0
        pages = -(-max_tokens // page_size)
        fixed = LANES * LANES + LANES
        secret = os.urandom(SECRET_BYTES) if secret is None else secret
        numbers = _numbers(secret, page_size, fixed + pages * LANES * page_size)
        self._start, self._of_salt = numbers[:LANES], numbers[LANES:fixed].reshape(LANES, LANES)
        # Last, and page by page, so that the numbers of earlier pages do not depend on max_tokens.
        self._of_tokens = numbers[fixed:].reshape(pages, LANES, page_size)

    def prefix(self, salt: str, tokens: np.ndarray) -> PrefixKeys:
        """Return the keys of all full pages of a token sequence, and the hash state after them.

        Args:
            salt: the cache salt, which separates equal prefixes. Empty for none.
            tokens: i32[n], the tokens from the start of the sequence.
        """
        start = self._start
        if salt or self.serial:
            label = f"{salt}\0{self.serial}" if self.serial else salt
            words = np.frombuffer(blake2b(label.encode(), digest_size=16).digest(), "<u4")
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
        """Compute the key of the next page of each of n sequences.

        Args:
            states: u64[n, LANES], the hash states after the preceding pages.
            page: i32[n], the index of the next page within its sequence.
            tokens: i32[n, page_size], the tokens of the next page.

        Returns:
            The keys, u64[n, WORDS], and the hash states after the pages, u64[n, LANES].
        """
        states = states + _sums(self._of_tokens[page], tokens)
        return _keys(states), states


def _numbers(secret: bytes, page_size: int, count: int) -> np.ndarray:
    # A larger count begins with the same numbers.
    source = shake_256(_LABEL + page_size.to_bytes(4, "little") + secret)
    return np.frombuffer(source.digest(8 * count), "<u8").astype(np.uint64, copy=False)


def _sums(factors: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    # Token ids are incremented by one. Otherwise token 0 would add zero, and pages of it would
    # share a key.
    return np.einsum("nls,ns->nl", factors, tokens.astype(np.uint64) + np.uint64(1))


def _keys(states: np.ndarray) -> np.ndarray:
    return (states >> np.uint64(32)).astype(np.uint32).view(np.uint64)
