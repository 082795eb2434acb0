"""ConversationStore: conversations in memory, to which clients and responses add items."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.kept.shares import Shares
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.response_items import ConversationObject, InputItem, shown_items

# Estimated bytes of a conversation and of an item, in addition to their text.
OVERHEAD_BYTES, ITEM_BYTES = 1024, 256
MAX_ITEMS = 4096
_item = msgspec.json.Decoder(InputItem)
_metadata_bytes = msgspec.json.encode


class Conversation:
    """Conversation of the API in memory: an ordered set of items, and metadata of the client.

    Responses in the conversation add their input and output items.

    Attributes:
        is_running: always False, for `Shares`

    Args:
        owner: digest of the client's API key, or None.
        metadata: keys and values of the client.
    """

    is_running = False

    def __init__(self, owner: str | None, metadata: dict[str, str]) -> None:
        self.owner = owner
        # The conversation as clients see it.
        self.shown = ConversationObject(f"conv_{uuid4().hex}", int(time.time()), metadata)
        self.since = time.monotonic()  # time of the last change on the monotonic clock
        self.num_item_bytes = 0
        self.counted = 0  # bytes that the store has counted for it
        self._items: dict[str, bytes] = {}

    @property
    def num_bytes(self) -> int:
        """Estimated memory of the conversation in bytes."""
        overhead = OVERHEAD_BYTES + len(self._items) * ITEM_BYTES
        return self.num_item_bytes + len(_metadata_bytes(self.shown.metadata)) + overhead

    def add(self, items: Iterable[dict[str, Any]]) -> None:
        """Append items, given as JSON objects with ids, to the conversation."""
        for item in items:
            self._items[item["id"]] = text = msgspec.json.encode(item)
            self.num_item_bytes += len(text)

    def show_new(self, items: Iterable[InputItem]) -> list[dict[str, Any]]:
        """Return new items as JSON objects, each with an id that is unique in the conversation.

        The items are not added.

        Raises:
            InvalidRequest: the conversation would have too many items.
        """
        shown = shown_items(items, self._items)
        if len(self._items) + len(shown) > MAX_ITEMS:
            raise InvalidRequest(f"a conversation holds at most {MAX_ITEMS} items", "items")
        return shown

    def remove(self, item_id: str) -> None:
        """Remove the item with this id from the conversation.

        Raises:
            ApiError: 404, there is no such item.
        """
        self.item(item_id)
        self.num_item_bytes -= len(self._items.pop(item_id))

    def item(self, item_id: str) -> dict[str, Any]:
        """Return the item with this id as a JSON object.

        Raises:
            ApiError: 404, there is no such item.
        """
        if item_id not in self._items:
            message = f"Item with id {item_id[:60]!r} not found in the conversation."
            raise ApiError(404, message, "item_id", "not_found")
        return msgspec.json.decode(self._items[item_id])

    @property
    def item_ids(self) -> list[str]:
        """Ids of the conversation's items, in the order of their addition."""
        return list(self._items)

    def input_items(self) -> list[InputItem]:
        """Return the conversation's items as `InputItem` objects, the first added item first."""
        return [_item.decode(text) for text in self._items.values()]


class ConversationStore(Shares[Conversation]):
    """Conversations in memory by owner and id, limited in number, bytes and age.

    The age counts from the last change. `Shares` defines the order of eviction. A conversation that
    is larger than the limit on bytes is not stored, and does not evict others.

    Args:
        most: maximum number of conversations, 0 to disable the store.
        most_bytes: maximum estimated memory of all conversations in bytes.
        seconds: time without a change after which a conversation is evicted.
    """

    def keep(self, conversation: Conversation) -> None:
        """Store a conversation that is new or has changed, and evict others beyond the limits.

        A conversation larger than the limit on bytes is removed instead.

        Raises:
            ApiError: 400, the server does not store conversations.
        """
        if not self.most:
            message = "this server keeps no conversations: see --max-stored-responses"
            raise ApiError(400, message, code="not_supported")
        self.forget(conversation)
        conversation.since, size = time.monotonic(), conversation.num_bytes
        if size > self.most_bytes:
            return
        self.put(conversation.shown.id, conversation)
        conversation.counted = size
        self.count(conversation.owner, size)
        self._trim()

    def extend(self, conversation: Conversation, items: Iterable[dict[str, Any]]) -> None:
        """Append items to a conversation, unless it was evicted or deleted in the meantime.

        The items are JSON objects with ids.
        """
        if self.entry(conversation.owner, conversation.shown.id) is conversation:
            conversation.add(items)
            self.keep(conversation)

    def get(self, name: str, owner: str | None, parameter: str = "conversation_id") -> Conversation:
        """Return the conversation with the id `name` that belongs to an owner.

        Args:
            owner: digest of the client's API key, or None.
            parameter: name of the request's field or argument with the id, for the error.

        Raises:
            ApiError: 404, this client has no such conversation.
        """
        self._trim()
        conversation = self.entry(owner, name)
        if conversation is None:
            message = f"Conversation with id {name[:60]!r} not found."
            raise ApiError(404, message, parameter, "not_found")
        return conversation

    def forget(self, conversation: Conversation) -> None:
        """Remove a conversation from the store, if it is stored."""
        if self.pop(conversation.owner, conversation.shown.id) is not None:
            self.count(conversation.owner, -conversation.counted)

    def _trim(self) -> None:
        for conversation in self.leaving():
            self.forget(conversation)
