"""Schemas of vLLM's endpoints that take and give token ids, and what their settings stand for."""

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

    `sampling_params` holds fields of vLLM's `SamplingParams`.
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
    """Log-probability of a token; `rank` is 1 for the most likely."""

    token_id: int
    logprob: float
    rank: int | None = None


class DrawnToken(ScoredToken):
    """Log-probability of a token that was drawn, and those of the most likely ones."""

    top_logprobs: list[ScoredToken] = []


class GenerateLogprobs(msgspec.Struct):
    """Log-probabilities of a completion, one entry a token."""

    content: list[DrawnToken]


class GenerateChoice(msgspec.Struct):
    """Completion as token ids, whole or what is new of it; as text too where it was requested."""

    index: int
    token_ids: list[int]
    logprobs: Any = None  # GenerateLogprobs, or ChatLogprobs with text
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str | msgspec.UnsetType = msgspec.UNSET


class GenerateResponse(msgspec.Struct):
    """Answer of POST /inference/v1/generate, whole or one event of its stream."""

    request_id: str
    choices: list[GenerateChoice]
    output_mode: str
    usage: Usage | None = None
    model: str | msgspec.UnsetType = msgspec.UNSET
    created: int | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


def rendered(request: Request, request_id: str, body: Sampling) -> GenerateRequest:
    """Return an engine's request, made of a body, as the body of one that generates the same."""
    prompt = request.prompt_token_ids.tolist()
    # All that is set, since others are taken from what a checkpoint recommends.
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
    """Return settings as JSON has them."""
    names = [field.name for field in dataclasses.fields(sampling) if field.init]
    made = {name: getattr(sampling, name) for name in names}
    if sampling.logit_bias is not None:
        made["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.structured_outputs is not None:
        made["structured_outputs"] = _form(sampling.structured_outputs)
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        if isinstance(made[name], tuple):
            made[name] = list(made[name])
    return made


def _form(form: StructuredOutputsParams) -> dict[str, Any]:
    value: Any = form.text
    if form.form == "json_object":
        value = True
    elif form.form in ("json", "choice", "structural_tag"):
        value = json.loads(form.text)
    made = {form.form: value, "whitespace_pattern": form.whitespace_pattern}
    for name in ("disable_any_whitespace", "disable_additional_properties", "lenient"):
        made[name] = getattr(form, name) or None
    return {name: value for name, value in made.items() if value is not None}
