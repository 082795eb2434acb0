"""Endpoint POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine.text.messages import plain_message
from jaxserve.errors import InvalidRequest
from jaxserve.request import SamplingParams
from jaxserve.server.api.completions import truncated
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.generation import Choice, Generation, Part
from jaxserve.server.api.streaming import DONE, event, respond
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.logprobs import ChatLogprobs, TokenTexts
from jaxserve.server.schema.openai import (
    AnswerMessage,
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
    FunctionCall,
    FunctionDelta,
    ToolCall,
)
from jaxserve.server.schema.sampling import (
    GUIDED,
    check_sizes,
    check_stream,
    form_field,
    sampling_params,
)
from jaxserve.server.served.chat_template import check_inputs
from jaxserve.server.served.models import ServedModel
from jaxserve.server.tool_calls.pieces import CallPart, Message, Piece, Thought
from jaxserve.server.tool_calls.tools import ToolUse, read_arguments, tool_use
from jaxserve.structured import StructuredOutputsParams

MAX_MESSAGES = MAX_DOCUMENTS = 4096


def as_template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages to the form of chat templates, in which content is text.

    Raises:
        InvalidRequest: too few or too many, or one without content; see `plain_message`.
    """
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must hold 1 to {MAX_MESSAGES} messages", "messages")
    rendered = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if isinstance(message.content, list):
            fields["content"] = [msgspec.structs.asdict(part) for part in message.content]
        for name in ("name", "tool_call_id"):
            if getattr(message, name) is not None:
                fields[name] = getattr(message, name)
        if message.tool_calls:
            fields["tool_calls"] = [_template_call(call) for call in message.tool_calls]
        reasoning = message.reasoning_content or message.reasoning
        if reasoning and message.role == "assistant":
            # Most templates read the first name, some the second.
            fields["reasoning_content"] = fields["thinking"] = reasoning
        rendered.append(plain_message(fields))
    return rendered


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = call.function
    arguments = read_arguments(function.arguments, function.name)
    made = {"type": "function", "function": {"name": function.name, "arguments": arguments}}
    return made if call.id is None else {"id": call.id, **made}


async def template_options(body: ChatRequest, model: ServedModel) -> dict[str, Any]:
    """Return a request's inputs to the chat template, and the template that it brings.

    Raises:
        InvalidRequest: naming an input that a request may not set.
    """
    own = body.chat_template_kwargs or {}
    check_inputs(own, "chat_template_kwargs")
    options = {**(model.config.default_chat_template_kwargs or {}), **own}
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


def _wanted_logprobs(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", "top_logprobs")
        return None
    return body.top_logprobs or 0


async def prepare(request: EndpointRequest, body: ChatRequest) -> Generation:
    """Do all that comes before the first token: check, count and render.

    Raises:
        ApiError: there is no such model, or the server is stopping.
        InvalidRequest: naming the field.
        Overloaded: the queue is full.
    """
    check_stream(body)
    model = request.find_model(body.model)
    renamed = body.max_completion_tokens is not None
    if renamed:
        request.renamed["max_tokens"] = request.renamed.get("max_tokens", "max_completion_tokens")
    wanted = model.max_tokens(body.max_completion_tokens if renamed else body.max_tokens)
    request.renamed.setdefault("structured_outputs", form_field(body))
    model.tokenizer()  # refuses the request where there is none
    dialect = model.dialect
    tools = tool_use(body, dialect.parser, request.config.enable_auto_tool_choice, dialect.spell)
    sampling = chat_sampling(body, model, wanted, tools)
    if tools is not None and tools.grammar is not None:
        request.renamed["structured_outputs"] = "tools"
    request.admit(model, sampling.n)
    messages = as_template_messages(body.messages)
    options = await template_options(body, model)
    if tools is not None:
        options["tools"] = tools.described
    prompt = await model.render(messages, **options)
    prompt = truncated(prompt, body.truncate_prompt_tokens, model.limits.max_model_len)
    marks = dialect.marks(prompt)
    engine_request = await request.engine_request(model, prompt, sampling, body, marks)
    answer_format = dialect.answer_format(prompt, tools, body.include_reasoning is not False)
    return Generation(model, [engine_request], answer_format)


def chat_sampling(
    body: ChatRequest, model: ServedModel, max_tokens: int | None, tools: ToolUse | None
) -> SamplingParams:
    """Return a chat's settings: those of `sampling_params`, and what tools and thoughts need.

    Raises:
        InvalidRequest: naming the field.
    """
    check_sizes(body, model.limits.vocab_size)
    sampling = sampling_params(
        body, model.default_sampling, max_tokens, _wanted_logprobs(body), body.prompt_logprobs
    )
    if body.thinking_token_budget is not None:
        sampling = replace(sampling, thinking_token_budget=body.thinking_token_budget)
    if model.dialect.shows_special(tools):
        sampling = replace(sampling, skip_special_tokens=False)
    if tools is None or tools.grammar is None:
        return sampling
    field = form_field(body)
    if body.structured_outputs is not None or field in GUIDED:
        raise InvalidRequest(
            f"{field} and calls of tools that must be well formed exclude each other", field
        )
    return replace(sampling, structured_outputs=StructuredOutputsParams(grammar=tools.grammar))


async def chat_completions(http_request: Request) -> Response:
    """Answer a conversation, n times.

    Raises:
        ApiError, InvalidRequest, Overloaded: see `EndpointRequest.parse` and `prepare`.
    """
    request = EndpointRequest(http_request)
    request.renamed |= {"prompt": "messages", "logprobs": "top_logprobs"}
    body = request.parse(ChatRequest)
    if body.echo:
        raise InvalidRequest("echo is not supported for chat", "echo")
    generation = await prepare(request, body)
    formatter = ChatFormatter(body, generation.model.llm.get_tokenizer())
    return await respond(http_request, generation, formatter, bool(body.stream))


class ChatFormatter:
    """Formatter of chat completions.

    Args:
        body: the request.
        tokenizer: spells tokens.
    """

    def __init__(self, body: ChatRequest, tokenizer: Any) -> None:
        self._body = body
        self._texts = TokenTexts(tokenizer, bool(body.return_tokens_as_token_ids))
        self._id = f"chatcmpl-{uuid4().hex}"
        self._ids = bool(body.return_token_ids)
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._continuous = self._usage and bool(options and options.continuous_usage_stats)
        self._sent: list[int] = []  # tokens of each choice that have gone out

    def whole(self, generation: Generation) -> ChatResponse:
        response = ChatResponse(
            self._id,
            generation.created,
            generation.model.name,
            [self._choice(generation, choice) for choice in generation.choices],
            generation.usage(),
        )
        if self._ids:
            response.prompt_token_ids = generation.choices[0].prompt_token_ids
        width, logprobs = self._body.prompt_logprobs, generation.prompt_logprobs[0]
        if width is not None and logprobs is not None:
            prompt = generation.choices[0].prompt_token_ids
            response.prompt_logprobs = self._texts.prompt(prompt, logprobs, width)
        return response

    def _logprobs(self, part: Part | Choice) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return ChatLogprobs(self._texts.chat(part.token_ids, part.logprobs))

    def _choice(self, generation: Generation, drawn: Choice) -> ChatChoice:
        reason, answer = generation.finish_reason(drawn), _answer(drawn.message)
        choice = ChatChoice(drawn.index, answer, self._logprobs(drawn), reason, drawn.stop_reason)
        if self._ids:
            choice.token_ids = drawn.token_ids
        return choice

    def _chunk(self, generation: Generation, choices: list[ChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(self._id, generation.created, generation.model.name, choices)
        if self._continuous:
            chunk.usage = generation.usage(self._sent)
        elif self._usage:
            chunk.usage = None
        return chunk

    def opening(self, generation: Generation) -> bytes:
        chunks = []
        self._sent = [0] * len(generation.choices)
        for choice in generation.choices:
            delta = ChatDelta("assistant", "")
            chunk = self._chunk(generation, [ChunkChoice(choice.index, delta)])
            chunk.prompt_token_ids = choice.prompt_token_ids if self._ids else None
            chunks.append(event(chunk))
        return b"".join(chunks)

    def parts(self, generation: Generation, parts: list[Part]) -> bytes:
        chunks = []
        for part in parts:
            self._sent[part.index] += len(part.token_ids)
            if not (part.pieces or part.finish_reason or self._ids or part.logprobs):
                continue
            choice = ChunkChoice(part.index, _delta(part.pieces), self._logprobs(part))
            if part.finish_reason:
                choice.finish_reason = generation.finish_reason(generation.choices[part.index])
                choice.stop_reason = part.stop_reason
            choice.token_ids = part.token_ids if self._ids else None
            chunks.append(event(self._chunk(generation, [choice])))
        return b"".join(chunks)

    def closing(self, generation: Generation) -> bytes:
        if not self._usage:
            return DONE
        chunk = self._chunk(generation, [])
        chunk.usage = generation.usage()
        return event(chunk) + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE


def _answer(message: Message) -> AnswerMessage:
    """Return a whole message."""
    answer = AnswerMessage(message.content)
    if message.calls:
        answer.content = message.content or None
        answer.tool_calls = [
            ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in message.calls
        ]
    if message.reasoning:
        answer.reasoning = answer.reasoning_content = message.reasoning
    return answer


def _delta(pieces: list[Piece]) -> ChatDelta:
    """Return what is new in a message, with one entry for each call."""
    delta = ChatDelta()
    calls: dict[int, CallDelta] = {}
    for piece in pieces:
        if isinstance(piece, CallPart):
            call = calls.get(piece.index)
            if call is None:
                call = calls[piece.index] = CallDelta(piece.index, FunctionDelta(arguments=""))
            if piece.id is not None:
                call.id, call.type, call.function.name = piece.id, "function", piece.name
            call.function.arguments = (call.function.arguments or "") + piece.arguments
        elif isinstance(piece, Thought):
            delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + piece.text
        else:
            delta.content = (delta.content or "") + piece.text
    if calls:
        delta.tool_calls = list(calls.values())
    return delta
