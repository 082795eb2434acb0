"""Items and conversations of the responses endpoint, and the answer that contains items."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, Literal
from uuid import uuid4

import msgspec

from jaxserve.server.schema.decode import arguments_text
from jaxserve.server.schema.logprobs import TokenLogprob
from jaxserve.server.schema.openai import ContentPart

# Prefixes of item ids by type. Other types have the first prefix.
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class InputItem(msgspec.Struct, kw_only=True):
    """Item of a conversation in the responses API; `schema.responses` has the supported types."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    status: str | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """Tool that may be called: a function, a custom tool with text input, or a namespace."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    tools: list[ResponseTool] | msgspec.UnsetType = msgspec.UNSET


class ToolReference(msgspec.Struct, kw_only=True):
    type: str = "function"
    name: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Object in `tool_choice`: a tool that the model must call, or a list of allowed tools."""

    name: str | msgspec.UnsetType | None = msgspec.UNSET
    type: str = "function"
    mode: Literal["auto", "required"] | msgspec.UnsetType = msgspec.UNSET
    tools: list[ToolReference] | msgspec.UnsetType = msgspec.UNSET


Choice = Literal["none", "auto", "required"] | ToolChoice


class OutputText(msgspec.Struct, kw_only=True):
    text: str
    type: str = "output_text"
    annotations: list[str] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag="message"):
    id: str
    content: list[OutputText]
    status: str
    role: str = "assistant"


class ReasoningText(msgspec.Struct, kw_only=True):
    text: str
    type: str = "reasoning_text"


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    """Item of an answer with the thoughts of the model, without summary or encryption."""

    id: str
    content: list[ReasoningText]
    status: str
    summary: list[str] = []
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, kw_only=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallItem(msgspec.Struct, kw_only=True, tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


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


class RawMessage(msgspec.Struct):
    """Prompt or answer as text with special tokens and as token ids, in vLLM's form."""

    message: str
    tokens: list[int]
    type: str = "raw_message_tokens"


class ResponsesResponse(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/responses: output items, token counts, and settings of the request."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    object: str = "response"
    background: bool = False
    completed_at: int | None = None
    conversation: dict[str, str] | None = None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt: None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, str | None] | None = None
    safety_identifier: str | None = None
    service_tier: str = "auto"
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] | None = None
    tool_choice: Choice = "auto"
    tools: list[ResponseTool] = []
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None
    input_messages: list[RawMessage] | None = None
    output_messages: list[RawMessage] | None = None
    weight_version: str | msgspec.UnsetType = msgspec.UNSET


class InputItems(msgspec.Struct):
    """Answer of GET /v1/responses/{response_id}/input_items: a page of the list of items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokens(msgspec.Struct):
    """Answer of POST /v1/responses/input_tokens: the number of prompt tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


class DeletedResponse(msgspec.Struct):
    """Answer of DELETE /v1/responses/{response_id}, which confirms the deletion."""

    id: str
    object: str = "response"
    deleted: bool = True


def shown_items(items: Iterable[InputItem], taken: Container[str] = ()) -> list[dict[str, Any]]:
    """Return items as dicts for an answer, each with an id that is unique and not in `taken`."""
    shown: dict[str, dict[str, Any]] = {}
    for item in items:
        name = item.id
        if not name or name in shown or name in taken:
            name = f"{_ID_PREFIXES.get(item.type, 'msg')}_{uuid4().hex}"
        shown[name] = {"id": name, **_shown_item(item)}
    return list(shown.values())


def _shown_item(item: InputItem) -> dict[str, Any]:
    """Return an item as a dict with a status and with content as a list of parts, without id."""
    kind = item.type
    shown: dict[str, Any] = {"type": kind, "status": item.status or "completed"}
    if kind == "message":
        role = item.role or "user"
        part_type = "output_text" if role == "assistant" else "input_text"
        parts = item.content if isinstance(item.content, list) else [ContentPart(type=part_type)]
        if isinstance(item.content, str):
            parts[0].text = item.content
        return shown | {"role": role, "content": [_shown_part(part) for part in parts]}
    if kind == "reasoning":
        thoughts = item.content if isinstance(item.content, list) else []
        return shown | {
            "content": [{"type": part.type, "text": part.text or ""} for part in thoughts],
            "summary": [{"type": p.type, "text": p.text or ""} for p in item.summary or ()],
        }
    if kind == "function_call":
        shown["arguments"] = arguments_text(item.arguments)
    if item.input is not None:
        shown["input"] = arguments_text(item.input)
    fields = ("call_id", "name", "namespace")
    shown |= {field: getattr(item, field) for field in fields if getattr(item, field) is not None}
    if isinstance(item.output, list):
        shown["output"] = [_shown_part(part) for part in item.output]
    elif item.output is not None:
        shown["output"] = item.output
    return shown


def _shown_part(part: ContentPart) -> dict[str, Any]:
    if part.type == "refusal":
        return {"type": part.type, "refusal": part.words or ""}
    if not part.is_text:
        return {"type": part.type}
    shown: dict[str, Any] = {"type": part.type, "text": part.text or ""}
    return shown | {"annotations": []} if part.type == "output_text" else shown


class ConversationRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/conversations, which creates a conversation from items and metadata."""

    items: list[InputItem] | None = None
    metadata: dict[str, str] | None = None


class ConversationUpdate(msgspec.Struct, kw_only=True):
    """Body of POST /v1/conversations/{conversation_id}: metadata that replaces the old ones."""

    metadata: dict[str, str]


class ConversationItems(msgspec.Struct, kw_only=True):
    """Body of POST /v1/conversations/{conversation_id}/items, with the items to append."""

    items: list[InputItem]


class ConversationName(msgspec.Struct):
    """Reference to a stored conversation, in a request or a response."""

    id: str


class ConversationObject(msgspec.Struct):
    """Description of a stored conversation in answers of the conversations API."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


class DeletedConversation(msgspec.Struct):
    """Answer of DELETE /v1/conversations/{conversation_id}, which confirms the deletion."""

    id: str
    object: str = "conversation.deleted"
    deleted: bool = True
