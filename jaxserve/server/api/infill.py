"""Endpoint POST /infill: llama.cpp's, text for the gap between two texts."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.generation import Choice, Generation, Part
from jaxserve.server.api.streaming import event, respond
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.openai import Sampling
from jaxserve.server.schema.sampling import (
    check_sizes,
    form_field,
    most_tokens,
    sampling_params,
    with_ends,
)
from jaxserve.settings.compat import endpoint_fields
from jaxserve.text.infill import end_tokens, infill_prompt


class File(msgspec.Struct, kw_only=True):
    """Text of another file, for the model to see."""

    text: str
    filename: str = ""


class InfillRequest(Sampling, kw_only=True):
    """Body of POST /infill: texts around a gap, the beginning of what fills it, other files."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: list[File] | None = None


class InfillResponse(msgspec.Struct):
    """Answer of POST /infill, or one event of it: `stop` marks the last, which has the counts."""

    content: str
    model: str
    stop: bool
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    stop_type: str = "none"
    stopping_word: str = ""


async def infill(http_request: Request) -> Response:
    """Answer with the text of a gap.

    Raises: as `completions.completions`.
    """
    request = EndpointRequest(http_request)
    body = request.parse(InfillRequest, endpoint_fields("infill"))
    request.renamed |= {"prompt": "input_prefix", "suffix": "input_suffix"}
    request.renamed["structured_outputs"] = form_field(body)
    model = request.find_model(body.model)
    wanted = model.max_tokens(most_tokens(body, request.renamed))
    check_sizes(body, model.limits.vocab_size)
    sampling = sampling_params(body, model.default_sampling, wanted)
    request.admit(model, 1)
    tokenizer = model.tokenizer()
    files = "".join(f"{file.filename}\n{file.text}\n" for file in body.input_extra or ())
    before = files + body.input_prefix
    model.check_length(len(before) + len(body.input_suffix) + len(body.prompt), "input_prefix")

    def encode() -> list[int]:
        ids = infill_prompt(tokenizer, before, body.input_suffix)
        return ids + (tokenizer.encode(body.prompt, False) if body.prompt else [])

    ids = await asyncio.to_thread(encode)
    sampling = with_ends(sampling, end_tokens(tokenizer))
    generation = Generation(model, [await request.engine_request(model, ids, sampling, body)])
    return await respond(http_request, generation, InfillFormatter(), bool(body.stream))


class InfillFormatter:
    """Formatter of llama.cpp's completions."""

    def whole(self, generation: Generation) -> InfillResponse:
        choice = generation.choices[0]
        return self._last(generation, choice, choice.text)

    def _last(self, generation: Generation, choice: Choice, text: str) -> InfillResponse:
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        kind = "limit" if choice.finish_reason == "length" else "word" if word else "eos"
        counts = len(choice.token_ids), len(choice.prompt_token_ids)
        return InfillResponse(text, generation.model.name, True, *counts, kind, word)

    def opening(self, generation: Generation) -> bytes:
        return b""

    def parts(self, generation: Generation, parts: list[Part]) -> bytes:
        name = generation.model.name
        return b"".join(event(InfillResponse(p.text, name, False)) for p in parts if p.text)

    def closing(self, generation: Generation) -> bytes:
        return event(self._last(generation, generation.choices[0], ""))

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())
