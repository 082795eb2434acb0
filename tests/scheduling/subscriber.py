"""A subscriber of events, which knows the prefix cache from its events only."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from jaxserve.engine.kv_events import block_hashes, events_of
from jaxserve.scheduling.page_index import Change
from jaxserve.scheduling.page_keys import PageKeys
from jaxserve.scheduling.page_pool import PagePool


class Subscriber:
    """A map of the cache's pages, built from events as they arrive in msgpack.

    Attributes:
        held: hashes of the pages that can be found.
        prefixes: salt and tokens up to the end of every page that was ever stored.
    """

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.prefixes: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._hash_of: dict[bytes, int] = {}

    def receive(self, event: dict[str, Any]) -> None:
        """Take an event, as msgpack has it."""
        kind, hashes = event["type"], event.get("block_hashes", [])
        if kind == "AllBlocksCleared":
            self.held.clear()
        elif kind == "BlockRemoved":
            assert self.held.issuperset(hashes), "removed, and was not there"
            self.held.difference_update(hashes)
        else:
            assert kind == "BlockStored"
            assert not self.held.intersection(hashes), "stored twice"
            assert len(set(hashes)) == len(hashes)
            self.held.update(hashes)
            self._note(event)

    def _note(self, event: dict[str, Any]) -> None:
        parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
        assert len(tokens) == size * len(event["block_hashes"]) == size * len(event["extra_keys"])
        extra = event["extra_keys"]
        if parent is None:
            salt, before = (extra[0] or ("",))[0], ()
        else:
            salt, before = self.prefixes[parent]
        assert extra[0] == ([salt] if salt and parent is None else None)
        assert extra[1:] == [None] * (len(extra) - 1), "a salt is that of a first page"
        for i, name in enumerate(event["block_hashes"]):
            before = (*before, *tokens[i * size : (i + 1) * size])
            assert self.prefixes.setdefault(name, (salt, before)) == (salt, before)

    def take(self, change: Change, block_size: int) -> None:
        """Take a change as it happens, by way of its bytes."""
        for event in events_of(change, block_size, None):
            self.receive(msgspec.msgpack.decode(msgspec.msgpack.encode(event)))

    def check(self, pool: PagePool, keys: PageKeys) -> None:
        """Compare with the pool's index, and the pages' recorded tokens with their keys."""
        found = set()
        for key in pool.index.keys(pool.cached()):
            data = key.tobytes()
            if data not in self._hash_of:
                [name] = block_hashes(key[None])
                salt, tokens = self.prefixes[name]
                own = keys.prefix(salt, np.array(tokens, np.int32)).keys
                assert np.array_equal(own[-1], key), "the tokens of an event are not its page's"
                self._hash_of[data] = name
            found.add(self._hash_of[data])
        assert self.held == found, "a subscriber's map differs from the pool's index"
