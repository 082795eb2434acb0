"""Endpoints of OpenAI's conversations: create, change, list and delete them and their items."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.query import Query
from jaxserve.server.api.streaming import json_response
from jaxserve.server.kept.conversation_store import Conversation, ConversationStore
from jaxserve.server.schema import response_items, response_tools
from jaxserve.server.schema.responses import check_metadata, check_served

# OpenAI's limit of the items of one request.
MAX_ADDED = 20


def _store(request: Request) -> ConversationStore:
    return request.app.state.served.conversations


def _conversation(request: Request) -> Conversation:
    owner: str | None = request.scope["jaxserve.key"]
    return _store(request).get(request.path_params["conversation_id"], owner)


def _add(
    request: EndpointRequest, conversation: Conversation, items: list[response_items.InputItem]
) -> list[dict[str, Any]]:
    """Add a client's items to a conversation, and return them as JSON objects with ids.

    Raises:
        InvalidRequest: there are too many items, one is not served, or the conversation is too
            large.
    """
    if len(items) > MAX_ADDED:
        raise InvalidRequest(f"items takes at most {MAX_ADDED} items at once", "items")
    check_served(items, "items")
    shown = conversation.show_new(items)
    most, body = request.config.max_body_bytes, request.num_bytes
    if conversation.num_item_bytes + body > most:
        raise InvalidRequest(f"items: the conversation takes more than {most} bytes", "items")
    conversation.add(shown)
    return shown


async def create_conversation(http_request: Request) -> Response:
    """Endpoint `POST /v1/conversations`: create a conversation, and answer with its object.

    The conversation may begin with items and metadata from the request.
    """
    request = EndpointRequest(http_request)
    body = request.parse(response_items.ConversationRequest, prepare=response_tools.strip_hosted)
    check_metadata(body.metadata)
    conversation = Conversation(http_request.scope["jaxserve.key"], body.metadata or {})
    _add(request, conversation, body.items or [])
    _store(http_request).keep(conversation)
    return json_response(conversation.shown)


async def get_conversation(http_request: Request) -> Response:
    """Endpoint `GET /v1/conversations/{conversation_id}`: answer with the conversation object."""
    return json_response(_conversation(http_request).shown)


async def update_conversation(http_request: Request) -> Response:
    """Endpoint `POST /v1/conversations/{conversation_id}`: replace a conversation's metadata.

    The answer is the conversation object.
    """
    body = EndpointRequest(http_request).parse(response_items.ConversationUpdate)
    check_metadata(body.metadata)
    conversation = _conversation(http_request)
    conversation.shown.metadata = body.metadata
    _store(http_request).keep(conversation)
    return json_response(conversation.shown)


async def delete_conversation(http_request: Request) -> Response:
    """Endpoint `DELETE /v1/conversations/{conversation_id}`: delete a conversation.

    Its items are deleted too.
    """
    conversation = _conversation(http_request)
    _store(http_request).forget(conversation)
    return json_response(response_items.DeletedConversation(conversation.shown.id))


async def add_items(http_request: Request) -> Response:
    """Endpoint `POST /v1/conversations/{conversation_id}/items`: add items to a conversation.

    The answer lists the new items.
    """
    request = EndpointRequest(http_request)
    body = request.parse(response_items.ConversationItems, prepare=response_tools.strip_hosted)
    conversation = _conversation(http_request)
    if not body.items:
        raise InvalidRequest("items is empty", "items")
    shown = _add(request, conversation, body.items)
    _store(http_request).keep(conversation)
    return json_response(response_items.InputItems(shown, shown[0]["id"], shown[-1]["id"], False))


async def list_items(http_request: Request) -> Response:
    """Endpoint `GET /v1/conversations/{conversation_id}/items`: answer with a page of the items.

    The newest item comes first by default.
    """
    conversation = _conversation(http_request)
    page = Query(http_request).page(conversation.item_ids, lambda name: name, "desc")
    return json_response(
        response_items.InputItems([conversation.item(name) for name in page[0]], *page[1:])
    )


async def get_item(http_request: Request) -> Response:
    """Endpoint `GET /v1/conversations/{conversation_id}/items/{item_id}`: answer with an item."""
    return json_response(_conversation(http_request).item(http_request.path_params["item_id"]))


async def delete_item(http_request: Request) -> Response:
    """Endpoint `DELETE /v1/conversations/{conversation_id}/items/{item_id}`: delete an item.

    The answer is the conversation object.
    """
    conversation = _conversation(http_request)
    conversation.remove(http_request.path_params["item_id"])
    _store(http_request).keep(conversation)
    return json_response(conversation.shown)
