"""Schemas of Anthropic's messages endpoints, and the chat that a request stands for."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.openai import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Tool,
    ToolCall,
)


class Block(msgspec.Struct, kw_only=True):
    """Part of a message: text, thinking, tool_use or tool_result; other types are not served."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class MessagesTool(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None


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


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessagesResponse(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/messages."""

    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessagesUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"


def as_chat(body: CountRequest) -> ChatRequest:
    """Return the conversation that a request stands for; a last assistant message is continued.

    Raises:
        InvalidRequest: a block that is not served.
    """
    messages: list[ChatMessage] = []
    if body.system is not None:
        messages.append(ChatMessage(role="system", content=_text(body.system)))
    for message in body.messages:
        messages += _chat_messages(message)
    chat = ChatRequest(model=body.model, messages=messages)
    if body.messages and body.messages[-1].role == "assistant":
        chat.continue_final_message = True
    _put_tools(chat, body)
    thinking = body.thinking
    if thinking is not None:
        chat.chat_template_kwargs = {"enable_thinking": thinking.type != "disabled"}
        if thinking.type == "enabled":
            if thinking.budget_tokens is None:
                raise InvalidRequest("thinking: enabled needs budget_tokens", "thinking")
            chat.thinking_token_budget = thinking.budget_tokens
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    return chat


def _put_tools(chat: ChatRequest, body: CountRequest) -> None:
    choice = body.tool_choice
    if body.tools:
        chat.tools = [
            Tool(
                function=FunctionDefinition(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.input_schema,
                    strict=tool.strict,
                )
            )
            for tool in body.tools
        ]
    if choice is None:
        return
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice of type tool needs a name", "tool_choice")
        chat.tool_choice = NamedTool(function=FunctionName(name=choice.name))
    elif choice.type == "any":
        chat.tool_choice = "required"
    else:
        chat.tool_choice = choice.type


def _text(content: str | list[Block] | None) -> str:
    """Return the text of a content, which may hold nothing else."""
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if block.type != "text" or block.text is None:
            raise InvalidRequest(
                f"content of type {block.type[:40]!r} is not supported here: only text is",
                "messages",
            )
    return "".join(block.text or "" for block in content)


def _chat_messages(message: InputMessage) -> list[ChatMessage]:
    """Convert a message to those of a chat; results of tools become messages before the rest."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results, rest, calls, thoughts = [], [], [], []
    for block in message.content:
        if block.type == "tool_result" and message.role == "user":
            results.append(
                ChatMessage(
                    role="tool", content=_text(block.content), tool_call_id=block.tool_use_id
                )
            )
        elif block.type == "tool_use" and message.role == "assistant":
            if block.name is None:
                raise InvalidRequest("messages: a tool_use block needs a name", "messages")
            call = FunctionCall(name=block.name, arguments=json.dumps(block.input or {}))
            calls.append(ToolCall(id=block.id, function=call))
        elif block.type == "thinking" and message.role == "assistant":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            rest.append(block)
    if not (rest or calls or thoughts) and results:
        return results
    chat_message = ChatMessage(role=message.role, content=_text(rest), tool_calls=calls or None)
    chat_message.reasoning_content = "".join(thoughts) or None
    return [*results, chat_message]
