"""Endpoint POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.request import SamplingParams
from jaxserve.server.api import conversations
from jaxserve.server.api.chat_calls import ChatCalls
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.generation import Choice, ChoicePart, Generation
from jaxserve.server.api.streaming import ChoiceFormatter, event, respond
from jaxserve.server.schema import openai
from jaxserve.server.schema import sampling as sampling_fields
from jaxserve.server.schema.logprobs import ChatLogprobs
from jaxserve.server.served.models import ServedModel
from jaxserve.server.tool_calls.tools import ToolUse, tool_use
from jaxserve.settings.compat import endpoint_fields
from jaxserve.structured import StructuredOutputsParams


def _wanted_logprobs(body: openai.ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", "top_logprobs")
        return None
    return body.top_logprobs or 0


async def prepare(request: EndpointRequest, body: openai.ChatRequest) -> Generation:
    """Check a chat request, render its conversation to a prompt, and return its generation.

    The generation is not started yet. Tools and structured outputs are compiled on another thread.

    Args:
        request: the HTTP request.
        body: body of the chat request.

    Raises:
        ApiError: 404, there is no such model. 503, the server is stopping.
        InvalidRequest: a field is wrong, which the error names.
        Overloaded: the queue is full.
    """
    sampling_fields.check_stream(body)
    model = request.find_model(body.model)
    max_tokens = model.max_tokens(sampling_fields.most_tokens(body, request.renamed))
    request.renamed.setdefault("structured_outputs", sampling_fields.form_field(body))
    model.tokenizer()  # raises if the model has no tokenizer
    dialect = model.dialect
    may_choose = request.config.enable_auto_tool_choice
    use = partial(tool_use, body, dialect.parser, may_choose, dialect.spell, model.schemas)
    # Schemas of new tools are compiled, which takes from milliseconds to a second.
    tools = await asyncio.to_thread(use) if body.tools else use()
    sampling = chat_sampling(body, model, max_tokens, tools)
    if tools is not None and tools.grammar is not None:
        request.renamed["structured_outputs"] = "tools"
    request.admit(model, sampling.n)
    options = await conversations.template_options(body, model)
    if tools is not None:
        options["tools"] = tools.described
    prompt = await conversations.render(model, body.messages, body, options)
    marks = dialect.marks(prompt, tools, sampling.structured_outputs is not None)
    engine_requests = [await request.engine_request(model, prompt, sampling, body, marks)]
    formats = [dialect.answer_format(prompt, tools, body.include_reasoning is not False)]
    return Generation(model, engine_requests, formats)


def chat_sampling(
    body: openai.ChatRequest, model: ServedModel, max_tokens: int | None, tools: ToolUse | None
) -> SamplingParams:
    """Return the sampling parameters of a chat request, extended for its tools and thoughts.

    Beside the fields that `sampling_params` reads, they hold the thinking budget, end tokens of the
    model's dialect, and the grammar of forced tool calls.

    Args:
        max_tokens: maximum number of generated tokens, or None for the limit of the context.
        tools: how the answer may use tools, or None if it may not.

    Raises:
        InvalidRequest: a field is wrong, which the error names.
    """
    sampling_fields.check_sizes(body, model.limits.vocab_size)
    sampling = sampling_fields.sampling_params(
        body, model.default_sampling, max_tokens, _wanted_logprobs(body), body.prompt_logprobs
    )
    if body.thinking_token_budget not in (None, -1):  # unlimited, as vLLM has it
        sampling = replace(sampling, thinking_token_budget=body.thinking_token_budget)
    if model.dialect.shows_special(tools):
        sampling = replace(sampling, skip_special_tokens=False)
    ends = [*(sampling.stop_token_ids or ()), *model.limits.eos_token_ids]
    if more := [token for token in model.dialect.stop_token_ids if token not in ends]:
        sampling = sampling_fields.with_ends(sampling, more)
    if tools is None or tools.grammar is None:
        return sampling
    field = sampling_fields.form_field(body)
    if body.structured_outputs is not None or field in sampling_fields.GUIDED:
        raise InvalidRequest(
            f"{field} and calls of tools that must be well formed exclude each other", field
        )
    return replace(sampling, structured_outputs=StructuredOutputsParams(grammar=tools.grammar))


async def chat_completions(http_request: Request) -> Response:
    """Endpoint `POST /v1/chat/completions`: answer a conversation with `n` messages.

    The answer is a JSON document, or a stream of events if the request asks for it.
    """
    request = EndpointRequest(http_request)
    request.renamed |= {"prompt": "messages", "logprobs": "top_logprobs"}
    body = request.parse(openai.ChatRequest, endpoint_fields("chat"))
    if body.functions:
        request.renamed |= {"tools": "functions", "tool_choice": "function_call"}
    chat = conversations.as_tools(body)
    if body.echo and body.prompt_logprobs is None and body.logprobs and not body.stream:
        chat.prompt_logprobs = body.top_logprobs or 0
        request.renamed["prompt_logprobs"] = "echo"
    generation = await prepare(request, chat)
    echo = echo_of(chat, request.config.response_role)
    tokenizer = generation.model.llm.get_tokenizer()
    answer_id = request.answer_id("chatcmpl", chat.request_id)
    formatter = ChatFormatter(chat, tokenizer, answer_id, echo)
    return await respond(http_request, generation, formatter, bool(chat.stream))


@dataclass(frozen=True)
class Echo:
    """Role of the messages in the answer to a chat request, and text that they begin with.

    The text is that of the request's last message with `echo`, otherwise "".
    """

    role: str = "assistant"
    text: str = ""


def echo_of(body: openai.ChatRequest, role: str) -> Echo:
    """Return the role of the answers to a chat request, and the text that they repeat.

    By vLLM's rules, answers with `echo` repeat the request's last message if it has their role.

    Args:
        role: role of answers that begin a new message. Answers that continue the last message have
            its role.
    """
    begins = body.add_generation_prompt is not False and not body.continue_final_message
    last = body.messages[-1]
    role = role if begins else last.role
    if not body.echo or last.role != role:
        return Echo(role)
    return Echo(role, str(conversations.as_template_messages([last])[0]["content"]))


class ChatFormatter(ChoiceFormatter):
    """Formatter of the answer of the chat API, as one document or as stream events.

    Args:
        body: the chat request, which selects the optional fields.
        tokenizer: spells tokens in log-probabilities.
        answer_id: id of the answer.
        echo: role of the messages, and the text that they repeat.
    """

    def __init__(
        self, body: openai.ChatRequest, tokenizer: Any, answer_id: str, echo: Echo
    ) -> None:
        self._owes_prompt = body.prompt_logprobs is not None
        super().__init__(body, tokenizer, answer_id, self._owes_prompt)
        self._body = body
        self._tokenizer = tokenizer
        self._echo = echo
        self._is_older = bool(body.functions)
        self._calls = ChatCalls(body.tools or [])

    def whole(self, generation: Generation) -> openai.ChatResponse:
        response = openai.ChatResponse(
            self._id,
            generation.created,
            generation.model.name,
            [self._choice(generation, choice) for choice in generation.choices],
            generation.usage(),
            weight_version=generation.weight_version,
        )
        if self._ids:
            response.prompt_token_ids = generation.choices[0].prompt_token_ids
        if self._body.return_prompt_text:
            response.prompt_text = self._prompt_text(generation)
        width = self._body.prompt_logprobs
        response.prompt_logprobs = self._of_prompt(generation, generation.choices[0], width)
        response.metrics = generation.timing()
        return response

    def _prompt_text(self, generation: Generation) -> str:
        return self._tokenizer.decode(generation.choices[0].prompt_token_ids, False)

    def _logprobs(self, part: ChoicePart | Choice) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        listed = bool(self._body.logprob_token_ids)  # vLLM shows the sampled token as one of them
        return ChatLogprobs(self._texts.chat(part.token_ids, part.logprobs, listed))

    def _choice(self, generation: Generation, drawn: Choice) -> openai.ChatChoice:
        reason, answer = generation.finish_reason(drawn), self._calls.answer(drawn.message)
        answer.role = self._echo.role
        if self._echo.text:
            answer.content = self._echo.text + (answer.content or "")
        if self._is_older and answer.tool_calls:
            call = drawn.message.calls[0]
            answer.function_call = openai.FunctionCall(name=call.name, arguments=call.arguments)
            answer.tool_calls = msgspec.UNSET
            reason = "function_call" if reason == "tool_calls" else reason
        choice = openai.ChatChoice(
            drawn.index, answer, self._logprobs(drawn), reason, drawn.stop_reason
        )
        if self._ids:
            choice.token_ids = drawn.token_ids
        return choice

    def _response(
        self, generation: Generation, choices: list[openai.ChunkChoice]
    ) -> openai.ChatChunk:
        head = self._id, generation.created, generation.model.name, choices
        return openai.ChatChunk(*head, weight_version=generation.weight_version)

    def _event(self, generation: Generation, choices: list[openai.ChunkChoice]) -> openai.ChatChunk:
        chunk = super()._event(generation, choices)
        if self._owes_prompt and generation.prompt_logprobs[0] is not None:
            width, self._owes_prompt = self._body.prompt_logprobs, False
            chunk.prompt_logprobs = self._of_prompt(generation, generation.choices[0], width)
        return chunk

    def opening(self, generation: Generation) -> bytes:
        chunks = [super().opening(generation)]
        for choice in generation.choices:
            delta = openai.ChatDelta(self._echo.role, "")
            chunk = self._event(generation, [openai.ChunkChoice(choice.index, delta)])
            chunk.prompt_token_ids = choice.prompt_token_ids if self._ids else None
            if self._body.return_prompt_text:
                chunk.prompt_text = self._prompt_text(generation)
            chunks.append(event(chunk))
            if self._echo.text:
                repeated = openai.ChunkChoice(
                    choice.index, openai.ChatDelta(content=self._echo.text)
                )
                chunks.append(event(self._event(generation, [repeated])))
        return b"".join(chunks)

    def _part(self, generation: Generation, part: ChoicePart) -> bytes:
        if not (
            part.pieces or self._owes_prompt or part.finish_reason or self._ids or part.logprobs
        ):
            return b""
        choice = openai.ChunkChoice(part.index, self._calls.delta(part), self._logprobs(part))
        if part.finish_reason:
            choice.finish_reason = generation.finish_reason(generation.choices[part.index])
            choice.stop_reason = part.stop_reason
        if self._is_older:
            _make_older(choice)
        choice.token_ids = part.token_ids if self._ids else None
        return event(self._event(generation, [choice]))


def _make_older(choice: openai.ChunkChoice) -> None:
    delta = choice.delta
    if delta.tool_calls:
        delta.function_call, delta.tool_calls = delta.tool_calls[0].function or None, None
    if choice.finish_reason == "tool_calls":
        choice.finish_reason = "function_call"
