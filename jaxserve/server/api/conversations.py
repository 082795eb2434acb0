"""Rendering of conversations: messages and options of a request in, token ids out.

OpenAI's older `functions` and `function_call` become tools first.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.engine.prompts import truncated
from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.decode import given_arguments
from jaxserve.server.schema.openai import ChatMessage, ChatRequest, NamedTool, Tool, ToolCall
from jaxserve.server.served.chat_template import check_inputs
from jaxserve.server.served.models import ServedModel
from jaxserve.server.tool_calls.tools import allowed_tools, check_tools, described
from jaxserve.text.messages import plain_messages

MAX_MESSAGES = MAX_DOCUMENTS = 4096


def as_template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages of a chat request as dicts for a chat template, with content as text.

    A dict has `role` and `content`, and if present the name, tool calls and reasoning.

    Raises:
        InvalidRequest: there are too few or too many messages, or the newest user message has no
            content, as in `plain_messages`.
    """
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must hold 1 to {MAX_MESSAGES} messages", "messages")
    rendered = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if isinstance(message.content, list):
            fields["content"] = [msgspec.structs.asdict(part) for part in message.content]
        fields["content"] = fields["content"] or message.refusal
        for name in ("name", "tool_call_id"):
            if getattr(message, name) is not None:
                fields[name] = getattr(message, name)
        if message.tool_calls:
            fields["tool_calls"] = [_template_call(call) for call in message.tool_calls]
        reasoning = message.reasoning_content or message.reasoning
        if reasoning and message.role == "assistant":
            # Most templates read the first name, some the second.
            fields["reasoning_content"] = fields["thinking"] = reasoning
        rendered.append(fields)
    return plain_messages(rendered)


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = call.function
    arguments = given_arguments(function.arguments)
    converted = {"type": "function", "function": {"name": function.name, "arguments": arguments}}
    return converted if call.id is None else {"id": call.id, **converted}


async def template_options(body: ChatRequest, model: ServedModel) -> dict[str, Any]:
    """Return the inputs of the chat template that a chat request and the server's settings set.

    Inputs of the request take precedence. A template of the request is compiled, as the option
    `chat_template`. Messages and tools are not included.

    Raises:
        InvalidRequest: the request may not set an input, which the error names.
    """
    inputs = body.chat_template_kwargs or {}
    check_inputs(inputs, "chat_template_kwargs")
    if body.enable_thinking is not None:
        inputs = {"enable_thinking": body.enable_thinking, **inputs}
    options = {**(model.config.default_chat_template_kwargs or {}), **inputs}
    if len(body.documents or ()) > MAX_DOCUMENTS:
        raise InvalidRequest(f"documents holds more than {MAX_DOCUMENTS}", "documents")
    if body.documents:
        options["documents"] = body.documents
    if body.chat_template is not None:
        options["chat_template"] = await model.request_templates.get(body.chat_template)
    if body.reasoning_effort is not None:
        efforts = model.config.reasoning_effort_map or {}
        effort = efforts.get(body.reasoning_effort, body.reasoning_effort)
        options.setdefault("reasoning_effort", effort)
        if effort == "none":
            options.setdefault("enable_thinking", False)
    last = bool(body.continue_final_message)
    if last and body.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other",
            "continue_final_message",
        )
    options["add_generation_prompt"] = body.add_generation_prompt is not False and not last
    if last:
        options["continue_final_message"] = True
    return options


async def template_ids(chat: ChatRequest, model: ServedModel) -> list[int]:
    """Return the token ids of a chat request's messages and tools, rendered by the chat template.

    Raises:
        InvalidRequest: a field is wrong, which the error names.
    """
    messages, options = as_template_messages(chat.messages), await template_options(chat, model)
    if chat.tools and chat.tool_choice != "none":
        check_tools(chat.tools)
        if tools := allowed_tools(chat)[0]:
            options["tools"] = described(tools)
    return await model.render(messages, **options)


async def render(
    model: ServedModel, messages: list[ChatMessage], body: ChatRequest, options: dict[str, Any]
) -> list[int]:
    """Return the token ids of messages, rendered by the chat template, as prompt of a chat request.

    The prompt gets special tokens and is truncated if the request says so.

    Args:
        body: the chat request, for `add_special_tokens` and the truncation.
        options: options of `ServedModel.render`.

    Raises:
        InvalidRequest: a field is wrong, which the error names.
    """
    prompt = await model.render(as_template_messages(messages), **options)
    if body.add_special_tokens:
        prompt = [*_leading_tokens(model), *prompt]
    longest = model.limits.max_model_len
    return truncated(prompt, body.truncate_prompt_tokens, longest, body.truncation_side)


def _leading_tokens(model: ServedModel) -> list[int]:
    plain, whole = (model.tokenizer().encode("a", flag) for flag in (False, True))
    places = range(len(whole) - len(plain) + 1)
    return whole[: next(n for n in places if whole[n : n + len(plain)] == plain)]


def as_tools(body: ChatRequest) -> ChatRequest:
    """Return a chat request with its `functions` as tools, of which an answer may call one.

    Messages with `function_call` or the role "function" become tool calls and tool results.

    Raises:
        InvalidRequest: the request also has tools, or has a choice but no functions.
    """
    if body.functions and body.tools:
        raise InvalidRequest("functions and tools exclude each other", "functions")
    choice = body.function_call
    if choice not in (None, "none", "auto") and not body.functions:
        raise InvalidRequest("function_call needs functions", "function_call")
    messages = _without_functions(body.messages)
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


def _without_functions(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return messages with `function_call` as tool calls, and function results as tool results.

    A result belongs to the last call before it.
    """
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
