"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.answers import DONE, event, respond
from jaxserve.server.call import Call
from jaxserve.server.completions import truncated
from jaxserve.server.errors import ApiError
from jaxserve.server.fields import check_stream, sampling_params
from jaxserve.server.generation import Choice, Generation, Part
from jaxserve.server.logprobs import ChatLogprobs, TokenTexts
from jaxserve.server.protocol import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
)

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
        InvalidRequest: none, or content that is not text.
    """
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must hold 1 to {MAX_MESSAGES} messages", "messages")
    rendered = []
    for message in messages:
        one = {"role": "system" if message.role == "developer" else message.role}
        one["content"] = _text_of(message)
        for name in ("name", "tool_call_id"):
            if getattr(message, name) is not None:
                one[name] = getattr(message, name)
        if message.tool_calls:
            one["tool_calls"] = msgspec.to_builtins(message.tool_calls)
        rendered.append(one)
    return rendered


def _text_of(message: ChatMessage) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant":
            return ""
        raise InvalidRequest(f"a {message.role} message needs content", "messages")
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal") or part.text is None:
            raise InvalidRequest(
                f"content of type {part.type[:40]!r} is not supported: only text is", "messages"
            )
    return "".join(part.text or "" for part in content)


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


async def prepare(call: Call, body: ChatRequest) -> Generation:
    """Everything before the first token: check, count, render, queue.

    Raises:
        InvalidRequest, ApiError, Overloaded: nothing was started.
    """
    check_stream(body)
    model = call.find_model(body.model)
    renamed = body.max_completion_tokens is not None
    if renamed:
        call.renamed["max_tokens"] = call.renamed.get("max_tokens", "max_completion_tokens")
    wanted = body.max_completion_tokens if renamed else body.max_tokens
    if body.response_format is not None:
        call.renamed.setdefault("structured_outputs", "response_format")
    sampling = sampling_params(
        body, model.default_sampling, wanted, _wanted_logprobs(body), body.prompt_logprobs
    )
    call.admit(model, sampling.n)
    messages = as_template_messages(body.messages)
    prompt = await model.render(messages, **template_options(body))
    prompt = truncated(prompt, body.truncate_prompt_tokens, model.limits.max_model_len)
    return Generation(model, [await call.request(model, prompt, sampling, body)])


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, n times."""
    call = Call(request)
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

    def whole(self, generation: Generation) -> ChatResponse:
        response = ChatResponse(
            self._id,
            generation.created,
            generation.model.name,
            [self._choice(one) for one in generation.choices],
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

    def _choice(self, one: Choice) -> ChatChoice:
        message = AnswerMessage(one.text)
        choice = ChatChoice(
            one.index, message, self._logprobs(one), one.finish_reason, one.stop_reason
        )
        if self._ids:
            choice.token_ids = one.token_ids
        return choice

    def _chunk(self, generation: Generation, choices: list[ChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(self._id, generation.created, generation.model.name, choices)
        if self._continuous:
            chunk.usage = generation.usage()
        elif self._usage:
            chunk.usage = None
        return chunk

    def opening(self, generation: Generation) -> bytes:
        chunks = []
        for one in generation.choices:
            delta = ChatDelta("assistant", "")
            chunk = self._chunk(generation, [ChunkChoice(one.index, delta)])
            if self._ids:
                chunk.prompt_token_ids = one.prompt_token_ids
            chunks.append(event(chunk))
        return b"".join(chunks)

    def parts(self, generation: Generation, parts: list[Part]) -> bytes:
        chunks = []
        for part in parts:
            if not (part.text or part.finish_reason or self._ids or part.scores):
                continue
            delta = ChatDelta(None, part.text or None)
            choice = ChunkChoice(part.index, delta, self._logprobs(part))
            if part.finish_reason:
                choice.finish_reason = part.finish_reason
                choice.stop_reason = part.stop_reason
            if self._ids:
                choice.token_ids = part.token_ids
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
