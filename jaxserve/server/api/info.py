"""Endpoints about the server: liveness, readiness, load, models, settings, version and cache."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import jaxserve
from jaxserve.server.api.endpoint_request import check_operator
from jaxserve.server.api.query import Query
from jaxserve.server.api.streaming import json_response
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.served.models import Models, ServedModel
from jaxserve.settings.config import own_variables
from jaxserve.settings.installation import collect_environment

_SECRET = re.compile(r"api_key|secret|password|hf_token")
# vLLM's groups of settings, by the names that we have too.
_GROUPS = {
    "model_config": ("model", "tokenizer", "revision", "dtype", "quantization", "seed"),
    "cache_config": (
        *("block_size", "kv_cache_dtype", "enable_prefix_caching", "gpu_memory_utilization"),
        *("kv_cache_memory_bytes", "num_gpu_blocks_override"),
    ),
    "scheduler_config": (
        *("max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "async_scheduling"),
        *("long_prefill_token_threshold", "num_scheduler_steps"),
    ),
    "load_config": ("load_format", "download_dir"),
    "parallel_config": (
        *("tensor_parallel_size", "enable_expert_parallel", "decode_context_parallel_size"),
        *("enable_eplb", "eplb_config"),
    ),
}


class HealthResponse(msgspec.Struct):
    """Answer of GET /health and /ready."""

    status: str = "ok"


class VersionResponse(msgspec.Struct):
    """Answer of GET /version."""

    version: str


class LoadResponse(msgspec.Struct):
    """Answer of GET /load, as vLLM's: requests that draw tokens or wait to."""

    server_load: int


class ServerInfo(msgspec.Struct):
    """Answer of GET /server_info, as vLLM's: a model's settings, and the machine."""

    vllm_config: str | dict[str, dict[str, Any]]
    vllm_env: dict[str, str]
    system_env: dict[str, str]


class ModelInfo(msgspec.Struct):
    """Answer of GET /model_info and /get_model_info, as SGLang's."""

    model_path: str
    tokenizer_path: str
    max_model_len: int
    is_generation: bool = True
    has_image_understanding: bool = False
    has_audio_understanding: bool = False


class Capabilities(msgspec.Struct, frozen=True):
    """Features of a model besides text."""

    logprobs: bool = True


class ChatSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling of a person's chat where the checkpoint recommends nothing; else empty.

    Requests that leave these fields out are answered by vLLM's defaults.
    """

    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None


class ModelCard(msgspec.Struct):
    """Card of a model, under one of its names."""

    id: str
    created: int
    max_model_len: int
    root: str
    object: str = "model"
    owned_by: str = "jaxserve"
    parent: str | None = None
    capabilities: Capabilities = Capabilities()
    chat_sampling: ChatSampling = ChatSampling()


class ModelList(msgspec.Struct):
    """Answer of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"


async def health(request: Request) -> Response:
    """Answer 200 while every engine lives and makes progress, and none is being stopped.

    This waits for no engine, so that a hung one cannot hang it. Routers send their requests
    elsewhere once it answers 503.

    Raises:
        ApiError: 503, the server is stopping, or an engine has ended or stands still.
    """
    if request.app.state.served.lifecycle.is_draining:
        raise ApiError(503, "the server is stopping", code="shutting_down")
    limit = request.app.state.served.config.health_timeout
    for model in request.app.state.served.models.all:
        if not model.llm.is_alive():
            raise ApiError(503, f"the engine of {model.name} has ended", code="engine_dead")
        seconds = model.llm.standstill()
        if seconds > limit:
            raise ApiError(
                503, f"the engine of {model.name} has not moved for {seconds:.0f} s", code="stalled"
            )
    return json_response(HealthResponse())


async def ready(request: Request) -> Response:
    """Answer 200 while new requests are accepted.

    Raises:
        ApiError: 503, its queues are full, or see `health`.
    """
    models: Models = request.app.state.served.models
    if all(model.admission.is_full for model in models.all):
        raise ApiError(503, "the queue is full", code="queue_full")
    return await health(request)


