"""Conversion of a request's fields to SamplingParams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.request import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from jaxserve.server.schema.openai import JsonSchemaFormat, ResponseFormat, Sampling
from jaxserve.structured import NAME, StructuredOutputsParams

# Names of output formats from older clients and llama.cpp, with their current names.
_OLDER = {f"guided_{form}": form for form in ("json", "regex", "choice", "grammar")}
GUIDED = {**_OLDER, "json_schema": "json"}
# Names of the limit on an answer's length, and its value for no limit.
_LENGTHS = ("max_completion_tokens", "max_tokens", "n_predict")
NO_BOUND = -1
# Fields that requests and SamplingParams have under the same name.
_SAMPLING = tuple(
    "n temperature top_p top_k min_p seed stop stop_token_ids min_tokens ignore_eos "
    "skip_special_tokens include_stop_str_in_output presence_penalty frequency_penalty "
    "repetition_penalty allowed_token_ids bad_words spaces_between_special_tokens".split()
)


def sampling_params(
    request: Sampling,
    defaults: SamplingParams,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the engine's sampling parameters for a request, with `defaults` for fields that are
    unset.

    Args:
        max_tokens: maximum tokens of the answer, None for no limit.
        logprobs: number of log-probabilities per generated token, None for none. Each endpoint has
            its own field for the number.
        prompt_logprobs: number of log-probabilities per prompt token, None for none.

    Raises:
        InvalidRequest: a field is invalid, or two fields exclude each other.
    """
    settings = {name: getattr(request, name) for name in _SAMPLING}
    settings["logit_bias"] = _logit_bias(request.logit_bias)
    settings["structured_outputs"] = _form(request)
    if request.logprob_token_ids:
        name = "logprob_token_ids"
        if logprobs is None:
            raise InvalidRequest(f"{name} needs logprobs", name)
        settings[name], logprobs = request.logprob_token_ids, None
    settings = {name: value for name, value in settings.items() if value is not None}
    return replace(
        defaults,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **settings,
    )


def most_tokens(request: Sampling, renamed: dict[str, str] | None = None) -> int | None:
    """Return the maximum number of tokens that a request sets for its answer.

    It is -1 for no limit, and None if the request sets none of the fields. The smallest value of
    several fields applies, but `max_tokens` is ignored if `max_completion_tokens` is set.

    Args:
        renamed: names of fields for error messages, by the engine's names. The name of the field
            that applies is added for `max_tokens`.
    """
    limits = {name: getattr(request, name, None) for name in _LENGTHS}
    if limits["max_completion_tokens"] is not None:
        del limits["max_tokens"]
    bounds = {name: value for name, value in limits.items() if value is not None}
    if not bounds:
        return None
    name = min(bounds, key=lambda name: math.inf if bounds[name] == NO_BOUND else bounds[name])
    if renamed is not None and name == "n_predict":
        renamed["max_tokens"] = name
    elif renamed is not None and name != "max_tokens":
        renamed.setdefault("max_tokens", name)
    return bounds[name]


def check_sizes(request: Sampling, vocab_size: int) -> None:
    """Check that the lists of token ids in a request are short enough to be processed id by id.

    Raises:
        InvalidRequest: `allowed_token_ids` or `logprob_token_ids` is too long.
    """
    for name, most in (
        ("allowed_token_ids", vocab_size),
        ("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS),
    ):
        if len(getattr(request, name) or ()) > most:
            raise InvalidRequest(f"{name} takes at most {most} token ids here", name)


def _logit_bias(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequest(f"logit_bias: {key[:60]!r} is not a token id", "logit_bias")
    return {int(key): value for key, value in biases.items()}


def form_field(request: Sampling) -> str:
    """Return the name of the request field that contains the structured output format.

    It is "structured_outputs" if the request has no such format.
    """
    for name in GUIDED:
        if getattr(request, name) is not None:
            return name
    return NAME if request.response_format is None else "response_format"


def _form(request: Sampling) -> StructuredOutputsParams | None:
    """Return the structured output format of a request, or None.

    It may be in `structured_outputs`, in one of the fields of older clients (such as
    `guided_json`), or in OpenAI's `response_format`.

    Raises:
        InvalidRequest: two of these fields are set, or `response_format` is invalid.
    """
    outputs, form = request.structured_outputs, request.response_format
    if form is not None and form.type == "text":
        answer_schema(form)  # refuses a schema
        form = None
    guided = [name for name in GUIDED if getattr(request, name) is not None]
    fields = [*guided, *(["response_format"] if form else []), *([NAME] if outputs else [])]
    if len(fields) > 1:
        raise InvalidRequest(f"{fields[0]} and {fields[1]} exclude each other", fields[0])
    if guided:
        settings = {GUIDED[guided[0]]: getattr(request, guided[0])}
        return StructuredOutputsParams(
            **settings, whitespace_pattern=request.guided_whitespace_pattern
        )
    if outputs is not None:
        fields = msgspec.structs.asdict(outputs)
        settings = {name: value for name, value in fields.items() if value is not None}
        return StructuredOutputsParams(**settings)
    return None if form is None else _response_format(form)


def _response_format(form: ResponseFormat) -> StructuredOutputsParams:
    if form.type == "structural_tag":
        fields = msgspec.structs.asdict(form)
        tag = {name: value for name, value in fields.items() if value is not None}
        return StructuredOutputsParams(structural_tag=tag)
    answer = answer_schema(form)
    if answer is None:
        return StructuredOutputsParams(json_object=True)
    schema, is_strict = answer
    return StructuredOutputsParams(json=schema, lenient=not is_strict)


def answer_schema(form: ResponseFormat | None) -> tuple[dict[str, Any], bool] | None:
    """Return the JSON schema in a `response_format`, and whether it is strict, or None without a
    schema.

    The result is None for text and for a structural tag. An empty schema of type json_schema is {}
    and not strict. A schema of type json_object gets type object unless it has a type.

    Raises:
        InvalidRequest: type json_schema has no schema, type text has one, or two schemas differ.
    """
    field = "response_format"
    if form is None or form.type == "structural_tag":
        return None
    inner = form.json_schema or JsonSchemaFormat()
    schemas = [schema for schema in (inner.schema, form.schema) if schema is not None]
    if len(schemas) > 1 and schemas[0] != schemas[1]:
        raise InvalidRequest(f"{field}: json_schema.schema and schema exclude each other", field)
    if form.type == "text" and schemas:
        raise InvalidRequest(f"{field}: type text takes no schema; json_schema does", field)
    if form.type == "json_schema" and not schemas:
        raise InvalidRequest(f"{field} needs json_schema.schema", field)
    if form.type == "text" or not any(schemas):
        return None if form.type != "json_schema" else ({}, False)
    schema = schemas[0] if form.type == "json_schema" else {"type": "object", **schemas[0]}
    return schema, bool(inner.strict or form.strict)


def with_ends(sampling: SamplingParams, token_ids: Iterable[int]) -> SamplingParams:
    """Return a copy of sampling parameters with `token_ids` as additional stop tokens."""
    return replace(sampling, stop_token_ids=[*(sampling.stop_token_ids or ()), *token_ids])


def check_stream(request: Sampling) -> None:
    """Check that a request with `stream_options` is streamed.

    Raises:
        InvalidRequest: `stream_options` is set without `stream`.
    """
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream=true", "stream_options")
