"""Endpoint POST /infill of llama.cpp: generates the text between two texts."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.generation import Choice, ChoicePart, Generation
from jaxserve.server.api.streaming import ResponseFormatter, event, respond
from jaxserve.server.schema import sampling as sampling_fields
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.openai import Sampling
from jaxserve.settings.compat import endpoint_fields


class File(msgspec.Struct, kw_only=True):
    """Text and name of another file of a project, which the model sees as context of an infill."""

    text: str
    filename: str = ""


class InfillRequest(Sampling, kw_only=True):
    """Body of POST /infill: texts before and after a gap, the infill's start, and other files."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: list[File] | None = None


class InfillResponse(msgspec.Struct):
    """Answer of POST /infill, or a stream event of it: text, and at the end token counts."""

    content: str
    model: str
    stop: bool
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    stop_type: str = "none"
    stopping_word: str = ""
    weight_version: str | msgspec.UnsetType = msgspec.UNSET


async def infill(http_request: Request) -> Response:
    """Endpoint `POST /infill` of llama.cpp: generate the text in a gap between two texts.

    The answer is a JSON document, or a stream of events if the request asks for it.
    """
    request = EndpointRequest(http_request)
    body = request.parse(InfillRequest, endpoint_fields("infill"))
    request.renamed |= {"prompt": "input_prefix", "suffix": "input_suffix"}
    request.renamed["structured_outputs"] = sampling_fields.form_field(body)
    model = request.find_model(body.model)
    max_tokens = model.max_tokens(sampling_fields.most_tokens(body, request.renamed))
    sampling_fields.check_sizes(body, model.limits.vocab_size)
    sampling = sampling_fields.sampling_params(body, model.default_sampling, max_tokens)
    request.admit(model, 1)
    tokenizer = model.tokenizer()
    files = "".join(f"{file.filename}\n{file.text}\n" for file in body.input_extra or ())
    before = files + body.input_prefix
    model.check_length(len(before) + len(body.input_suffix) + len(body.prompt), "input_prefix")

    def encode() -> list[int]:
        ids = infill_prompt(tokenizer, before, body.input_suffix)
        return ids + (tokenizer.encode(body.prompt, False) if body.prompt else [])

    ids = await asyncio.to_thread(encode)
    sampling = sampling_fields.with_ends(sampling, end_tokens(tokenizer))
    generation = Generation(model, [await request.engine_request(model, ids, sampling, body)])
    return await respond(http_request, generation, InfillFormatter(), bool(body.stream))


class InfillFormatter(ResponseFormatter):
    """Formatter of the answer of `POST /infill`, as one document or as stream events."""

    def whole(self, generation: Generation) -> InfillResponse:
        choice = generation.choices[0]
        return self._last(generation, choice, choice.text)

    def _last(self, generation: Generation, choice: Choice, text: str) -> InfillResponse:
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        kind = "limit" if choice.finish_reason == "length" else "word" if word else "eos"
        counts = len(choice.token_ids), len(choice.prompt_token_ids)
        answer = InfillResponse(text, generation.model.name, True, *counts, kind, word)
        answer.weight_version = generation.weight_version
        return answer

    def _part(self, generation: Generation, part: ChoicePart) -> bytes:
        response = InfillResponse(part.text, generation.model.name, False)
        return event(response) if part.text else b""

    def closing(self, generation: Generation) -> bytes:
        return event(self._last(generation, generation.choices[0], ""))

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())


class Marks(NamedTuple):
    """Texts of the marker tokens that enclose the texts around a gap in a code model's prompt."""

    before: str  # marker before the text that precedes the gap
    behind: str  # marker before the text that follows the gap
    middle: str  # marker before the generated text, "" if there is none
    is_reversed: bool = False  # True if the text after the gap comes first


# Code models are trained to fill a gap between three markers. The markers are from the model cards.
MARKS = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder, V3
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    Marks("<PRE>", "<SUF>", "<MID>"),
    Marks("[PREFIX]", "[SUFFIX]", "", is_reversed=True),  # Codestral: [SUFFIX]...[PREFIX]...
)
ENDS = tuple(
    "<|endoftext|> <|fim_pad|> <|file_separator|> <fim_pad> <|end_of_text|> "
    "<｜end▁of▁sentence｜> ▁<EOT> <EOT> <|file_sep|> <file_sep> <|repo_name|>".split()
)


def infill_prompt(tokenizer: Any, before: str, behind: str) -> list[int]:
    """Return the token ids of a fill-in-the-middle prompt, whose continuation fills a gap.

    Args:
        tokenizer: tokenizer of the model.
        before: text before the gap.
        behind: text after the gap.

    Raises:
        InvalidRequest: the model has no fill-in-the-middle markers. The error names `suffix`.
    """
    token = tokenizer.token_id
    for marks in MARKS:
        ids = [token(text) for text in marks[:3] if text]
        if None not in ids:
            break
    else:
        raise InvalidRequest(
            "suffix needs a model with tokens for filling gaps, like <|fim_prefix|>; this one has "
            "none, so send a prompt alone",
            "suffix",
        )
    head, tail = (tokenizer.encode_data(text) if text else [] for text in (before, behind))
    first = [ids[0], *head]
    second = [ids[1], *tail]
    parts = [*second, *first] if marks.is_reversed else [*first, *second, *ids[2:]]
    return [*_beginning(tokenizer), *parts]


def end_tokens(tokenizer: Any) -> list[int]:
    """Return the ids of the vocabulary's tokens with which code models end the text in a gap."""
    ids = [tokenizer.token_id(text) for text in ENDS]
    return [number for number in ids if number is not None]


def _beginning(tokenizer: Any) -> list[int]:
    begin = tokenizer.special_names.get("bos_token")
    whole = tokenizer.encode("a", True)
    number = None if begin is None else tokenizer.token_id(begin)
    return [number] if number is not None and whole[:1] == [number] else []
