"""ConversationStore: conversations in memory, to which clients and responses add items."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.kept.shares import Shares
from jaxserve.server.schema.conversations import ConversationObject
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.response_items import InputItem, shown_items

# Bytes of a conversation, and of an item, besides their texts.
OVERHEAD_BYTES, ITEM_BYTES = 1024, 256
MAX_ITEMS = 4096
_item = msgspec.json.Decoder(InputItem)
_metadata_bytes = msgspec.json.encode


class Conversation:
    """Items in their order, to which each response in the conversation adds its own.

    Args:
        owner: the key of its client; None where the server requires none.
        metadata: of its client's choice.

    Attributes:
        shown: what clients see of it.
        since: when it was made or last changed, on the monotonic clock.
        num_item_bytes: size of its items.
        is_running: always False; see `Shares`.
        counted: bytes that the store counts for it.
    """

    is_running = False

    def __init__(self, owner: str | None, metadata: dict[str, str]) -> None:
        self.owner = owner
        self.shown = ConversationObject(f"conv_{uuid4().hex}", int(time.time()), metadata)
        self.since = time.monotonic()
        self.num_item_bytes = 0
        self.counted = 0
        self._items: dict[str, bytes] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        overhead = OVERHEAD_BYTES + len(self._items) * ITEM_BYTES
        return self.num_item_bytes + len(_metadata_bytes(self.shown.metadata)) + overhead

    def add(self, items: Iterable[dict[str, Any]]) -> None:
        """Add items, as they are listed."""
        for item in items:
            self._items[item["id"]] = text = msgspec.json.encode(item)
            self.num_item_bytes += len(text)

    def show_new(self, items: Iterable[InputItem]) -> list[dict[str, Any]]:
        """Return items as they will be listed, each with an id that no other has.

        Raises:
            InvalidRequest: the conversation would hold too many.
        """
        shown = shown_items(items, self._items)
        if len(self._items) + len(shown) > MAX_ITEMS:
            raise InvalidRequest(f"a conversation holds at most {MAX_ITEMS} items", "items")
        return shown

    def remove(self, item_id: str) -> None:
        """Remove an item.

        Raises:
            ApiError: 404, there is none.
        """
        self.item(item_id)
        self.num_item_bytes -= len(self._items.pop(item_id))

    def item(self, item_id: str) -> dict[str, Any]:
        """Return an item as it is listed.

        Raises:
            ApiError: 404, there is none.
        """
        if item_id not in self._items:
            message = f"Item with id {item_id[:60]!r} not found in the conversation."
            raise ApiError(404, message, "item_id", "not_found")
        return msgspec.json.decode(self._items[item_id])

    @property
    def item_ids(self) -> list[str]:
        """Ids of the items, the oldest first."""
        return list(self._items)

    def input_items(self) -> list[InputItem]:
        """Return the items as inputs of a response."""
        return [_item.decode(text) for text in self._items.values()]


class ConversationStore:
    """Conversations by id, bounded by number, bytes and age; see `Shares` for the next to leave.

    The age of a conversation begins with its newest change. One that alone is larger than all that
    may be kept leaves alone.

    Args:
        most: conversations; 0 keeps none.
        most_bytes: of all that is kept.
        seconds: time without a change after which a conversation leaves.
    """

    def __init__(self, most: int, most_bytes: int, seconds: float) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: Shares[Conversation] = Shares(most, most_bytes, seconds)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory that all of them take."""
        return self._kept.num_bytes

    def keep(self, conversation: Conversation) -> None:
        """Keep a conversation that is new or has changed.

        Raises:
            ApiError: 400, the server keeps none.
        """
        if not self._most:
            message = "this server keeps no conversations: see --max-stored-responses"
            raise ApiError(400, message, code="not_supported")
        self.forget(conversation)
        conversation.since, size = time.monotonic(), conversation.num_bytes
        if size > self._most_bytes:
            return
        self._kept.put(conversation.shown.id, conversation)
        conversation.counted = size
        self._kept.count(conversation.owner, size)
        self._trim()

    def extend(self, conversation: Conversation, items: Iterable[dict[str, Any]]) -> None:
        """Add items to a conversation, unless it has left or was deleted meanwhile."""
        if self._kept.get(conversation.owner, conversation.shown.id) is conversation:
            conversation.add(items)
            self.keep(conversation)

    def get(self, name: str, owner: str | None, parameter: str = "conversation_id") -> Conversation:
        """Return the conversation of an id.

        Raises:
            ApiError: 404, there is none that this client may see.
        """
        self._trim()
        found = self._kept.get(owner, name)
        if found is None:
            message = f"Conversation with id {name[:60]!r} not found."
            raise ApiError(404, message, parameter, "not_found")
        return found

    def forget(self, conversation: Conversation) -> None:
        """Forget a conversation, if it is there."""
        if self._kept.pop(conversation.owner, conversation.shown.id) is not None:
            self._kept.count(conversation.owner, -conversation.counted)

    def _trim(self) -> None:
        for conversation in self._kept.leaving():
            self.forget(conversation)
