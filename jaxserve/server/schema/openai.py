"""Schemas of OpenAI's completions and chat endpoints.

Types are checked here (strictly: true is not an integer, "5" is not a number). Ranges are checked
only by the engine.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.server.schema.decode import custom_arguments
from jaxserve.server.schema.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprob
from jaxserve.server.schema.tools import (
    CallDelta,
    CustomCall,
    FunctionDefinition,
    FunctionDelta,
    FunctionName,
    NamedTool,
    Tool,
    require,
)

# One entry per token of the prompt. The first is null.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """JSON schema of an answer in OpenAI's form: with a name, a description and the flag
    `strict`.
    """

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Output format of an answer: text, any JSON object, a JSON schema, or a structural tag.

    A JSON schema is in `json_schema` (OpenAI) or in `schema` (llama.cpp). A structural tag is in
    `format`, or in `structures` and `triggers`; see `StructuredOutputsParams.structural_tag`.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """Structured output format of an answer in vLLM's form: one field with a format, and its
    options.

    For the meaning of the fields see `StructuredOutputsParams`.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    lenient: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class Sampling(msgspec.Struct, kw_only=True):
    """Request fields common to text completions and chat completions. None means the default."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    json_schema: str | dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    echo: bool | None = None
    user: str | None = None
    request_id: str | None = None
    session_id: str | None = None
    return_token_offsets: bool | None = None
    mm_payload: Literal["tensors", "none"] | None = None
    return_mm_kwargs: bool | None = None


class CompletionRequest(Sampling, kw_only=True):
    """Body of POST /v1/completions: prompts as text or token ids, and sampling settings."""

    prompt: str | list[int | str | list[int]]
    add_special_tokens: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """Part of the content of a chat message. The model can read text and refusals only."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether the type of the content part is a type of text, including refusals."""
        return self.type in ("text", "input_text", "output_text", "refusal")

    @property
    def words(self) -> str | None:
        """Text of the content part, None if its type is not a type of text or if the text is
        missing.
        """
        if self.type == "refusal" and self.refusal is not None:
            return self.refusal
        return self.text if self.is_text else None


class FunctionCall(msgspec.Struct, kw_only=True):
    """Name and arguments of a function call.

    `arguments` is JSON text in answers. In conversations sent by clients it is any JSON value.
    """

    name: str
    arguments: Any = None


class ToolCall(msgspec.Struct, kw_only=True):
    """Tool call in a message sent by a client. A call of a custom tool is converted to a function
    call.
    """

    id: str | None = None
    type: str | None = "function"
    function: FunctionCall = None  # type: ignore[assignment]
    custom: CustomCall | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.custom:
            arguments = custom_arguments(self.custom.input)
            self.function = FunctionCall(name=self.custom.name, arguments=arguments)
        require(self.function, "function")


class AnsweredCall(msgspec.Struct, kw_only=True):
    """Tool call in the server's answer, with either the field `function` or the field `custom`."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | msgspec.UnsetType = msgspec.UNSET
    custom: CustomCall | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class ChatRequest(Sampling, kw_only=True):
    """Body of POST /v1/chat/completions: messages, tools, chat template options, and sampling
    settings.
    """

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    return_prompt_text: bool | None = None
    functions: list[FunctionDefinition] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None


class PromptTokensDetails(msgspec.Struct):
    """Numbers of prompt tokens read from the prefix cache, and of prompt tokens written to it."""

    cached_tokens: int
    created_cache_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class PerRequestMetrics(msgspec.Struct, omit_defaults=True):
    """Times of one request in milliseconds, and its token rate, as vLLM names and computes them."""

    time_to_first_token_ms: float | None = None  # time from the start in a slot to the first token
    generation_time_ms: float | None = None  # time from the first token to the last
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    # Rate of all tokens from the start in a slot to the last token.
    tokens_per_second: float | None = None


class CompletionChoice(msgspec.Struct, omit_defaults=False):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = None  # unset in streams


class CompletionResponse(msgspec.Struct):
    """Answer of POST /v1/completions: a complete one, or one event of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "text_completion"
    system_fingerprint: str | None = None
    weight_version: str | msgspec.UnsetType = msgspec.UNSET
    service_tier: msgspec.UnsetType | None = msgspec.UNSET  # null in complete answers
    kv_transfer_params: msgspec.UnsetType | None = msgspec.UNSET
    metrics: PerRequestMetrics | msgspec.UnsetType | None = msgspec.UNSET


class AnswerMessage(msgspec.Struct):
    """Assistant message in a complete chat answer. As in vLLM, unused fields are null, not left
    out.
    """

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    annotations: None = None
    audio: None = None
    function_call: FunctionCall | None = None
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(msgspec.Struct):
    """Complete (not streamed) answer of POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    weight_version: str | msgspec.UnsetType = msgspec.UNSET
    service_tier: None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: None = None
    metrics: PerRequestMetrics | msgspec.UnsetType | None = msgspec.UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None
    function_call: FunctionDelta | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    """Event of a streamed answer of POST /v1/chat/completions.

    As in vLLM, the first event of a choice has `prompt_token_ids`, and events with tokens have
    `token_ids`. Both are null if the request does not ask for token ids.
    """

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    weight_version: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET
    metrics: PerRequestMetrics | msgspec.UnsetType | None = msgspec.UNSET
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """Body of an HTTP error response: OpenAI's error object, and the type that Anthropic's client
    reads.
    """

    error: ErrorDetail
    type: str = "error"
