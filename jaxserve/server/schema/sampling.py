"""Conversion of a request's fields to SamplingParams, and the fields that are not supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.request import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from jaxserve.server.schema.openai import Sampling
from jaxserve.structured import NAME, StructuredOutputsParams

# Fields that are not supported yet, each with its neutral values, which pass.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "prompt_embeds": (None,),
    "lora_path": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
    "mm_processor_kwargs": (None, {}),
    "kv_transfer_params": (None,),
}
# Fields of a conversation's template, which are no fields of endpoints without one of their own.
NO_TEMPLATE_FIELDS: dict[str, tuple[Any, ...]] = {"chat_template": (None,), "documents": (None, [])}
# Fields that are read by name from a request; the rest of SamplingParams is settled elsewhere.
_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"),
    *("min_tokens", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("allowed_token_ids", "bad_words", "spaces_between_special_tokens"),
)


def sampling_params(
    request: Sampling,
    defaults: SamplingParams,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return a request's settings over the defaults. Endpoints spell the arguments differently.

    Raises:
        InvalidRequest: naming the field.
    """
    given = {name: getattr(request, name) for name in _SAMPLING}
    given["logit_bias"] = _logit_bias(request.logit_bias)
    given["structured_outputs"] = _form(request)
    if request.logprob_token_ids:
        name = "logprob_token_ids"
        if logprobs is None:
            raise InvalidRequest(f"{name} needs logprobs", name)
        given[name], logprobs = request.logprob_token_ids, None
    given = {name: value for name, value in given.items() if value is not None}
    return replace(
        defaults,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **given,
    )


def check_sizes(request: Sampling, vocab_size: int) -> None:
    """Check that lists are not too long to be read entry by entry.

    Raises:
        InvalidRequest: naming the field.
    """
    for name, most in (
        ("allowed_token_ids", vocab_size),
        ("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS),
    ):
        if len(getattr(request, name) or ()) > most:
            raise InvalidRequest(f"{name} takes at most {most} token ids here", name)


def _logit_bias(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    """Convert OpenAI's keys, which are texts, to token ids."""
    if biases is None:
        return None
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequest(f"logit_bias: {key[:60]!r} is not a token id", "logit_bias")
    return {int(key): value for key, value in biases.items()}


def _form(request: Sampling) -> StructuredOutputsParams | None:
    """Return the form of the text, given in vLLM's fields or in OpenAI's.

    Raises:
        InvalidRequest: naming the field that holds it.
    """
    outputs, form = request.structured_outputs, request.response_format
    if form is None or form.type == "text":
        if outputs is None:
            return None
        fields = msgspec.structs.asdict(outputs)
        given = {name: value for name, value in fields.items() if value is not None}
        if "structural_tag" in given:
            raise InvalidRequest("structured_outputs.structural_tag is not supported", NAME)
        return StructuredOutputsParams(**given)
    if outputs is not None:
        raise InvalidRequest(
            "response_format and structured_outputs exclude each other", "response_format"
        )
    if form.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if form.json_schema is None or form.json_schema.schema is None:
        raise InvalidRequest("response_format needs json_schema.schema", "response_format")
    return StructuredOutputsParams(json=form.json_schema.schema)


def check_stream(request: Sampling) -> None:
    """Check fields that need `stream`, and fields that exclude it.

    Raises:
        InvalidRequest: naming the field.
    """
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream=true", "stream_options")