async def model_info(request: Request) -> Response:
    """Answer with what SGLang's gateway shows of a model: the first, or that of `?model=`.

    Raises:
        ApiError: 404, no such model.
    """
    model = request.app.state.served.models.find(request.query_params.get("model"))
    return json_response(
        ModelInfo(
            model_path=model.name,
            tokenizer_path=str(model.llm.config.tokenizer or model.name),
            max_model_len=model.limits.max_model_len,
        )
    )


async def version(request: Request) -> Response:
    """Answer with the version of this package."""
    return json_response(VersionResponse(jaxserve.__version__))


async def load(request: Request) -> Response:
    """Answer with the number of requests in progress, of all models."""
    models: Models = request.app.state.served.models
    return json_response(LoadResponse(sum(len(model.active) for model in models.all)))


async def server_info(request: Request) -> Response:
    """Answer with a model's settings, no secret among them, and with facts about the machine.

    The model is the first, or that of `?model=`; `?config_format=json` groups its settings as vLLM
    does, otherwise they are one text.

    Raises:
        ApiError: 404, no such model, or see `check_operator`; 400, another format.
    """
    check_operator(request)
    style = request.query_params.get("config_format", "text")
    if style not in ("text", "json"):
        raise ApiError(400, "config_format must be text or json", "config_format", "invalid_value")
    model = request.app.state.served.models.find(request.query_params.get("model"))
    groups = _settings(model)
    named = [f"{name}={value!r}" for group in groups.values() for name, value in group.items()]
    facts = await asyncio.to_thread(collect_environment)
    config = groups if style == "json" else ", ".join(named)
    return json_response(ServerInfo(config, own_variables(), facts))


def _settings(model: ServedModel) -> dict[str, dict[str, Any]]:
    """Return the engine's settings in vLLM's groups; what vLLM lacks is the last of them."""
    left = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(model.llm.config).items()
        if not _SECRET.search(name)
    }
    del left["max_model_len"]  # as it was set; the model's own may be less
    groups: dict[str, dict[str, Any]] = {}
    for group, names in _GROUPS.items():
        groups[group] = {name: left.pop(name) for name in names if name in left}
    groups["model_config"] |= {
        "served_model_name": model.names,
        "max_model_len": model.limits.max_model_len,
    }
    cache = groups["cache_config"]
    cache |= {"cache_dtype": cache.pop("kv_cache_dtype"), "num_gpu_blocks": model.llm.num_pages}
    groups["parallel_config"] |= {"pipeline_parallel_size": 1, "data_parallel_size": 1}
    return groups | {"additional_config": left}


async def list_models(request: Request) -> Response:
    """Answer with the cards of all models, one for each name."""
    models: Models = request.app.state.served.models
    cards = [_card(model, name) for model in models.all for name in model.names]
    return json_response(ModelList(cards))


async def get_model(request: Request) -> Response:
    """Answer with the card of a model.

    Raises:
        ApiError: 404, there is none of this name.
    """
    name = request.path_params["model"]
    return json_response(_card(request.app.state.served.models.find(name), name))


def _card(model: ServedModel, name: str) -> ModelCard:
    sampling = ChatSampling(**model.chat_sampling)
    card = ModelCard(name, model.created, model.limits.max_model_len, model.name)
    card.chat_sampling = sampling
    return card


async def reset_prefix_cache(request: Request) -> Response:
    """Empty the prefix caches of all models.

    Raises:
        ApiError: 404, the path is not open; see `check_operator`.
        InvalidRequest: a query parameter is not a flag.
    """
    check_operator(request)
    query, models = Query(request), request.app.state.served.models
    flags = {
        "reset_running_requests": query.flag("reset_running_requests"),
        "reset_connector": query.flag("reset_external"),
    }
    resets = [model.llm.reset_prefix_cache(**flags) for model in models.all]
    return json_response({"success": all(await asyncio.gather(*resets))})
