"""Endpoints POST /v1/messages and /v1/messages/count_tokens of Anthropic's API.

Requests are translated to requests of the chat API, and its answers back.
"""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.api.chat import prepare
from jaxserve.server.api.conversations import template_ids
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.generation import Choice, ChoicePart, Generation
from jaxserve.server.api.streaming import ResponseFormatter, event, json_response, respond
from jaxserve.server.schema import anthropic as schema
from jaxserve.server.schema.decode import read_object
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.openai import ChatRequest, PromptTokensDetails
from jaxserve.server.tool_calls.answer_parts import AnswerPart, Call, CallPart, Message, Thought
from jaxserve.settings.checks import exact_int
from jaxserve.settings.compat import endpoint_fields

# Rendered once to find out whether a template accepts system messages after the first message.
_PROBE = [{"role": role, "content": "a"} for role in ("system", "user", "system", "user")]
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def renaming_request(http_request: Request) -> EndpointRequest:
    request = EndpointRequest(http_request)
    request.renamed |= {"prompt": "messages", "stop": "stop_sequences"}
    request.renamed["thinking_token_budget"] = "thinking"
    return request


async def messages(http_request: Request) -> Response:
    """Endpoint `POST /v1/messages`: answer a conversation in the form of Anthropic's API.

    The answer is a JSON document, or a stream of events if the request asks for it.
    """
    request = renaming_request(http_request)
    body = request.parse(schema.MessagesRequest, endpoint_fields("messages"))
    chat = await template_chat(request, body)
    formatter = MessagesFormatter(body.context_management is not None)
    generation = await prepare(request, chat)
    return await respond(http_request, generation, formatter, bool(body.stream))


async def template_chat(request: EndpointRequest, body: schema.CountRequest) -> ChatRequest:
    """Return the chat request that is equivalent to a request in the form of Anthropic's API.

    If the model's chat template refuses system messages after the first message, all system
    messages are joined into the first. The names of fields in errors are set in `request`.

    Raises:
        ApiError: 404, there is no such model.
        InvalidRequest: a field is wrong, which the error names.
    """
    field = schema.output_field(body) if body.json_schema is None else "json_schema"
    request.renamed |= {"structured_outputs": field, "response_format": schema.output_field(body)}
    chat = schema.as_chat(body)
    drop_budget(request, chat)
    if any(message.role == "system" for message in chat.messages[1:]):
        try:
            model = request.find_model(chat.model)
            await model.render_as_it_is(_PROBE, {"add_generation_prompt": False})
        except InvalidRequest:
            return schema.merged_system(chat)
    return chat


def drop_budget(request: EndpointRequest, chat: ChatRequest) -> None:
    """Remove the thinking budget from `chat` if the format of the model's reasoning is unknown.

    The removal is logged once. Claude Code sends a budget with every request, whatever the model.

    Raises:
        ApiError: 404, there is no such model.
        InvalidRequest: the removed budget is out of range.
    """
    budget, name = chat.thinking_token_budget, "thinking_token_budget"
    model = request.find_model(chat.model)
    if budget is None or model.dialect.thinking is not None:
        return
    exact_int(budget, name, -1, 2**31 - 1)
    chat.thinking_token_budget = None
    request.notices.once(
        f"thinking.budget_tokens has no effect for {model.name}, whose thoughts are not known "
        "(--reasoning-parser)"
    )


async def count_tokens(http_request: Request) -> Response:
    """Endpoint `POST /v1/messages/count_tokens`: answer with the number of prompt tokens.

    The conversation, in the form of Anthropic's API, is rendered by the model's chat template.
    """
    request = renaming_request(http_request)
    body = request.parse(schema.CountRequest, endpoint_fields("messages"))
    chat = await template_chat(request, body)
    model = request.find_model(chat.model)
    counted = schema.CountResponse(len(await template_ids(chat, model)))
    if body.context_management is not None:
        counted.context_management = schema.CountedContext(counted.input_tokens)
    return json_response(counted)


