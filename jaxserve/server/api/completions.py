"""Endpoint POST /v1/completions."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine.prompts import truncated
from jaxserve.errors import InvalidRequest
from jaxserve.request import Request as EngineRequest
from jaxserve.request import SamplingParams
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.generation import Choice, ChoicePart, Generation
from jaxserve.server.api.infill import end_tokens, infill_prompt
from jaxserve.server.api.streaming import ChoiceFormatter, event, respond
from jaxserve.server.api.whole_context import WholeContextGeneration, draw_last, fills_context
from jaxserve.server.schema import sampling as sampling_fields
from jaxserve.server.schema.logprobs import CompletionLogprobs, CompletionTokens, joined
from jaxserve.server.schema.openai import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from jaxserve.server.served.models import ServedModel
from jaxserve.settings.compat import endpoint_fields

DEFAULT_MAX_TOKENS = 16


def as_prompts(prompt: str | list) -> list[str | list[int]]:
    """Return the prompts of a completion request as a list of texts or lists of token ids.

    Args:
        prompt: a text, a list of token ids, or a list of texts or of such lists.

    Raises:
        InvalidRequest: the list is empty, or mixes texts and token ids.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if not kinds:
        raise InvalidRequest("prompt is empty; it needs at least one token", "prompt")
    if kinds == {int}:
        return [prompt]
    if kinds in ({str}, {list}):
        return prompt
    raise InvalidRequest("prompt must hold text only, token ids only, or lists of those", "prompt")


async def completions(http_request: Request) -> Response:
    """Endpoint `POST /v1/completions`: complete each prompt `n` times.

    The answer is a JSON document, or a stream of events if the request asks for it.
    """
    request = EndpointRequest(http_request)
    body = request.parse(CompletionRequest, endpoint_fields("completions"))
    generation, texts = await prepare_completions(request, body)
    answer_id = request.answer_id("cmpl", body.request_id)
    sampling, tokenizer = generation.requests[0].sampling, generation.model.llm.get_tokenizer()
    formatter = CompletionFormatter(body, texts, sampling, tokenizer, answer_id)
    return await respond(http_request, generation, formatter, bool(body.stream))


async def prepare_completions(
    request: EndpointRequest, body: CompletionRequest, scores_whole: bool = True
) -> tuple[Generation, list[str]]:
    """Check a completion request and tokenize its prompts.

    Args:
        scores_whole: accept prompts as long as the context if the request asks only for the echo of
            the prompts and their log-probabilities.

    Returns:
        The generation of the completions, not yet started. For each prompt, the text that its
        completions repeat ("" without `echo`).

    Raises:
        ApiError, InvalidRequest, Overloaded: see `jaxserve.server.api`.
    """
    sampling_fields.check_stream(body)
    request.renamed["structured_outputs"] = sampling_fields.form_field(body)
    model = request.find_model(body.model)
    prompts = as_prompts(body.prompt)
    max_tokens = sampling_fields.most_tokens(body, request.renamed)
    max_tokens = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    # The engine samples at least one token, which the answer to a mere echo omits.
    max_tokens = 1 if is_echo_only(body) else model.max_tokens(max_tokens)
    # An echoed prompt gets as many alternatives as the answer, and errors name logprobs.
    width = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        width = wider(body.logprobs, width)
    sampling_fields.check_sizes(body, model.limits.vocab_size)
    sampling = sampling_fields.sampling_params(
        body, model.default_sampling, max_tokens, body.logprobs, width
    )
    if sampling.logprob_token_ids and is_echo_only(body):
        name = "logprob_token_ids"
        raise InvalidRequest(f"{name} needs tokens to score: max_tokens is 0", name)
    if body.suffix:
        sampling = sampling_fields.with_ends(sampling, end_tokens(model.tokenizer()))
    if body.best_of is not None and body.best_of != sampling.n:
        raise InvalidRequest("best_of must be equal to n", "best_of")
    request.admit(model, len(prompts) * sampling.n)
    engine_requests: list[EngineRequest] = []
    filling: dict[int, list[int]] = {}  # prompts as long as the context, by their numbers
    texts: list[str] = []
    for prompt in prompts:
        ids = await _token_ids(model, prompt, body)
        longest = model.limits.max_model_len
        used = truncated(ids, body.truncate_prompt_tokens, longest, body.truncation_side)
        whole = prompt if len(used) == len(ids) else used
        settings = sampling
        if scores_whole and is_echo_only(body) and fills_context(model, used):
            filling[len(engine_requests)] = used
            settings, used = draw_last(used, sampling), used[:-1]
        engine_requests.append(await request.engine_request(model, used, settings, body))
        texts.append(_text(model, whole, sampling.skip_special_tokens) if body.echo else "")
    if filling:
        return WholeContextGeneration(model, engine_requests, filling), texts
    return Generation(model, engine_requests), texts


async def _token_ids(
    model: ServedModel, prompt: str | list[int], body: CompletionRequest
) -> list[int]:
    if body.suffix:
        if not isinstance(prompt, str):
            raise InvalidRequest("suffix needs a prompt of text", "suffix")
        model.check_length(len(prompt) + len(body.suffix), "suffix")
        return await asyncio.to_thread(infill_prompt, model.tokenizer(), prompt, body.suffix)
    if isinstance(prompt, str):
        return await model.encode(prompt, body.add_special_tokens is not False)
    return prompt


