"""Schemas of requests to OpenAI's responses endpoint, and conversion of requests to chat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema import openai
from jaxserve.server.schema.decode import custom_arguments
from jaxserve.server.schema.response_items import Choice, ConversationName, InputItem, ResponseTool
from jaxserve.server.schema.response_tools import (
    HOSTED_ITEMS,
    chat_tool,
    flat_name,
    seen_tools,
    tool_choice,
)

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
# Values of `include`. Hosted tools are not run, so they have no outputs to include.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class TextFormat(openai.JsonSchemaFormat, kw_only=True):
    """Output format of the responses API. The JSON schema may be inline or in `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: openai.JsonSchemaFormat | msgspec.UnsetType | None = msgspec.UNSET


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class CountInputRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses/input_tokens, whose tokens are counted regardless of
    `truncation`.
    """

    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponsesRequest(CountInputRequest, kw_only=True):
    """Body of POST /v1/responses, which asks for an answer to a list of items."""

    input: str | list[InputItem]  # type: ignore[assignment]
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    n_predict: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: openai.StructuredOutputs | None = None
    json_schema: str | dict[str, Any] | None = None
    include: list[Included] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    enable_response_messages: bool | None = None


# Fields with the same name in chat.
_SAME = tuple(
    "model temperature top_p top_k min_p seed stop stop_token_ids ignore_eos presence_penalty "
    "frequency_penalty repetition_penalty logit_bias skip_special_tokens "
    "include_stop_str_in_output structured_outputs top_logprobs priority cache_salt "
    "chat_template_kwargs thinking_token_budget parallel_tool_calls include_reasoning "
    "n_predict json_schema enable_thinking".split()
)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Check the metadata of a request.

    Raises:
        InvalidRequest: there are too many entries, or entries that are too long.
    """
    if metadata is None:
        return
    sizes = [(len(key), len(value)) for key, value in metadata.items()]
    is_small = all(key <= MAX_METADATA_KEY and text <= MAX_METADATA_VALUE for key, text in sizes)
    if len(sizes) > MAX_METADATA or not is_small:
        raise InvalidRequest(
            f"metadata takes at most {MAX_METADATA} keys of {MAX_METADATA_KEY} characters, with "
            f"values of {MAX_METADATA_VALUE}",
            "metadata",
        )


def items_of(body: CountInputRequest) -> list[InputItem]:
    """Return the `input` of a responses request as a list. A string becomes one user message.

    Raises:
        InvalidRequest: the input is empty.
    """
    if not body.input:
        raise InvalidRequest("input is empty", "input")
    return body.input if isinstance(body.input, list) else [InputItem(content=body.input)]


def check_served(items: list[InputItem], field: str) -> None:
    """Check that each item of a request can be part of a conversation.

    Raises:
        InvalidRequest: an item of `field` has an unsupported type, or lacks a field.
    """
    try:
        for item in items:
            if item.type == "reasoning" or item.type in HOSTED_ITEMS:
                continue
            _append([], item)
            for content in (item.content, item.output):
                _check_text(content if isinstance(content, list) else [])
    except InvalidRequest as error:
        raise InvalidRequest(str(error).replace("input:", f"{field}:", 1), field) from None


def as_chat(body: ResponsesRequest, items: Iterable[InputItem]) -> openai.ChatRequest:
    """Convert a responses request to the equivalent chat request.

    Args:
        items: items of the whole conversation, earlier responses included.

    Raises:
        InvalidRequest: an item or a tool is not supported.
    """
    messages: list[openai.ChatMessage] = []
    if body.instructions is not None:
        messages.append(openai.ChatMessage(role="system", content=body.instructions))
    thoughts: str | None = None
    for item in items:
        if item.type in HOSTED_ITEMS:
            continue
        if item.type == "reasoning":
            thoughts = _text(item.content) or _text(item.summary)
            continue
        if thoughts is not None and not _is_answer(item):
            # The answer ended within its thoughts, but templates expect an assistant message.
            messages.append(
                openai.ChatMessage(role="assistant", content="", reasoning_content=thoughts)
            )
        _append(messages, item)
        if thoughts and messages[-1].role == "assistant":
            messages[-1].reasoning_content = thoughts
        thoughts = None
    chat = openai.ChatRequest(
        messages=messages,
        max_tokens=body.max_output_tokens,
        response_format=_response_format(body.text),
        logprobs=wants_logprobs(body),
        **{name: getattr(body, name) for name in _SAME},
    )
    if _is_partial(body.input) and not messages[-1].tool_calls:
        chat.continue_final_message, chat.add_generation_prompt = True, False
    if body.reasoning is not None:
        chat.reasoning_effort = body.reasoning.effort
    if body.tools:
        chat.tools = [chat_tool(*seen) for seen in seen_tools(body.tools)] or None
    chat.tool_choice = tool_choice(body.tool_choice, body.tools)
    return chat


def _is_answer(item: InputItem) -> bool:
    is_call = item.type in ("function_call", "custom_tool_call")
    return is_call or (item.type == "message" and item.role == "assistant")


def _check_text(parts: list[openai.ContentPart]) -> None:
    for part in parts:
        if not part.is_text:
            raise InvalidRequest(
                f"input: content of type {part.type[:40]!r} is not supported: only text is", "input"
            )


def _is_partial(items: str | list[InputItem]) -> bool:
    if isinstance(items, str) or not items:
        return False
    last = items[-1]
    is_answer = last.type == "message" and last.role == "assistant"
    return is_answer and last.status in ("in_progress", "incomplete")


def conversation_id(body: CountInputRequest) -> str | None:
    """Return the id of the stored conversation that a responses request continues, or None."""
    conversation = body.conversation
    return conversation.id if isinstance(conversation, ConversationName) else conversation


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Return whether a responses request asks for log-probabilities of the generated tokens."""
    return "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)


def _append(messages: list[openai.ChatMessage], item: InputItem) -> None:
    """Append an item to the chat messages. A call joins the assistant message before it, if any."""
    kind = item.type
    if kind == "message":
        last = messages[-1] if messages else None
        if last is not None and last.tool_calls and item.role == "assistant":
            last.content = [*_parts(last.content), *_parts(item.content)]  # text after a call
        else:
            messages.append(openai.ChatMessage(role=item.role or "user", content=item.content))
    elif kind in ("function_call", "custom_tool_call"):
        if item.name is None or item.call_id is None:
            raise InvalidRequest(f"input: a {kind} needs name and call_id", "input")
        is_custom = kind == "custom_tool_call"
        arguments = custom_arguments(item.input) if is_custom else item.arguments
        name = flat_name(item.namespace, item.name)
        function = openai.FunctionCall(name=name, arguments=arguments)
        call = openai.ToolCall(id=item.call_id, function=function)
        if not messages or messages[-1].role != "assistant":
            messages.append(openai.ChatMessage(role="assistant", content=""))
        messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
    elif kind in ("function_call_output", "custom_tool_call_output"):
        if item.call_id is None:
            raise InvalidRequest(f"input: a {kind} needs a call_id", "input")
        messages.append(
            openai.ChatMessage(role="tool", content=item.output or "", tool_call_id=item.call_id)
        )
    else:
        raise InvalidRequest(f"items of type {kind[:40]!r} are not supported", "input")


def _text(content: str | list[openai.ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    # Parts of thoughts have other types.
    return "".join(part.words or part.text or "" for part in content)


def _parts(content: str | list[openai.ContentPart] | None) -> list[openai.ContentPart]:
    if isinstance(content, str):
        return [openai.ContentPart(type="text", text=content)] if content else []
    return content or []


def _response_format(text: TextOptions | None) -> openai.ResponseFormat | None:
    if text is None or text.format is None:
        return None
    form = text.format
    return openai.ResponseFormat(
        type=form.type,
        json_schema=form.json_schema or None,
        schema=form.schema,
        strict=form.strict,
    )
