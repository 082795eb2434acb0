"""Endpoints POST /v1/messages and /v1/messages/count_tokens: Anthropic's, translated to a chat."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.api.chat import prepare
from jaxserve.server.api.conversations import as_template_messages, template_options
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.generation import Choice, Generation, Part
from jaxserve.server.api.streaming import event, json_response, respond
from jaxserve.server.schema.anthropic import (
    AnswerBlock,
    CountRequest,
    CountResponse,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    as_chat,
)
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.sampling import NO_FUNCTIONS, NO_GUIDED_FIELDS, NO_TEMPLATE_FIELDS
from jaxserve.server.tool_calls.pieces import CallPart, Message, Piece, Thought
from jaxserve.server.tool_calls.tools import check_tools, described

# Fields of these endpoints alone that are not supported, with their neutral values.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **NO_TEMPLATE_FIELDS,
    **NO_GUIDED_FIELDS,
    **NO_FUNCTIONS,
    "mcp_servers": (None, []),
    "container": (None,),
    "output_format": (None,),
    "output_config": (None,),
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def _renaming_request(http_request: Request) -> EndpointRequest:
    request = EndpointRequest(http_request)
    request.renamed |= {"prompt": "messages", "stop": "stop_sequences"}
    request.renamed["thinking_token_budget"] = "thinking"
    return request


async def messages(http_request: Request) -> Response:
    """Answer a conversation.

    Raises:
        ApiError, InvalidRequest, Overloaded: see `EndpointRequest.parse` and `prepare`.
    """
    request = _renaming_request(http_request)
    body = request.parse(MessagesRequest, UNSUPPORTED)
    generation = await prepare(request, as_chat(body))
    return await respond(http_request, generation, MessagesFormatter(), bool(body.stream))


async def count_tokens(http_request: Request) -> Response:
    """Count the tokens that a conversation would take of the context.

    Raises:
        ApiError: the body is malformed, or there is no such model.
        InvalidRequest: naming the field.
    """
    request = _renaming_request(http_request)
    chat = as_chat(request.parse(CountRequest, UNSUPPORTED))
    model = request.find_model(chat.model)
    rendered, options = as_template_messages(chat.messages), await template_options(chat, model)
    if chat.tools and chat.tool_choice != "none":
        check_tools(chat.tools)
        options["tools"] = described(chat.tools)
    return json_response(CountResponse(len(await model.render(rendered, **options))))


def _blocks(message: Message) -> list[AnswerBlock]:
    """Convert a message to Anthropic's blocks; a call cut off within its arguments has none."""
    blocks: list[AnswerBlock] = []
    if message.reasoning:
        blocks.append(ThinkingBlock(thinking=message.reasoning))
    if message.content or not message.calls:
        blocks.append(TextBlock(text=message.content))
    for call in message.calls:
        try:
            given = json.loads(call.arguments)
        except ValueError:
            given = {}
        blocks.append(ToolUseBlock(id=call.id, name=call.name, input=given))
    return blocks


class MessagesFormatter:
    """Formatter of Anthropic's messages, and of the events that build one."""

    def __init__(self) -> None:
        self._id = f"msg_{uuid4().hex}"
        self._num_blocks = 0
        self._open: type | int | None = None  # kind of the open block; of calls, their index

    def _usage(self, generation: Generation, drawn: int) -> MessagesUsage:
        usage = generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=drawn,
            cache_read_input_tokens=cached,
        )

    @staticmethod
    def _stop(choice: Choice) -> tuple[str, str | None]:
        if isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        if choice.message.calls and choice.finish_reason == "stop":
            return "tool_use", None
        return _STOP_REASONS.get(choice.finish_reason or "", "end_turn"), None

    def whole(self, generation: Generation) -> MessagesResponse:
        choice = generation.choices[0]
        reason, sequence = self._stop(choice)
        return MessagesResponse(
            id=self._id,
            model=generation.model.name,
            content=_blocks(choice.message),
            usage=self._usage(generation, len(choice.token_ids)),
            stop_reason=reason,
            stop_sequence=sequence,
        )

    def opening(self, generation: Generation) -> bytes:
        message = MessagesResponse(
            id=self._id,
            model=generation.model.name,
            content=[],
            usage=self._usage(generation, 0),
        )
        return _event("message_start", message=message)

    def parts(self, generation: Generation, parts: list[Part]) -> bytes:
        return b"".join([self._piece(piece) for part in parts for piece in part.pieces])

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallPart):
            block = ToolUseBlock(id=piece.id or "", name=piece.name or "", input={})
            opened = self._begin(piece.index, block)
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
        elif isinstance(piece, Thought):
            opened = self._begin(Thought, ThinkingBlock(thinking=""))
            delta = {"type": "thinking_delta", "thinking": piece.text}
        else:
            opened = self._begin(TextBlock, TextBlock(text=""))
            delta = {"type": "text_delta", "text": piece.text}
        index = self._num_blocks - 1
        return opened + _event("content_block_delta", index=index, delta=delta)

    def _begin(self, kind: type | int, block: AnswerBlock) -> bytes:
        """Open a block, unless one of this kind is open. Return the events."""
        if kind == self._open:
            return b""
        closed = self._end()
        self._open = kind
        self._num_blocks += 1
        index = self._num_blocks - 1
        return closed + _event("content_block_start", index=index, content_block=block)

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        index, before = self._num_blocks - 1, b""
        if self._open is Thought:
            delta = {"type": "signature_delta", "signature": ""}
            before = _event("content_block_delta", index=index, delta=delta)
        self._open = None
        return before + _event("content_block_stop", index=index)

    def closing(self, generation: Generation) -> bytes:
        choice = generation.choices[0]
        reason, sequence = self._stop(choice)
        usage = self._usage(generation, len(choice.token_ids))
        empty = b""
        if not (choice.message.content or choice.message.calls):
            empty = self._begin(TextBlock, TextBlock(text=""))
        return b"".join(
            (
                empty,
                self._end(),
                _event(
                    "message_delta",
                    delta={"stop_reason": reason, "stop_sequence": sequence},
                    usage=usage,
                ),
                _event("message_stop"),
            )
        )

    def failure(self, error: ApiError) -> bytes:
        return event(error.body(), "error")


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
