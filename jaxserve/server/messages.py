"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's endpoints, translated to a chat."""

from __future__ import annotations

from typing import Any, Literal
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.answers import event, json_response, respond
from jaxserve.server.call import Call
from jaxserve.server.chat import as_template_messages, prepare, template_options
from jaxserve.server.errors import ApiError
from jaxserve.server.generation import Choice, Generation, Part
from jaxserve.server.protocol import ChatMessage, ChatRequest, ContentPart

# As fields.NOT_YET, of these endpoints' own fields.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "thinking": (None, {"type": "disabled"}),
    "tool_choice": (None, {"type": "auto"}, {"type": "none"}),
    "mcp_servers": (None, []),
    "container": (None,),
    "output_format": (None,),
    "output_config": (None,),
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[ContentPart]


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[ContentPart] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None


class CountResponse(msgspec.Struct):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class TextBlock(msgspec.Struct, kw_only=True):
    text: str
    type: str = "text"


class MessagesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessagesResponse(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/messages."""

    id: str
    model: str
    content: list[TextBlock]
    usage: MessagesUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"


def as_chat(body: CountRequest) -> ChatRequest:
    """The conversation that a request stands for; a last assistant message is continued."""
    messages = [ChatMessage(role=one.role, content=one.content) for one in body.messages]
    last = bool(messages) and messages[-1].role == "assistant"
    if body.system is not None:
        messages.insert(0, ChatMessage(role="system", content=body.system))
    chat = ChatRequest(model=body.model, messages=messages)
    if last:
        chat.continue_final_message = True
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    return chat


def _new_call(request: Request) -> Call:
    call = Call(request)
    call.renamed |= {"prompt": "messages", "stop": "stop_sequences"}
    return call


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    call = _new_call(request)
    body = call.parse(MessagesRequest, NOT_YET)
    generation = await prepare(call, as_chat(body))
    return await respond(request, generation, MessagesForm(), bool(body.stream))


async def count_tokens(request: Request) -> Response:
    """Count what a conversation would take of the context."""
    call = _new_call(request)
    chat = as_chat(call.parse(CountRequest, NOT_YET))
    model = call.find_model(chat.model)
    rendered = as_template_messages(chat.messages)
    return json_response(CountResponse(len(await model.render(rendered, **template_options(chat)))))


class MessagesForm:
    """Words a generation as a message, or as the events that build one."""

    def __init__(self) -> None:
        self._id = f"msg_{uuid4().hex}"

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
        return _STOP_REASONS.get(choice.finish_reason or "", "end_turn"), None

    def whole(self, generation: Generation) -> MessagesResponse:
        choice = generation.choices[0]
        reason, sequence = self._stop(choice)
        return MessagesResponse(
            id=self._id,
            model=generation.model.name,
            content=[TextBlock(text=choice.text)],
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
        return _event("message_start", message=message) + _event(
            "content_block_start", index=0, content_block=TextBlock(text="")
        )

    def parts(self, generation: Generation, parts: list[Part]) -> bytes:
        return b"".join(
            _event("content_block_delta", index=0, delta={"type": "text_delta", "text": part.text})
            for part in parts
            if part.text
        )

    def closing(self, generation: Generation) -> bytes:
        choice = generation.choices[0]
        reason, sequence = self._stop(choice)
        usage = self._usage(generation, len(choice.token_ids))
        return b"".join(
            (
                _event("content_block_stop", index=0),
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
