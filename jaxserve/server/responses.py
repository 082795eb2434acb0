"""POST /v1/responses: OpenAI's newer endpoint, translated to a chat. Nothing is stored."""

from __future__ import annotations

from typing import Any, Literal
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.answers import event, respond
from jaxserve.server.call import Call
from jaxserve.server.chat import prepare
from jaxserve.server.errors import ApiError
from jaxserve.server.generation import Choice, Generation, Part
from jaxserve.server.logprobs import TokenLogprob, TokenTexts
from jaxserve.server.protocol import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    JsonSchemaFormat,
    ResponseFormat,
)

# As fields.NOT_YET, of this endpoint's own fields.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "max_tool_calls": (None,),
}


class InputItem(msgspec.Struct, kw_only=True):
    """A message of the conversation; other items are not served."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None


class TextFormat(JsonSchemaFormat, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    top_logprobs: int | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None


class OutputText(msgspec.Struct, kw_only=True):
    text: str
    type: str = "output_text"
    annotations: list[str] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True):
    id: str
    content: list[OutputText]
    status: str
    type: str = "message"
    role: str = "assistant"


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesResponse(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/responses."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputMessage]
    object: str = "response"
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool = False
    previous_response_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: str = "none"
    tools: list[str] = []
    usage: ResponsesUsage | None = None


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The conversation that a request stands for.

    Raises:
        InvalidRequest: an item that is no message.
    """
    messages: list[ChatMessage] = []
    if body.instructions is not None:
        messages.append(ChatMessage(role="system", content=body.instructions))
    items = body.input if isinstance(body.input, list) else [InputItem(content=body.input)]
    if not items or body.input == "":
        raise InvalidRequest("input is empty", "input")
    for item in items:
        if item.type != "message":
            raise InvalidRequest(f"items of type {item.type[:40]!r} are not supported", "input")
        messages.append(ChatMessage(role=item.role or "user", content=item.content))
    return ChatRequest(
        model=body.model,
        messages=messages,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        priority=body.priority,
        cache_salt=body.cache_salt,
        chat_template_kwargs=body.chat_template_kwargs,
        response_format=_response_format(body.text),
        logprobs=_wants_logprobs(body),
        top_logprobs=body.top_logprobs,
    )


def _wants_logprobs(body: ResponsesRequest) -> bool:
    return "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    return ResponseFormat(type=text.format.type, json_schema=text.format)


async def responses(request: Request) -> Response:
    """Answer an input."""
    call = Call(request)
    call.renamed |= {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
    call.renamed |= {"response_format": "text", "structured_outputs": "text"}
    call.renamed["logprobs"] = "top_logprobs"
    body = call.parse(ResponsesRequest, NOT_YET)
    generation = await prepare(call, as_chat(body))
    form = ResponsesForm(body, generation.model.llm.get_tokenizer())
    return await respond(request, generation, form, bool(body.stream))


class ResponsesForm:
    """Words a generation as a response object, or as the events that build one.

    Args:
        body: the request.
        tokenizer: spells tokens.
    """

    def __init__(self, body: ResponsesRequest, tokenizer: Any) -> None:
        self._body = body
        self._texts = TokenTexts(tokenizer, False) if _wants_logprobs(body) else None
        self._id = f"resp_{uuid4().hex}"
        self._item = f"msg_{uuid4().hex}"
        self._number = 0

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
        )

    def _message(self, generation: Generation) -> OutputMessage:
        choice = generation.choices[0]
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        text = OutputText(text=choice.text, logprobs=self._logprobs(choice))
        return OutputMessage(id=self._item, content=[text], status=status)

    def _logprobs(self, part: Part | Choice) -> list[TokenLogprob]:
        return self._texts.chat(part.token_ids, part.scores) if self._texts else []

    def whole(self, generation: Generation) -> ResponsesResponse:
        message, usage = self._message(generation), generation.usage()
        response = self._response(generation, message.status)
        if message.status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.output = [message]
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        response.usage = ResponsesUsage(
            usage.prompt_tokens,
            InputTokensDetails(cached),
            usage.completion_tokens,
            OutputTokensDetails(),
            usage.total_tokens,
        )
        return response

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def _in_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, output_index=0, content_index=0, item_id=self._item, **fields)

    def opening(self, generation: Generation) -> bytes:
        response = self._response(generation, "in_progress")
        item = OutputMessage(id=self._item, content=[], status="in_progress")
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._in_item("response.content_part.added", part=OutputText(text="")),
            )
        )

    def parts(self, generation: Generation, parts: list[Part]) -> bytes:
        return b"".join(
            self._in_item(
                "response.output_text.delta", delta=part.text, logprobs=self._logprobs(part)
            )
            for part in parts
            if part.text or part.scores
        )

    def closing(self, generation: Generation) -> bytes:
        response = self.whole(generation)
        message = response.output[0]
        text = message.content[0]
        return b"".join(
            (
                self._in_item("response.output_text.done", text=text.text, logprobs=text.logprobs),
                self._in_item("response.content_part.done", part=text),
                self._event("response.output_item.done", output_index=0, item=message),
                self._event(f"response.{response.status}", response=response),
            )
        )

    def failure(self, error: ApiError) -> bytes:
        return self._event(
            "error", code=error.code, message=error.message, param=error.param, **error.body()
        )
