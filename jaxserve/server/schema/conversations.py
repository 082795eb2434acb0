"""Schemas of OpenAI's conversations endpoints."""

from __future__ import annotations

import msgspec

from jaxserve.server.schema.response_items import InputItem


class ConversationRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/conversations."""

    items: list[InputItem] | None = None
    metadata: dict[str, str] | None = None


class ConversationUpdate(msgspec.Struct, kw_only=True):
    """Body of POST /v1/conversations/{conversation_id}."""

    metadata: dict[str, str]


class ConversationItems(msgspec.Struct, kw_only=True):
    """Body of POST /v1/conversations/{conversation_id}/items."""

    items: list[InputItem]


class ConversationName(msgspec.Struct):
    """Reference to a conversation in a response."""

    id: str


class ConversationObject(msgspec.Struct):
    """Conversation as clients see it."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


class DeletedConversation(msgspec.Struct):
    """Answer of DELETE /v1/conversations/{conversation_id}."""

    id: str
    object: str = "conversation.deleted"
    deleted: bool = True
