"""POST /v1/completions."""

from __future__ import annotations

from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.request import Request as EngineRequest
from jaxserve.request import exact_int
from jaxserve.server.answers import DONE, event, respond
from jaxserve.server.call import Call
from jaxserve.server.errors import ApiError
from jaxserve.server.fields import check_stream_options, sampling_params
from jaxserve.server.generation import Generation, Part
from jaxserve.server.protocol import CompletionChoice, CompletionRequest, CompletionResponse

DEFAULT_MAX_TOKENS = 16


def as_prompts(prompt: str | list) -> list[str | list[int]]:
    """The prompts of a request, which may be one or a list: text, or token ids.

    Raises:
        InvalidRequest: no prompt, or a list of mixed kinds.
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


async def completions(request: Request) -> Response:
    """Complete each prompt n times."""
    call = Call(request)
    body = call.parse(CompletionRequest)
    check_stream_options(body)
    if body.response_format is not None:
        call.renamed["structured_outputs"] = "response_format"
    model = call.find_model(body.model)
    prompts = as_prompts(body.prompt)
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = sampling_params(body, model.default_sampling, wanted)
    if body.best_of is not None and body.best_of != sampling.n:
        raise InvalidRequest("best_of must be equal to n", "best_of")
    call.admit(model, len(prompts) * sampling.n)
    requests: list[EngineRequest] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = await model.encode(prompt, body.add_special_tokens is not False)
        prompt = truncated(prompt, body.truncate_prompt_tokens, model.limits.max_model_len)
        requests.append(await call.request(model, prompt, sampling, body))
    texts = [_text(call, model, one) if body.echo else "" for one in prompts]
    form = CompletionForm(body, texts, sampling.n)
    return await respond(request, Generation(model, requests), form, bool(body.stream))


def truncated(prompt: list[int], keep: int | None, max_model_len: int) -> list[int]:
    """The last `keep` tokens of a prompt; -1 keeps what leaves room for one token of answer."""
    if keep is None:
        return prompt
    keep = exact_int(keep, "truncate_prompt_tokens", -1, max_model_len - 1)
    if keep == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens"
        )
    return prompt[-(max_model_len - 1 if keep == -1 else keep) :]


def _text(call: Call, model, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer().decode(prompt)


class CompletionForm:
    """Words a generation as completions.

    Args:
        body: the request.
        echoes: what each prompt's completions begin with.
        n: completions of each prompt.
    """

    def __init__(self, body: CompletionRequest, echoes: list[str], n: int) -> None:
        self._id = f"cmpl-{uuid4().hex}"
        self._ids = bool(body.return_token_ids)
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._continuous = self._usage and bool(options and options.continuous_usage_stats)
        self._echoes = [echo for echo in echoes for _ in range(n)]
        self._fresh = set(range(len(self._echoes)))

    def _response(self, generation: Generation, choices: list) -> CompletionResponse:
        return CompletionResponse(self._id, generation.created, generation.model.name, choices)

    def whole(self, generation: Generation) -> CompletionResponse:
        choices = []
        for one in generation.choices:
            text = self._echoes[one.index] + one.text
            choice = CompletionChoice(one.index, text, None, one.finish_reason, one.stop_reason)
            if self._ids:
                choice.token_ids = one.token_ids
                choice.prompt_token_ids = one.prompt_token_ids
            choices.append(choice)
        response = self._response(generation, choices)
        response.usage = generation.usage()
        return response

    def opening(self, generation: Generation) -> bytes:
        return b""

    def parts(self, generation: Generation, parts: list[Part]) -> bytes:
        return b"".join([self._part(generation, part) for part in parts])

    def _part(self, generation: Generation, part: Part) -> bytes:
        text = part.text
        is_first = part.index in self._fresh
        if is_first:
            self._fresh.discard(part.index)
            text = self._echoes[part.index] + text
        if not (text or part.finish_reason or self._ids):
            return b""
        choice = CompletionChoice(part.index, text, None, part.finish_reason, part.stop_reason)
        if self._ids:
            choice.token_ids = part.token_ids
            if is_first:
                choice.prompt_token_ids = generation.choices[part.index].prompt_token_ids
        response = self._response(generation, [choice])
        if self._continuous:
            response.usage = generation.usage()
        elif self._usage:
            response.usage = None
        return event(response)

    def closing(self, generation: Generation) -> bytes:
        if not self._usage:
            return DONE
        response = self._response(generation, [])
        response.usage = generation.usage()
        return event(response) + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE
