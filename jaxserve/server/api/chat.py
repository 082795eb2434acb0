"""POST /v1/chat/completions."""

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
from jaxserve.server.schema.sampling import check_sizes, check_stream, sampling_params
from jaxserve.server.served.models import ServedModel
from jaxserve.server.tool_calls.pieces import CallPart, Message, Piece, Thought
from jaxserve.server.tool_calls.tools import ToolUse, read_arguments, tool_use
from jaxserve.structured import StructuredOutputsParams

MAX_MESSAGES = 4096
# What a template may be told; its own inputs, and what would let a request write it, may not.
_TEMPLATE_KINDS = (bool, int, float, str)
_TEMPLATE_OWN = frozenset(
    "chat_template tokenize tools documents conversation messages add_special_tokens padding "
    "truncation max_length return_tensors return_dict tokenizer_kwargs add_generation_prompt "
    "continue_final_message return_assistant_tokens_mask".split()
)


def as_template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates know them: content is text.

    Raises:
        InvalidRequest: none, or one without content; see `plain_message`.
    """
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must hold 1 to {MAX_MESSAGES} messages", "messages")
    rendered = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if isinstance(message.content, list):
            one["content"] = [msgspec.structs.asdict(part) for part in message.content]
        for name in ("name", "tool_call_id"):
            if getattr(message, name) is not None:
                one[name] = getattr(message, name)
        if message.tool_calls:
            one["tool_calls"] = [_template_call(call) for call in message.tool_calls]
        reasoning = message.reasoning_content or message.reasoning
        if reasoning and message.role == "assistant":
            # The name that templates read, and the one that some of them read instead.
            one["reasoning_content"] = one["thinking"] = reasoning
        rendered.append(plain_message(one))
    return rendered


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = call.function
    arguments = read_arguments(function.arguments, function.name)
    made = {"type": "function", "function": {"name": function.name, "arguments": arguments}}
    return made if call.id is None else {"id": call.id, **made}


def template_options(body: ChatRequest) -> dict[str, Any]:
    """What a request tells the chat template.

    Raises:
        InvalidRequest: naming what a request may not tell it.
    """
    options = dict(body.chat_template_kwargs or {})
    for name, value in options.items():
        if name in _TEMPLATE_OWN or not isinstance(value, _TEMPLATE_KINDS):
            raise InvalidRequest(
                f"chat_template_kwargs may not hold {name[:60]!r}", "chat_template_kwargs"
            )
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
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


async def prepare(call: EndpointRequest, body: ChatRequest) -> Generation:
    """Everything before the first token: check, count, render, queue.

    Raises:
        InvalidRequest, ApiError, Overloaded: nothing was started.
    """
    check_stream(body)
    model = call.find_model(body.model)
    renamed = body.max_completion_tokens is not None
    if renamed:
        call.renamed["max_tokens"] = call.renamed.get("max_tokens", "max_completion_tokens")
    wanted = model.max_tokens(body.max_completion_tokens if renamed else body.max_tokens)
    if body.response_format is not None:
        call.renamed.setdefault("structured_outputs", "response_format")
    model.tokenizer()  # there is nothing to say without one
    talk = model.talk
    tools = tool_use(body, talk.parser, call.config.enable_auto_tool_choice, talk.spell)
    sampling = chat_sampling(body, model, wanted, tools)
    if tools is not None and tools.grammar is not None:
        call.renamed["structured_outputs"] = "tools"
    call.admit(model, sampling.n)
    messages = as_template_messages(body.messages)
    options = template_options(body)
    if tools is not None:
        options["tools"] = tools.described
    prompt = await model.render(messages, **options)
    prompt = truncated(prompt, body.truncate_prompt_tokens, model.limits.max_model_len)
    request = await call.request(model, prompt, sampling, body, talk.marks(prompt))
    reading = talk.reading(prompt, tools, body.include_reasoning is not False)
    return Generation(model, [request], reading)


def chat_sampling(
    body: ChatRequest, model: ServedModel, max_tokens: int | None, tools: ToolUse | None
) -> SamplingParams:
    """A chat's settings: as `sampling_params`, and what tools and thoughts need.

    Raises:
        InvalidRequest: naming the field.
    """
    check_sizes(body, model.limits.vocab_size)
    sampling = sampling_params(
        body, model.default_sampling, max_tokens, _wanted_logprobs(body), body.prompt_logprobs
    )
    if body.thinking_token_budget is not None:
        sampling = replace(sampling, thinking_token_budget=body.thinking_token_budget)
    if model.talk.shows_special(tools):
        sampling = replace(sampling, skip_special_tokens=False)
    if tools is None or tools.grammar is None:
        return sampling
    if body.structured_outputs is not None:
        raise InvalidRequest(
            "structured_outputs and calls of tools that must be well formed exclude each other",
            "structured_outputs",
        )
    return replace(sampling, structured_outputs=StructuredOutputsParams(grammar=tools.grammar))


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, n times."""
    call = EndpointRequest(request)
    call.renamed |= {"prompt": "messages", "logprobs": "top_logprobs"}
    body = call.parse(ChatRequest)
    if body.echo:
        raise InvalidRequest("echo is not supported for chat", "echo")
    generation = await prepare(call, body)
    form = ChatForm(body, generation.model.llm.get_tokenizer())
    return await respond(request, generation, form, bool(body.stream))


class ChatForm:
    """Words a generation as chat completions.

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
            [self._choice(generation, one) for one in generation.choices],
            generation.usage(),
        )
        if self._ids:
            response.prompt_token_ids = generation.choices[0].prompt_token_ids
        width, scores = self._body.prompt_logprobs, generation.prompt_scores[0]
        if width is not None and scores is not None:
            prompt = generation.choices[0].prompt_token_ids
            response.prompt_logprobs = self._texts.prompt(prompt, scores, width)
        return response

    def _logprobs(self, part: Part | Choice) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return ChatLogprobs(self._texts.chat(part.token_ids, part.scores))

    def _choice(self, generation: Generation, one: Choice) -> ChatChoice:
        reason, answer = generation.finish_reason(one), _answer(one.message)
        choice = ChatChoice(one.index, answer, self._logprobs(one), reason, one.stop_reason)
        if self._ids:
            choice.token_ids = one.token_ids
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
        for one in generation.choices:
            delta = ChatDelta("assistant", "")
            chunk = self._chunk(generation, [ChunkChoice(one.index, delta)])
            chunk.prompt_token_ids = one.prompt_token_ids if self._ids else None
            chunks.append(event(chunk))
        return b"".join(chunks)

    def parts(self, generation: Generation, parts: list[Part]) -> bytes:
        chunks = []
        for part in parts:
            self._sent[part.index] += len(part.token_ids)
            if not (part.pieces or part.finish_reason or self._ids or part.scores):
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
    """A whole message."""
    answer = AnswerMessage(message.content)
    if message.calls:
        answer.content = message.content or None
        answer.tool_calls = [
            ToolCall(id=one.id, function=FunctionCall(name=one.name, arguments=one.arguments))
            for one in message.calls
        ]
    if message.reasoning:
        answer.reasoning = answer.reasoning_content = message.reasoning
    return answer


def _delta(pieces: list[Piece]) -> ChatDelta:
    """What is new in a message. More of one call is one entry."""
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
