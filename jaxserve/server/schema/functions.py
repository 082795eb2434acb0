"""Conversion of OpenAI's older `functions` and `function_call` to tools."""

from __future__ import annotations

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.openai import ChatMessage, ChatRequest, NamedTool, Tool, ToolCall


def as_tools(body: ChatRequest) -> ChatRequest:
    """Return a request with its functions as tools, of which an answer may call one.

    Messages with calls and results of functions become messages of tools.

    Raises:
        InvalidRequest: the request also has tools, or has a choice but no functions.
    """
    if body.functions and body.tools:
        raise InvalidRequest("functions and tools exclude each other", "functions")
    choice = body.function_call
    if choice not in (None, "none", "auto") and not body.functions:
        raise InvalidRequest("function_call needs functions", "function_call")
    messages = _messages(body.messages)
    if not body.functions:
        return (
            body if messages is body.messages else msgspec.structs.replace(body, messages=messages)
        )
    named = choice if isinstance(choice, str | None) else NamedTool(function=choice)
    return msgspec.structs.replace(
        body,
        tools=[Tool(function=function) for function in body.functions],
        tool_choice=named,
        parallel_tool_calls=False,
    )


def _messages(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return messages with older calls as tool calls. A result belongs to the call before it."""
    if not any(message.function_call or message.role == "function" for message in messages):
        return messages
    converted, number = [], 0
    for message in messages:
        if message.function_call is not None:
            number += 1
            call = ToolCall(id=f"call_{number}", function=message.function_call)
            message = msgspec.structs.replace(message, function_call=None, tool_calls=[call])
        elif message.role == "function":
            message = msgspec.structs.replace(message, role="tool", tool_call_id=f"call_{number}")
        converted.append(message)
    return converted
