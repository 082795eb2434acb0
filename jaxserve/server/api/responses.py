"""Endpoints that answer OpenAI's responses: translated to chats, and stored for later requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest, PromptTooLong
from jaxserve.server.api.chat import prepare
from jaxserve.server.api.conversations import template_ids
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.generation import Generation
from jaxserve.server.api.kept_responses import StoredStream, draw
from jaxserve.server.api.response_events import ResponsesFormatter
from jaxserve.server.api.streaming import JSON, encode, json_response, respond
from jaxserve.server.kept.conversation_store import Conversation, ConversationStore
from jaxserve.server.kept.response_store import ResponseStore, Turn
from jaxserve.server.schema import responses as schema
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.response_items import (
    InputItem,
    InputTokens,
    ResponsesResponse,
    shown_items,
)
from jaxserve.server.schema.response_tools import strip_hosted
from jaxserve.server.schema.sampling import NO_BOUND
from jaxserve.settings.compat import endpoint_fields

# Statuses of responses that another response can continue.
_ENDED = ("completed", "incomplete")
REFERENCE = "item_reference"
_CANCELLED = ApiError(400, "the response was cancelled", code="cancelled")


class _Input:
    """Input of a request to the responses API, with the conversation that it continues.

    References to stored items are replaced by the items.

    Args:
        request: the HTTP request, with the server's limits.
        body: body of the request.
        store: stored responses, of which the body may name one to continue.
        conversations: stored conversations, of which the body may name one instead.
        owner: digest of the client's API key, or None.

    Raises:
        ApiError: 404, there is no such response or conversation.
        InvalidRequest: a field is wrong, which the error names.
    """

    def __init__(
        self,
        request: EndpointRequest,
        body: schema.CountInputRequest,
        store: ResponseStore,
        conversations: ConversationStore,
        owner: str | None,
    ) -> None:
        name, before = "previous_response_id", body.previous_response_id
        self.parent: Turn | None = None  # the stored response that is continued, or None
        self.own = schema.items_of(body)  # the items of the input
        references = [item.id or "" for item in self.own if item.type == REFERENCE]
        if references:
            most = request.config.max_body_bytes
            stored = store.find_items(references, owner, most)
            self.own = [_resolved(item, stored) for item in self.own]
        # The items of the whole conversation, which end with the items of the input.
        self.items = self.own
        # The conversation that the request names, or None.
        self.conversation = self._join(conversations, body, owner, request.config.max_body_bytes)
        if before is None:
            return
        self.parent = store.get(before, owner, name)
        if self.parent.conversation is not None:
            raise InvalidRequest(
                f"{name}: the response is part of a conversation; continue that: "
                f'"conversation": "{self.parent.conversation}"',
                name,
            )
        if self.parent.status not in _ENDED:
            raise InvalidRequest(
                f"{name}: the response is {self.parent.status}; one that is completed or "
                "incomplete can be continued",
                name,
            )
        turns, most = self.parent.lineage(), request.config.max_body_bytes
        if sum(turn.num_item_bytes for turn in turns) > most:
            raise InvalidRequest(f"{name}: the conversation takes more than {most} bytes", name)
        self.items = [*(item for turn in turns for item in turn.own_items()), *self.own]

    def _join(
        self,
        store: ConversationStore,
        body: schema.CountInputRequest,
        owner: str | None,
        most: int,
    ) -> Conversation | None:
        """Return the conversation that a request names, and put its items before the input's items.

        Return None if the request names no conversation.

        Raises:
            ApiError: 404, there is no such conversation.
            InvalidRequest: the request also names a response, or the conversation has more than
                `most` bytes.
        """
        name, conversation = "conversation", schema.conversation_id(body)
        if conversation is None:
            return None
        if body.previous_response_id is not None:
            raise InvalidRequest(f"{name} and previous_response_id exclude each other", name)
        stored = store.get(conversation, owner, name)
        if stored.num_item_bytes > most:
            raise InvalidRequest(f"{name} takes more than {most} bytes", name)
        self.items = [*stored.input_items(), *self.own]
        return stored


def _resolved(item: InputItem, stored: Mapping[str, InputItem]) -> InputItem:
    if item.type != REFERENCE:
        return item
    name = item.id or ""
    if name not in stored:
        raise InvalidRequest(f"input: there is no item with id {name[:60]!r}", "input")
    return stored[name]


def _request(http_request: Request) -> EndpointRequest:
    request = EndpointRequest(http_request)
    request.renamed |= {"messages": "input", "max_tokens": "max_output_tokens"}
    request.renamed["logprobs"] = "top_logprobs"
    return request


def _input(
    http_request: Request,
    request: EndpointRequest,
    body: schema.CountInputRequest,
) -> _Input:
    served, owner = http_request.app.state.served, http_request.scope["jaxserve.key"]
    return _Input(request, body, served.responses, served.conversations, owner)


def _check(body: schema.ResponsesRequest, store: ResponseStore) -> None:
    schema.check_metadata(body.metadata)
    for name, or_none in (("max_tool_calls", ""), ("max_output_tokens", ", or -1 for no bound")):
        value = getattr(body, name)
        if value is not None and value < 1 and not (or_none and value == NO_BOUND):
            raise InvalidRequest(f"{name} must be at least 1{or_none}, got {value}", name)
    if not store.most:
        body.store = False
    if body.background and body.store is False:
        raise InvalidRequest(
            "background can only be used when `store` is true, and where the server keeps "
            "responses (--max-stored-responses, more than 0)",
            "background",
        )


async def responses(http_request: Request) -> Response:
    """Endpoint `POST /v1/responses`: answer an input with a response, and store the response.

    It is not stored if `store` is false. The answer is a response object, a stream of events with
    `stream`, or with `background` the queued response object, whose generation continues
    afterwards.
    """
    request, store = _request(http_request), http_request.app.state.served.responses
    body = request.parse(schema.ResponsesRequest, endpoint_fields("responses"), strip_hosted)
    # The engine's and the chat's, while the request's own are refused above.
    request.renamed |= {"prompt": "input", "response_format": "text"}
    if body.structured_outputs is None and body.json_schema is None:
        request.renamed["structured_outputs"] = "text"
    if http_request.scope.get("jaxserve.behind"):
        body.store = False  # the output file of a batch holds its answers
    _check(body, store)
    owner: str | None = http_request.scope["jaxserve.key"]
    source = _input(http_request, request, body)
    conversation = source.conversation
    added = [] if conversation is None else conversation.show_new(source.own)
    generation = await _prepare(request, body, source.items)
    tokenizer = generation.model.llm.get_tokenizer()
    loop, talks = asyncio.get_running_loop(), http_request.app.state.served.conversations

    def extend(response: ResponsesResponse) -> None:
        # Called on another thread if the answer has many log-probabilities.
        if conversation is not None:
            items = [*added, *msgspec.to_builtins(response.output)]
            loop.call_soon_threadsafe(talks.extend, conversation, items)

    if body.store is False:
        formatter = ResponsesFormatter(body, tokenizer, extend)
        return await respond(http_request, generation, formatter, bool(body.stream))

    def keep(response: ResponsesResponse) -> None:
        extend(response)
        turn.response, turn.status = encode(response), response.status
        turn.item_ids += [item.id for item in response.output]
        if not body.background:
            loop.call_soon_threadsafe(store.add, turn)

    formatter = ResponsesFormatter(body, tokenizer, keep)
    turn = Turn(formatter.id, owner, source.parent, added or shown_items(source.own), b"")
    turn.conversation = schema.conversation_id(body)
    if not body.background:
        return await respond(http_request, generation, formatter, bool(body.stream))
    generation.follow(http_request.headers, http_request.scope["jaxserve.request_id"])
    generation.__enter__()  # raises Overloaded if the queue is full; `draw` exits it
    turn.response, turn.status = encode(formatter.queued(generation)), "queued"
    turn.cancel = partial(generation.fail, _CANCELLED)
    if body.stream:
        turn.events = []
    queued = turn.response
    store.add(turn)
    task = asyncio.ensure_future(draw(generation, formatter, turn, store, dict(request.renamed)))
    turn.task = task
    if body.stream:
        return StoredStream(turn)
    return Response(queued, media_type=JSON)


async def _prepare(
    request: EndpointRequest, body: schema.ResponsesRequest, items: list[InputItem]
) -> Generation:
    """Return the generation for the items of a conversation, not yet started.

    With `truncation: auto`, the oldest turns are dropped if the conversation is too long. Messages
    of the system and of developers stay.

    Raises:
        ApiError, InvalidRequest, Overloaded: as `chat.prepare`.
    """
    try:
        return await prepare(request, schema.as_chat(body, items))
    except PromptTooLong as error:
        starts = [n for n, item in enumerate(items) if n and item.role == "user"]
        if body.truncation != "auto" or not starts:
            raise
        problem = error
    generation: Generation | None = None
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        instructions = [
            item for item in items[: starts[middle]] if item.role in ("system", "developer")
        ]
        try:
            generation = await prepare(
                request, schema.as_chat(body, [*instructions, *items[starts[middle] :]])
            )
            high = middle
        except PromptTooLong:
            low = middle + 1
    if generation is None:
        raise problem
    return generation


async def count_input_tokens(http_request: Request) -> Response:
    """Endpoint `POST /v1/responses/input_tokens`: answer with the number of tokens of an input.

    The input and the conversation that it continues are rendered by the chat template.
    """
    request = _request(http_request)
    body = request.parse(schema.CountInputRequest, endpoint_fields("responses"), strip_hosted)
    request.renamed |= {"prompt": "input", "response_format": "text"}
    source = _input(http_request, request, body)
    whole = schema.ResponsesRequest(**msgspec.structs.asdict(body))
    chat = schema.as_chat(whole, source.items)
    model = request.find_model(chat.model)
    return json_response(InputTokens(len(await template_ids(chat, model))))
