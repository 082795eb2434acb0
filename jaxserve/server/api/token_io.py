"""Endpoints of vLLM that render prompts to token ids, and that complete token ids."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.request import SamplingParams
from jaxserve.server.api import anthropic, chat, completions
from jaxserve.server.api.conversations import as_tools
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.generation import Choice, ChoicePart, Generation
from jaxserve.server.api.streaming import DONE, ChoiceFormatter, event, json_response, respond
from jaxserve.server.schema import generate as schema
from jaxserve.server.schema.anthropic import MessagesRequest
from jaxserve.server.schema.decode import to_schema
from jaxserve.server.schema.logprobs import ChatLogprobs, rows
from jaxserve.server.schema.openai import ChatRequest, CompletionRequest
from jaxserve.server.schema.sampling import check_sizes, form_field, most_tokens, sampling_params
from jaxserve.settings.checks import exact_int
from jaxserve.settings.compat import endpoint_fields, refuse_unsupported

_SAMPLING = {field.name for field in fields(SamplingParams)}


async def render_completions(http_request: Request) -> Response:
    """Endpoint `POST /v1/completions/render`: answer with a completion request as token ids.

    For each prompt, the answer has a request for `POST /inference/v1/generate`: the token ids and
    the sampling parameters. No tokens are generated.
    """
    request = EndpointRequest(http_request)
    body = request.parse(CompletionRequest, endpoint_fields("completions"))
    generation, _ = await completions.prepare_completions(request, body, scores_whole=False)
    name = request.answer_id("cmpl", body.request_id)
    prepared = generation.requests
    names = [f"{name}-{n}" for n in range(len(prepared))] if len(prepared) > 1 else [name]
    pairs = zip(prepared, names, strict=True)
    return json_response([schema.rendered(each, own_name, body) for each, own_name in pairs])


async def render_chat(http_request: Request) -> Response:
    """Endpoint `POST /v1/chat/completions/render`: answer with a chat request as token ids.

    The answer is a request for `POST /inference/v1/generate`: the token ids of the rendered prompt
    and the sampling parameters. No tokens are generated.
    """
    request = EndpointRequest(http_request)
    request.renamed |= {"prompt": "messages", "logprobs": "top_logprobs"}
    body = request.parse(ChatRequest, endpoint_fields("chat"))
    return await _render(request, as_tools(body), body.request_id)


async def render_messages(http_request: Request) -> Response:
    """Endpoint `POST /v1/messages/render`: answer with a request of Anthropic's API as token ids.

    The answer is a request for `POST /inference/v1/generate`, with the token ids of the rendered
    prompt and the sampling parameters.
    """
    request = anthropic.renaming_request(http_request)
    body = request.parse(MessagesRequest, endpoint_fields("messages"))
    return await _render(request, await anthropic.template_chat(request, body), None)


async def _render(request: EndpointRequest, body: ChatRequest, request_id: str | None) -> Response:
    generation = await chat.prepare(request, body)
    name = request.answer_id("chatcmpl", request_id)
    response = schema.rendered(generation.requests[0], name, body)
    response.return_token_ids = body.return_token_ids
    return json_response(response)


async def generate(http_request: Request) -> Response:
    """Endpoint `POST /inference/v1/generate`: complete a prompt of token ids with token ids.

    The answer is a JSON document, or a stream of events if the request asks for it.
    """
    request = EndpointRequest(http_request)
    body = request.parse(schema.GenerateRequest, endpoint_fields("generate"))
    request.renamed["prompt"] = "token_ids"
    model = request.find_model(body.model)
    sent = body.sampling_params
    refuse_unsupported(sent, endpoint_fields("sampling_params"), " by this server")
    names = {*CompletionRequest.__struct_encode_fields__, *_SAMPLING}
    request.check_fields(sent, names, "sampling_params")
    inner = {name: sent[name] for name in sent.keys() - {"prompt", "model", "stream", "suffix"}}
    shared = {"cache_salt": body.cache_salt, "priority": body.priority}
    settings = to_schema({**inner, **shared, "prompt": body.token_ids}, CompletionRequest)
    check_sizes(settings, model.limits.vocab_size)
    request.renamed["structured_outputs"] = form_field(settings)
    sampling = sampling_params(
        settings,
        model.default_sampling,
        model.max_tokens(most_tokens(settings, request.renamed)),
        settings.logprobs,
        settings.prompt_logprobs,
    )
    budget = sent.get("thinking_token_budget")
    if budget not in (None, -1):
        exact_int(budget, "thinking_token_budget", 0, 2**31 - 1)
        sampling = replace(sampling, thinking_token_budget=budget)
    if not body.token_ids:
        raise InvalidRequest("token_ids must hold at least one token", "token_ids")
    request.admit(model, sampling.n)
    marks = model.dialect.marks(body.token_ids)
    engine_request = await request.engine_request(model, body.token_ids, sampling, settings, marks)
    formatter = GenerateFormatter(
        body, request.answer_id(None, body.request_id), model.llm.get_tokenizer(), settings
    )
    return await respond(
        http_request, Generation(model, [engine_request]), formatter, bool(body.stream)
    )


class GenerateFormatter(ChoiceFormatter):
    """Formatter of the answer of `POST /inference/v1/generate`, as a document or as stream events.

    Choices have token ids, and text with the output mode "text".

    Args:
        body: the request.
        request_id: id of the answer.
        tokenizer: spells tokens in log-probabilities. None for a model without a tokenizer.
        settings: the fields of the request's `sampling_params`.
    """

    def __init__(
        self,
        body: schema.GenerateRequest,
        request_id: str,
        tokenizer: Any,
        settings: CompletionRequest,
    ) -> None:
        super().__init__(body, tokenizer, request_id)
        self._body = body
        self._settings = settings

    def _choice(self, part: ChoicePart | Choice) -> schema.GenerateChoice:
        choice = schema.GenerateChoice(part.index, part.token_ids)
        choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason
        if self._body.output_mode == "text":
            choice.text = part.text
        if self._settings.logprobs is None:
            return choice
        if self._body.output_mode == "text":
            choice.logprobs = ChatLogprobs(self._texts.chat(part.token_ids, part.logprobs))
        else:
            choice.logprobs = _scores(part)
        return choice

    def _response(
        self, generation: Generation, choices: list[schema.GenerateChoice]
    ) -> schema.GenerateResponse:
        head = self._id, choices, self._body.output_mode
        return schema.GenerateResponse(*head, weight_version=generation.weight_version)

    def whole(self, generation: Generation) -> schema.GenerateResponse:
        choices = [self._choice(choice) for choice in generation.choices]
        response = self._response(generation, choices)
        response.usage = generation.usage()
        response.model, response.created = generation.model.name, generation.created
        if self._ids:
            response.prompt_token_ids = generation.choices[0].prompt_token_ids
        width = self._settings.prompt_logprobs
        response.prompt_logprobs = self._of_prompt(generation, generation.choices[0], width)
        return response

    def opening(self, generation: Generation) -> bytes:
        opening = super().opening(generation)
        if not self._ids:
            return opening
        response = self._response(generation, [])
        response.prompt_token_ids = generation.choices[0].prompt_token_ids
        return opening + event(response)

    def _part(self, generation: Generation, part: ChoicePart) -> bytes:
        return event(self._event(generation, [self._choice(part)]))

    def closing(self, generation: Generation) -> bytes:
        if not self._usage:
            return DONE
        response = self._response(generation, [])
        response.usage = generation.usage()
        return event(response) + DONE


def _scores(part: ChoicePart | Choice) -> schema.GenerateLogprobs:
    content = []
    for row in rows(part.token_ids, part.logprobs):
        drawn = schema.ScoredToken(row.token, row.logprob, row.rank)
        best = [schema.ScoredToken(token, value, n) for n, (token, value) in enumerate(row.best, 1)]
        others = [scored for scored in best if scored.token_id != row.token]
        content.append(schema.DrawnToken(row.token, row.logprob, row.rank, [drawn, *others]))
    return schema.GenerateLogprobs(content)
