"""Shares: entries in memory by owner, bounded so that no owner evicts entries of others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

Owner = str | None


class Entry(Protocol):
    """An entry that may leave.

    Attributes:
        owner: the key of its client; None where the server requires none.
        since: the start of its age, on the monotonic clock.
        is_running: whether it must stay, because its content is still to come.
    """

    owner: Owner

    @property
    def since(self) -> float: ...

    @property
    def is_running(self) -> bool: ...


E = TypeVar("E", bound=Entry)


def over_share(held: Mapping[Owner, int], most: int) -> list[Owner]:
    """Return the owners that hold more than an equal part of a limit, the largest holder first.

    Args:
        held: the size that each owner holds.
        most: limit of all together; no owner is over its part while it is kept.
    """
    if sum(held.values()) <= most:
        return []
    over = (owner for owner in held if held[owner] * len(held) > most)
    return sorted(over, key=lambda owner: -held[owner])


class Shares(Generic[E]):
    """Entries by owner and id, bounded by number, bytes and age.

    Over a limit, the oldest entry of the owner that holds most leaves next. An owner that holds at
    most an equal part of a limit loses no entry to the others.

    Args:
        most: entries.
        most_bytes: bytes of all entries.
        seconds: age of an entry that leaves.
    """

    def __init__(self, most: int, most_bytes: int, seconds: float) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._entries: dict[Owner, dict[str, E]] = {}
        self._bytes: Counter[Owner] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all owners."""
        return self._bytes.total()

    def get(self, owner: Owner, name: str) -> E | None:
        """Return an owner's entry of an id, if there is one."""
        return self._entries.get(owner, {}).get(name)

    def put(self, name: str, entry: E) -> None:
        """Keep an entry as its owner's newest."""
        self._entries.setdefault(entry.owner, {})[name] = entry

    def pop(self, owner: Owner, name: str) -> E | None:
        """Remove an owner's entry of an id, if there is one."""
        own = self._entries.get(owner, {})
        entry = own.pop(name, None)
        if not own:
            self._entries.pop(owner, None)
        return entry

    def count(self, owner: Owner, num_bytes: int) -> None:
        """Add to the bytes that an owner holds."""
        self._bytes[owner] += num_bytes
        if not self._bytes[owner]:
            del self._bytes[owner]

    def leaving(self) -> Iterator[E]:
        """Yield the entries that must leave, each to be removed before the next is requested."""
        while (entry := self._next()) is not None:
            yield entry

    def _next(self) -> E | None:
        limit = time.monotonic() - self._seconds
        oldest: dict[Owner, E] = {}
        for owner, own in self._entries.items():
            entry = next((entry for entry in own.values() if not entry.is_running), None)
            if entry is not None:
                if entry.since < limit:
                    return entry
                oldest[owner] = entry
        numbers = {owner: len(own) for owner, own in self._entries.items()}
        over = over_share(numbers, self._most) + over_share(self._bytes, self._most_bytes)
        return next((oldest[owner] for owner in over if owner in oldest), None)
