"""Shares: in-memory entries by owner, with limits such that owners do not evict each other's
entries.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

Owner = str | None


class Entry(Protocol):
    """Interface of objects in `Shares`: owner, start of the age, and whether they must stay."""

    owner: Owner  # API key of the client, or None if the server has no keys

    @property
    def since(self) -> float: ...  # start of its age on the monotonic clock

    # True if the entry must not be evicted, since its content is not complete.
    @property
    def is_running(self) -> bool: ...


E = TypeVar("E", bound=Entry)


def over_share(sizes: Mapping[Owner, int], most: int) -> list[Owner]:
    """Return the owners that hold more than an equal share of a limit, the largest holder first.

    Args:
        sizes: number or bytes that each owner holds.
        most: limit on the total. The result is empty while the total is within it.
    """
    if sum(sizes.values()) <= most:
        return []
    over = (owner for owner in sizes if sizes[owner] * len(sizes) > most)
    return sorted(over, key=lambda owner: -sizes[owner])


class Shares(Generic[E]):
    """Objects in memory by owner and id, limited in number, bytes and age.

    If a limit is exceeded, the oldest entry of the largest holder is evicted. An owner within an
    equal share of a limit does not lose entries to others. Subclasses add and remove entries.

    Args:
        most: maximum number of entries.
        most_bytes: maximum number of bytes of all entries, as counted with `count`.
        seconds: age after which an entry is evicted.
    """

    def __init__(self, most: int, most_bytes: int, seconds: float) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self._seconds = seconds
        self._entries: dict[Owner, dict[str, E]] = {}
        self._bytes: Counter[Owner] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def num_bytes(self) -> int:
        """Estimated memory of all entries of all owners, in bytes."""
        return self._bytes.total()

    def entry(self, owner: Owner, name: str) -> E | None:
        """Return the entry of an owner with the id `name`, or None if there is none."""
        return self._entries.get(owner, {}).get(name)

    def put(self, name: str, entry: E) -> None:
        """Add an entry under the id `name` as its owner's newest. Its bytes are not counted."""
        self._entries.setdefault(entry.owner, {})[name] = entry

    def pop(self, owner: Owner, name: str) -> E | None:
        """Remove and return the entry of an owner with the id `name`, or return None.

        Its bytes stay counted.
        """
        entries = self._entries.get(owner, {})
        entry = entries.pop(name, None)
        if not entries:
            self._entries.pop(owner, None)
        return entry

    def count(self, owner: Owner, num_bytes: int) -> None:
        """Add `num_bytes`, which may be negative, to the number of bytes that an owner holds."""
        self._bytes[owner] += num_bytes
        if not self._bytes[owner]:
            del self._bytes[owner]

    def leaving(self) -> Iterator[E]:
        """Yield the entries to evict, until the limits are met.

        The caller must remove each entry, and subtract its bytes, before it requests the next.
        """
        while (entry := self._next()) is not None:
            yield entry

    def _next(self) -> E | None:
        limit = time.monotonic() - self._seconds
        oldest: dict[Owner, E] = {}
        for owner, entries in self._entries.items():
            entry = next((entry for entry in entries.values() if not entry.is_running), None)
            if entry is not None:
                if entry.since < limit:
                    return entry
                oldest[owner] = entry
        numbers = {owner: len(entries) for owner, entries in self._entries.items()}
        over = over_share(numbers, self.most) + over_share(self._bytes, self.most_bytes)
        return next((oldest[owner] for owner in over if owner in oldest), None)
