"""Endpoint POST /v1/responses: OpenAI's newer one, translated to a chat. Nothing is stored."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.api.chat import prepare
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.generation import Choice, Generation, Part
from jaxserve.server.api.streaming import event, respond
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.logprobs import TokenLogprob, TokenTexts
from jaxserve.server.schema.responses import (
    FunctionCallItem,
    InputTokensDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesUsage,
    as_chat,
    wants_logprobs,
)
from jaxserve.server.schema.sampling import (
    NO_FUNCTIONS,
    NO_GUIDED_FIELDS,
    NO_SUFFIX,
    NO_TEMPLATE_FIELDS,
)
from jaxserve.server.tool_calls.pieces import CallPart, Content, Message, Piece, Thought

# Fields of this endpoint alone that are not supported, with their neutral values.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **NO_TEMPLATE_FIELDS,
    **NO_GUIDED_FIELDS,
    **NO_FUNCTIONS,
    **NO_SUFFIX,
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "max_tool_calls": (None,),
}


async def responses(http_request: Request) -> Response:
    """Answer an input.

    Raises:
        ApiError, InvalidRequest, Overloaded: see `EndpointRequest.parse` and `prepare`.
    """
    request = EndpointRequest(http_request)
    request.renamed |= {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
    request.renamed |= {"response_format": "text", "structured_outputs": "text"}
    request.renamed["logprobs"] = "top_logprobs"
    body = request.parse(ResponsesRequest, UNSUPPORTED)
    generation = await prepare(request, as_chat(body))
    formatter = ResponsesFormatter(body, generation.model.llm.get_tokenizer())
    return await respond(http_request, generation, formatter, bool(body.stream))


class ResponsesFormatter:
    """Formatter of response objects, and of the events that build one.

    Items of the output are made from the pieces that were read, in their order, streamed or not.

    Args:
        body: the request.
        tokenizer: spells tokens.
    """

    def __init__(self, body: ResponsesRequest, tokenizer: Any) -> None:
        self._body = body
        self._texts = TokenTexts(tokenizer, False) if wants_logprobs(body) else None
        self._pending: list[TokenLogprob] = []  # logprobs of tokens since the last text
        self._id = f"resp_{uuid4().hex}"
        self._number = 0
        self._items: list[OutputItem] = []
        self._is_open = False

    def _response(self, generation: Generation, status: str) -> ResponsesResponse:
        body = self._body
        return ResponsesResponse(
            id=self._id,
            created_at=generation.created,
            model=generation.model.name,
            status=status,
            output=[],
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            temperature=body.temperature,
            top_p=body.top_p,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
        )

    def whole(self, generation: Generation) -> ResponsesResponse:
        choice = generation.choices[0]
        if not self._items:
            self._pending = self._logprobs(choice)
            for piece in _pieces(choice.message):
                self._piece(piece)
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        self._close(status)
        usage = generation.usage()
        response = self._response(generation, status)
        if status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.output = self._items
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        details = usage.completion_tokens_details
        response.usage = ResponsesUsage(
            usage.prompt_tokens,
            InputTokensDetails(cached),
            usage.completion_tokens,
            OutputTokensDetails(details.reasoning_tokens if details else 0),
            usage.total_tokens,
        )
        return response

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def _in_item(self, kind: str, **fields: Any) -> bytes:
        index = len(self._items) - 1
        item = self._items[index]
        if not isinstance(item, FunctionCallItem):
            fields["content_index"] = 0
        return self._event(kind, output_index=index, item_id=item.id, **fields)

    def opening(self, generation: Generation) -> bytes:
        response = self._response(generation, "in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def parts(self, generation: Generation, parts: list[Part]) -> bytes:
        return b"".join([self._part(generation, part) for part in parts])

    def _logprobs(self, part: Part | Choice) -> list[TokenLogprob]:
        return self._texts.chat(part.token_ids, part.logprobs) if self._texts else []

    def _part(self, generation: Generation, part: Part) -> bytes:
        pieces = part.pieces
        self._pending += self._logprobs(part)
        if not pieces and self._pending and generation.choices[0].reader is None:
            pieces = [Content("")]
        return b"".join([self._piece(piece) for piece in pieces])

    def _piece(self, piece: Piece) -> bytes:
        """Return the events of a piece, and add it to the items."""
        opened = self._open(piece)
        item = self._items[-1]
        if isinstance(item, FunctionCallItem) and isinstance(piece, CallPart):
            item.arguments += piece.arguments
            delta = self._in_item("response.function_call_arguments.delta", delta=piece.arguments)
        elif isinstance(item, ReasoningItem) and isinstance(piece, Thought):
            item.content[0].text += piece.text
            delta = self._in_item("response.reasoning_text.delta", delta=piece.text)
        elif isinstance(item, OutputMessage) and isinstance(piece, Content):
            item.content[0].text += piece.text
            logprobs, self._pending = self._pending, []
            item.content[0].logprobs += logprobs
            delta = self._in_item("response.output_text.delta", delta=piece.text, logprobs=logprobs)
        else:
            raise AssertionError("a piece beside its item")
        return opened + delta

    def _open(self, piece: Piece) -> bytes:
        """Begin an item, unless the piece continues the open one. Return the events."""
        last = self._items[-1] if self._items and self._is_open else None
        if isinstance(piece, CallPart):
            if piece.id is None:
                return b""
        elif isinstance(last, ReasoningItem if isinstance(piece, Thought) else OutputMessage):
            return b""
        closed = self._close("completed")
        item = _new_item(piece)
        self._items.append(item)
        self._is_open = True
        shown, part = _blank(item)
        index = len(self._items) - 1
        added = self._event("response.output_item.added", output_index=index, item=shown)
        if part is None:
            return closed + added
        return closed + added + self._in_item("response.content_part.added", part=part)

    def _close(self, status: str) -> bytes:
        """End the open item, if there is one. Return the events."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        item.status = status
        index = len(self._items) - 1
        if isinstance(item, FunctionCallItem):
            done = self._in_item(
                "response.function_call_arguments.done", arguments=item.arguments, name=item.name
            )
        elif isinstance(item, ReasoningItem):
            done = self._in_item("response.reasoning_text.done", text=item.content[0].text)
            done += self._in_item("response.content_part.done", part=item.content[0])
        else:
            text = item.content[0]
            logprobs = text.logprobs
            done = self._in_item("response.output_text.done", text=text.text, logprobs=logprobs)
            done += self._in_item("response.content_part.done", part=text)
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def closing(self, generation: Generation) -> bytes:
        choice = generation.choices[0]
        # An empty answer is a message without text.
        empty = b"" if self._answers else self._open(Content(""))
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        closed = self._close(status)
        response = self.whole(generation)
        return empty + closed + self._event(f"response.{response.status}", response=response)

    @property
    def _answers(self) -> bool:
        return any(not isinstance(item, ReasoningItem) for item in self._items)

    def failure(self, error: ApiError) -> bytes:
        return self._event(
            "error", code=error.code, message=error.message, param=error.param, **error.body()
        )


