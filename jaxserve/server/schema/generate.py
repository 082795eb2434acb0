"""Schemas of vLLM's endpoints for token ids, and conversion of requests to them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

import msgspec

from jaxserve.request import Request, SamplingParams
from jaxserve.server.schema.openai import PromptLogprobs, Sampling, StreamOptions, Usage
from jaxserve.structured import StructuredOutputsParams


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Body of POST /inference/v1/generate, and answer of the endpoints that render prompts.

    The prompt is given as token ids. `sampling_params` has fields of vLLM's `SamplingParams`.
    """

    token_ids: list[int]
    sampling_params: dict[str, Any]
    request_id: str | None = None
    model: str | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0


class ScoredToken(msgspec.Struct):
    """Id, log-probability and rank of a token. The most likely token has rank 1."""

    token_id: int
    logprob: float
    rank: int | None = None


class DrawnToken(ScoredToken):
    """Log-probability of a generated token, and the most likely tokens at its position."""

    top_logprobs: list[ScoredToken] = []


class GenerateLogprobs(msgspec.Struct):
    """Log-probabilities of a completion of the generate endpoint, one entry per generated token."""

    content: list[DrawnToken]


class GenerateChoice(msgspec.Struct):
    """One completion in an answer of the generate endpoint: token ids, and text if requested.

    In a stream, it contains the new part of the completion.
    """

    index: int
    token_ids: list[int]
    logprobs: Any = None  # GenerateLogprobs, or ChatLogprobs with text
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str | msgspec.UnsetType = msgspec.UNSET


class GenerateResponse(msgspec.Struct):
    """Answer of POST /inference/v1/generate: a complete one, or one event of a stream."""

    request_id: str
    choices: list[GenerateChoice]
    output_mode: str
    usage: Usage | None = None
    model: str | msgspec.UnsetType = msgspec.UNSET
    created: int | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    weight_version: str | msgspec.UnsetType = msgspec.UNSET


def rendered(request: Request, request_id: str, body: Sampling) -> GenerateRequest:
    """Return the body of a request to /inference/v1/generate that generates the same as an engine
    request.

    All sampling parameters are written out, so that no defaults of a checkpoint apply.

    Args:
        request: engine request that was made from `body`.
        body: body of the original request, which has the model name, cache salt and priority.
    """
    prompt = request.prompt_token_ids.tolist()
    # All settings, since unset ones would use the checkpoint's recommendations.
    settings = _settings(request.sampling)
    fields = {name: value for name, value in settings.items() if value is not None}
    fields["max_tokens"] = request.max_length - len(prompt)
    return GenerateRequest(
        token_ids=prompt,
        sampling_params=fields,
        request_id=request_id,
        model=body.model,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
    )


def _settings(sampling: SamplingParams) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(sampling) if field.init]
    settings = {name: getattr(sampling, name) for name in names}
    if sampling.logit_bias is not None:
        settings["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.structured_outputs is not None:
        settings["structured_outputs"] = _form(sampling.structured_outputs)
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        if isinstance(settings[name], tuple):
            settings[name] = list(settings[name])
    return settings


def _form(form: StructuredOutputsParams) -> dict[str, Any]:
    value: Any = form.text
    if form.form == "json_object":
        value = True
    elif form.form in ("json", "choice", "structural_tag"):
        value = json.loads(form.text)
    fields = {form.form: value, "whitespace_pattern": form.whitespace_pattern}
    for name in ("disable_any_whitespace", "disable_additional_properties", "lenient"):
        fields[name] = getattr(form, name) or None
    return {name: value for name, value in fields.items() if value is not None}
