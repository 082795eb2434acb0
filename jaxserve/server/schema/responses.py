"""Schemas of OpenAI's responses endpoint, and the chat that a request stands for."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.logprobs import TokenLogprob
from jaxserve.server.schema.openai import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
)


class InputItem(msgspec.Struct, kw_only=True):
    """A message, function_call, function_call_output or reasoning; no others are served."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    status: str | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that may be called."""

    name: str
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, kw_only=True):
    name: str
    type: Literal["function"] = "function"


class TextFormat(JsonSchemaFormat, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


Choice = Literal["none", "auto", "required"] | FunctionChoice


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
    tools: list[FunctionTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: int | None = None
    user: str | None = None


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
    id: str
    content: list[ReasoningText]
    status: str
    summary: list[str] = []


class FunctionCallItem(msgspec.Struct, kw_only=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


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


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class ResponsesResponse(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/responses."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    object: str = "response"
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: Choice = "auto"
    tools: list[FunctionTool] = []
    usage: ResponsesUsage | None = None


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """Return the conversation that a request stands for.

    Raises:
        InvalidRequest: an item that is not served.
    """
    messages: list[ChatMessage] = []
    if body.instructions is not None:
        messages.append(ChatMessage(role="system", content=body.instructions))
    items = body.input if isinstance(body.input, list) else [InputItem(content=body.input)]
    if not items or body.input == "":
        raise InvalidRequest("input is empty", "input")
    thoughts: str | None = None
    for item in items:
        if item.type == "reasoning":
            thoughts = _text(item.content)
            continue
        _append(messages, item)
        if thoughts and messages[-1].role == "assistant":
            messages[-1].reasoning_content = thoughts
        thoughts = None
    chat = ChatRequest(
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
        logprobs=wants_logprobs(body),
        top_logprobs=body.top_logprobs,
        thinking_token_budget=body.thinking_token_budget,
        parallel_tool_calls=body.parallel_tool_calls,
    )
    if body.reasoning is not None:
        chat.reasoning_effort = body.reasoning.effort
    if body.tools:
        chat.tools = [_tool(tool) for tool in body.tools]
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        chat.tool_choice = NamedTool(function=FunctionName(name=choice.name))
    else:
        chat.tool_choice = choice
    return chat


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Return whether the answer carries log-probabilities."""
    return "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)


def _tool(tool: FunctionTool) -> Tool:
    return Tool(
        function=FunctionDefinition(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
    )


def _append(messages: list[ChatMessage], item: InputItem) -> None:
    """Append an item; a call joins the assistant's message before it, or becomes a new one."""
    if item.type == "message":
        messages.append(ChatMessage(role=item.role or "user", content=item.content))
    elif item.type == "function_call":
        if item.name is None or item.call_id is None:
            raise InvalidRequest("input: a function_call needs name and call_id", "input")
        function = FunctionCall(name=item.name, arguments=item.arguments or "")
        call = ToolCall(id=item.call_id, function=function)
        if not messages or messages[-1].role != "assistant":
            messages.append(ChatMessage(role="assistant", content=""))
        messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
    elif item.type == "function_call_output":
        if item.call_id is None:
            raise InvalidRequest("input: a function_call_output needs a call_id", "input")
        messages.append(
            ChatMessage(role="tool", content=item.output or "", tool_call_id=item.call_id)
        )
    else:
        raise InvalidRequest(f"items of type {item.type[:40]!r} are not supported", "input")


def _text(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.words or "" for part in content)


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    return ResponseFormat(type=text.format.type, json_schema=text.format)