def _blocks(message: Message) -> list[schema.AnswerBlock]:
    blocks: list[schema.AnswerBlock] = []
    if message.reasoning:
        blocks.append(schema.ThinkingBlock(thinking=message.reasoning))
    if message.content or not message.calls:
        blocks.append(schema.TextBlock(text=message.content))
    for call in message.calls:
        arguments = read_object(call.arguments)
        blocks.append(schema.ToolUseBlock(id=call.id, name=call.name, input=arguments or {}))
    return blocks


def _is_whole(call: Call) -> bool:
    try:
        json.loads(call.arguments)
    except ValueError:
        return False
    return True


class MessagesFormatter(ResponseFormatter):
    """Formatter of answers in the form of Anthropic's API, as a document or as stream events.

    Args:
        manages_context: whether the request has `context_management`. The answer then reports that
            no edits were applied.
    """

    def __init__(self, manages_context: bool = False) -> None:
        self._edits = {"applied_edits": []} if manages_context else None
        self._id = f"msg_{uuid4().hex}"
        self._num_blocks = 0
        self._open: type | int | None = None  # type of the open block, or the index of a call

    def _usage(self, generation: Generation, drawn: int) -> schema.MessagesUsage:
        usage = generation.usage()
        details = usage.prompt_tokens_details or PromptTokensDetails(0)
        return schema.MessagesUsage(
            input_tokens=usage.prompt_tokens - details.cached_tokens - details.created_cache_tokens,
            output_tokens=drawn,
            cache_creation_input_tokens=details.created_cache_tokens,
            cache_read_input_tokens=details.cached_tokens,
        )

    @staticmethod
    def _stop(choice: Choice) -> tuple[str, str | None]:
        calls, stopped = choice.message.calls, choice.finish_reason == "stop"
        # A stop sequence inside a call leaves an incomplete call, which clients must not run.
        if isinstance(choice.stop_reason, str) and not (calls and all(map(_is_whole, calls))):
            return "stop_sequence", choice.stop_reason
        if calls and stopped:
            return "tool_use", None
        return _STOP_REASONS.get(choice.finish_reason or "", "end_turn"), None

    def whole(self, generation: Generation) -> schema.MessagesResponse:
        choice = generation.choices[0]
        reason, sequence = self._stop(choice)
        response = schema.MessagesResponse(
            id=self._id,
            model=generation.model.name,
            content=_blocks(choice.message),
            usage=self._usage(generation, len(choice.token_ids)),
            stop_reason=reason,
            stop_sequence=sequence,
            weight_version=generation.weight_version,
        )
        if self._edits is not None:
            response.context_management = self._edits
        return response

    def opening(self, generation: Generation) -> bytes:
        message = schema.MessagesResponse(
            id=self._id,
            model=generation.model.name,
            content=[],
            usage=self._usage(generation, 0),
        )
        return _event("message_start", message=message)

    def _part(self, generation: Generation, part: ChoicePart) -> bytes:
        return b"".join([self._piece(piece) for piece in part.pieces])

    def _piece(self, piece: AnswerPart) -> bytes:
        if isinstance(piece, CallPart):
            block = schema.ToolUseBlock(id=piece.id or "", name=piece.name or "", input={})
            opened = self._begin(piece.index, block)
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
        elif isinstance(piece, Thought):
            opened = self._begin(Thought, schema.ThinkingBlock(thinking=""))
            delta = {"type": "thinking_delta", "thinking": piece.text}
        else:
            opened = self._begin(schema.TextBlock, schema.TextBlock(text=""))
            delta = {"type": "text_delta", "text": piece.text}
        index = self._num_blocks - 1
        return opened + _event("content_block_delta", index=index, delta=delta)

    def _begin(self, kind: type | int, block: schema.AnswerBlock) -> bytes:
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
        version, empty = generation.weight_version, b""
        if not (choice.message.content or choice.message.calls):
            empty = self._begin(schema.TextBlock, schema.TextBlock(text=""))
        return b"".join(
            (
                empty,
                self._end(),
                _event(
                    "message_delta",
                    delta={"stop_reason": reason, "stop_sequence": sequence},
                    usage=usage,
                    **({} if self._edits is None else {"context_management": self._edits}),
                    **({"weight_version": version} if version else {}),
                ),
                _event("message_stop"),
            )
        )

    def failure(self, error: ApiError) -> bytes:
        return event(error.body(), "error")


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
