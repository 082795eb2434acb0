"""Schemas of Anthropic's messages endpoints, and conversion of requests to chat."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema import openai
from jaxserve.server.schema.decode import arguments_text
from jaxserve.text.messages import left_out

_BILLING = "x-anthropic-billing-header"


class DocumentSource(msgspec.Struct, kw_only=True):
    """Source of a document in a message. Only sources of types text and content can be read."""

    type: str
    data: str | None = None
    content: str | list[ContentBlock] | None = None

    @property
    def is_text(self) -> bool:
        """Whether the request contains the document as text."""
        return self.type in ("text", "content")

    @property
    def words(self) -> str:
        """Text of the document, "" if it has none."""
        return (self.data or "") if self.type == "text" else _text(self.content, "\n")


class ContentBlock(msgspec.Struct, kw_only=True):
    """Block of the content of a message: text, thoughts, a tool call, a tool result, or a document.

    `_text_of` lists the types whose text the model can read.
    """

    type: str
    text: str | None = None
    title: str | None = None
    context: str | None = None
    source: str | DocumentSource | None = None
    tool_name: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | dict[str, Any] | None = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock] | None = None


class MessagesTool(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class JsonOutput(msgspec.Struct, kw_only=True):
    """Output format of an answer: a JSON schema."""

    type: Literal["json_schema"] = "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """Reasoning effort and output format of an answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens: a conversation with tools and output format.

    `context_management` has no effect: the whole conversation is used as it was sent.
    """

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None
    json_schema: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    context_management: dict[str, Any] | None = None
    mm_payload: Literal["tensors", "none"] | None = None
    return_mm_kwargs: bool | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of POST /v1/messages: a conversation and sampling settings for the answer."""

    max_tokens: int
    n_predict: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: str | None = None


class CountedContext(msgspec.Struct):
    """Number of tokens of a conversation before context management removes any of its messages."""

    original_input_tokens: int


class CountResponse(msgspec.Struct):
    """Answer of POST /v1/messages/count_tokens: the number of prompt tokens."""

    input_tokens: int
    context_management: CountedContext | msgspec.UnsetType = msgspec.UNSET


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
    """Complete (not streamed) answer of POST /v1/messages."""

    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessagesUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"
    context_management: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    weight_version: str | msgspec.UnsetType = msgspec.UNSET


def as_chat(body: CountRequest) -> openai.ChatRequest:
    """Convert a request of Anthropic's messages API to the equivalent chat request.

    If the last message is text of the assistant, the answer continues that message.

    Raises:
        InvalidRequest: a tool, a tool call, the thinking budget or the output format is invalid or
            not supported.
    """
    messages: list[openai.ChatMessage] = []
    if body.system is not None:
        messages.append(openai.ChatMessage(role="system", content=_system_text(body.system)))
    for message in body.messages:
        messages += _chat_messages(message)
    chat = openai.ChatRequest(model=body.model, messages=messages)
    chat.chat_template_kwargs, chat.json_schema = body.chat_template_kwargs, body.json_schema
    chat.enable_thinking = body.enable_thinking
    # A message with calls is complete, since templates write calls after its text.
    if body.messages and body.messages[-1].role == "assistant" and not messages[-1].tool_calls:
        chat.continue_final_message = True
    _put_tools(chat, body)
    thinking = body.thinking
    if thinking is not None:
        template_kwargs = chat.chat_template_kwargs or {}
        chat.chat_template_kwargs = {
            "enable_thinking": thinking.type != "disabled",
            **template_kwargs,
        }
        if thinking.type == "enabled":
            if thinking.budget_tokens is None:
                raise InvalidRequest("thinking: enabled needs budget_tokens", "thinking")
            chat.thinking_token_budget = thinking.budget_tokens
    _put_output(chat, body)
    if isinstance(body, MessagesRequest):
        chat.max_tokens, chat.cache_salt = body.max_tokens, body.cache_salt
        chat.n_predict = body.n_predict
        chat.stop = body.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    return chat


def output_field(body: CountRequest) -> str:
    """Return the name of the request field that contains the output format: output_format if it is
    set, otherwise output_config.
    """
    return "output_format" if body.output_format is not None else "output_config"


def _put_output(chat: openai.ChatRequest, body: CountRequest) -> None:
    config = body.output_config or OutputConfig()
    if config.format is not None and body.output_format is not None:
        raise InvalidRequest(
            "output_format and output_config.format exclude each other", "output_format"
        )
    form = config.format or body.output_format
    if form is not None:
        if form.schema is None:
            field = output_field(body)
            raise InvalidRequest(f"{field} of type json_schema needs a schema", field)
        schema = openai.JsonSchemaFormat(schema=form.schema, strict=True)
        chat.response_format = openai.ResponseFormat(type="json_schema", json_schema=schema)
    chat.reasoning_effort = config.effort