def _pieces(message: Message) -> list[Piece]:
    """Split a whole message into pieces."""
    pieces: list[Piece] = [Thought(message.reasoning)] if message.reasoning else []
    if message.content or not message.calls:
        pieces.append(Content(message.content))
    for index, call in enumerate(message.calls):
        pieces.append(CallPart(index, call.arguments, call.id, call.name))
    return pieces


def _new_item(piece: Piece) -> OutputItem:
    name = uuid4().hex
    if isinstance(piece, CallPart):
        return FunctionCallItem(
            id=f"fc_{name}",
            call_id=piece.id or "",
            name=piece.name or "",
            arguments="",
            status="in_progress",
        )
    if isinstance(piece, Thought):
        content = [ReasoningText(text="")]
        return ReasoningItem(id=f"rs_{name}", content=content, status="in_progress")
    return OutputMessage(id=f"msg_{name}", content=[OutputText(text="")], status="in_progress")


def _blank(item: OutputItem) -> tuple[OutputItem, OutputText | ReasoningText | None]:
    """Return an item as its announcement shows it, and the part that is announced after it."""
    if isinstance(item, FunctionCallItem):
        return item, None
    if isinstance(item, ReasoningItem):
        return ReasoningItem(id=item.id, content=[], status=item.status), ReasoningText(text="")
    return OutputMessage(id=item.id, content=[], status=item.status), OutputText(text="")