def wider(drawn: int, prompt: int | None) -> int:
    """Return the larger of two numbers of alternatives per token, where -1 means all tokens.

    A value below -1 is returned as it is, so that the engine refuses it.

    Args:
        drawn: number for generated tokens.
        prompt: number for prompt tokens, or None.
    """
    if prompt is None or drawn < -1:
        return drawn
    if prompt < -1:
        return prompt
    return -1 if -1 in (drawn, prompt) else max(drawn, prompt)


def _text(model: ServedModel, prompt: str | list[int], skip_special_tokens: bool) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer().decode(prompt, skip_special_tokens)


def is_echo_only(body: CompletionRequest) -> bool:
    """Return whether a completion request has `echo` and asks for no generated tokens."""
    return bool(body.echo) and sampling_fields.most_tokens(body) == 0


class CompletionFormatter(ChoiceFormatter):
    """Formatter of the answer of the completions API, as one document or as stream events.

    Args:
        body: the completion request, which selects the optional fields.
        echoes: for each prompt, the text that its completions repeat.
        sampling: sampling parameters of the request, for `n` and `skip_special_tokens`.
        tokenizer: spells tokens in log-probabilities. None for a model without a tokenizer.
        answer_id: id of the answer.
    """

    def __init__(
        self,
        body: CompletionRequest,
        echoes: list[str],
        sampling: SamplingParams,
        tokenizer: Any,
        answer_id: str,
    ) -> None:
        self._echoes_logprobs = bool(body.echo) and body.logprobs is not None
        shows_prompt = self._echoes_logprobs or body.prompt_logprobs is not None
        super().__init__(body, tokenizer, answer_id, shows_prompt)
        self._body = body
        self._echo_only = is_echo_only(body)
        self._echoes = echoes
        # Number of alternatives shown for each token: all tokens of logprob_token_ids, if given.
        self._width = -1 if body.logprob_token_ids else body.logprobs
        numbers = range(len(echoes) * sampling.n)
        self._fresh = set(numbers)  # choices without an event
        skips_special = sampling.skip_special_tokens
        self._tokens = [CompletionTokens(self._texts, skips_special) for _ in numbers]

    def _response(self, generation: Generation, choices: list) -> CompletionResponse:
        head = self._id, generation.created, generation.model.name, choices
        return CompletionResponse(*head, weight_version=generation.weight_version)

    def _used(self, generation: Generation, sent: list[int] | None = None) -> Usage:
        usage = generation.usage(sent)
        if self._echo_only:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _logprobs(
        self, generation: Generation, part: ChoicePart | Choice, is_first: bool
    ) -> CompletionLogprobs | None:
        width = self._body.logprobs
        if width is None:
            return None
        choice, tokens = generation.choices[part.index], self._tokens[part.index]
        before = None
        logprobs = generation.prompt_logprobs[choice.prompt]
        if self._echoes_logprobs and is_first and logprobs is not None:
            before = tokens.prompt(choice.prompt_token_ids, logprobs, width)
            if self._echo_only:
                return before
        return joined(before, tokens.drawn(part.token_ids, part.logprobs, self._width or 0))

    def _text(self, generation: Generation, part: ChoicePart | Choice, is_first: bool) -> str:
        echo = self._echoes[generation.choices[part.index].prompt] if is_first else ""
        return echo + ("" if self._echo_only else part.text)

    def _choice(
        self, generation: Generation, part: ChoicePart | Choice, is_first: bool
    ) -> CompletionChoice:
        drawn = generation.choices[part.index]
        text = self._text(generation, part, is_first)
        logprobs = self._logprobs(generation, part, is_first)
        choice = CompletionChoice(part.index, text, logprobs, part.finish_reason, part.stop_reason)
        if self._echo_only:
            choice.finish_reason, choice.stop_reason = "length", None
        if self._ids:
            choice.token_ids = [] if self._echo_only else part.token_ids
            choice.prompt_token_ids = drawn.prompt_token_ids if is_first else None
        if is_first:
            choice.prompt_logprobs = self._of_prompt(generation, drawn, self._body.prompt_logprobs)
        return choice

    def whole(self, generation: Generation) -> CompletionResponse:
        choices = [self._choice(generation, drawn, True) for drawn in generation.choices]
        response = self._response(generation, choices)
        response.usage = self._used(generation)
        response.service_tier = response.kv_transfer_params = None
        response.metrics = generation.timing()
        return response

    def _part(self, generation: Generation, part: ChoicePart) -> bytes:
        is_first = part.index in self._fresh
        self._fresh.discard(part.index)
        shows_prompt = is_first and self._body.prompt_logprobs is not None
        text = self._text(generation, part, is_first)
        if not (text or part.finish_reason or self._ids or part.logprobs or shows_prompt):
            return b""
        choice = self._choice(generation, part, is_first)
        if not shows_prompt:
            choice.prompt_logprobs = msgspec.UNSET
        return event(self._event(generation, [choice]))