def _put_tools(chat: openai.ChatRequest, body: CountRequest) -> None:
    choice = body.tool_choice
    for tool in body.tools or ():
        if tool.type not in (None, "custom"):
            raise InvalidRequest(
                f"tools: {tool.type[:60]!r} is a tool of Anthropic's own; only tools with a name "
                "and an input_schema are served, which the client runs",
                "tools",
            )
    if body.tools:
        chat.tools = [
            openai.Tool(
                function=openai.FunctionDefinition(
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
        chat.tool_choice = openai.NamedTool(function=openai.FunctionName(name=choice.name))
    elif choice.type == "any":
        chat.tool_choice = "required"
    else:
        chat.tool_choice = choice.type


def _system_text(content: str | list[ContentBlock] | None) -> str:
    # Claude Code's line for billing changes with each request, so the prefix cache would never
    # match.
    texts = [content] if isinstance(content, str) else [_words(block) for block in content or ()]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _text(content: str | list[ContentBlock] | dict[str, Any] | None, between: str = "") -> str:
    if not isinstance(content, list):
        return "" if content is None else arguments_text(content)
    return between.join(_words(block) for block in content)


def _words(block: ContentBlock) -> str:
    words = _text_of(block)
    if words is None:
        return "" if block.type == "text" else left_out(block.type)
    return words


def _part(block: ContentBlock) -> openai.ContentPart:
    words = _text_of(block)
    return openai.ContentPart(type=block.type if words is None else "text", text=words)


def _text_of(block: ContentBlock) -> str | None:
    """Return the text of a content block, or None for a type without text.

    It is the text of a text block, the tool name of a tool_reference, the content of a compaction,
    and, after their titles, the text of search results and of documents whose source is text.
    """
    source = block.source
    words = None
    if block.type == "text":
        words = block.text
    elif block.type == "tool_reference":
        words = block.tool_name or block.name
    elif block.type == "compaction":
        words = _text(block.content)
    elif block.type == "search_result" and isinstance(source, str):
        words = "\n".join(filter(None, (block.title, source, _text(block.content, "\n"))))
    elif block.type == "document" and isinstance(source, DocumentSource) and source.is_text:
        words = "\n".join(filter(None, (block.title, block.context, source.words)))
    return words


def _chat_messages(message: InputMessage) -> list[openai.ChatMessage]:
    """Convert a message of Anthropic's API to chat messages.

    Each tool result becomes a message of its own, before the message with the other content.

    Raises:
        InvalidRequest: a tool_use block has no name.
    """
    if message.role == "system":
        text = _system_text(message.content)
        return [openai.ChatMessage(role="system", content=text)] if text else []
    if not isinstance(message.content, list):
        return [openai.ChatMessage(role=message.role, content=message.content)]
    results, rest, calls, thoughts = [], [], [], []
    for block in message.content:
        if block.type == "tool_result" and message.role == "user":
            text = _text(block.content, "\n")
            results.append(
                openai.ChatMessage(role="tool", content=text, tool_call_id=block.tool_use_id)
            )
        elif block.type == "tool_use" and message.role == "assistant":
            if block.name is None:
                raise InvalidRequest("messages: a tool_use block needs a name", "messages")
            call = openai.FunctionCall(name=block.name, arguments=block.input)
            calls.append(openai.ToolCall(id=block.id, function=call))
        elif block.type == "thinking" and message.role == "assistant":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            rest.append(block)
    parts = [_part(block) for block in rest]
    says_nothing = all(part.is_text and not part.text for part in parts)
    if results and says_nothing and not (calls or thoughts):
        return results
    chat_message = openai.ChatMessage(role=message.role, content=parts, tool_calls=calls or None)
    chat_message.reasoning_content = "".join(thoughts) or None
    return [*results, chat_message]


def merged_system(chat: openai.ChatRequest) -> openai.ChatRequest:
    """Return a copy of a chat request whose system messages are joined into one at the beginning.

    Some chat templates accept only one system message, at the beginning.
    """
    texts = [str(message.content or "") for message in chat.messages if message.role == "system"]
    rest = [message for message in chat.messages if message.role != "system"]
    first = openai.ChatMessage(role="system", content="".join(texts))
    return msgspec.structs.replace(chat, messages=[first, *rest])
