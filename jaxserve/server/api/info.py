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
from jaxserve.settings.environment import own_variables
from jaxserve.settings.installation import collect_environment

_SECRET = re.compile(r"api_key|secret|password|hf_token")
# vLLM's groups of settings, with the names that are settings of jaxserve too.
_GROUPS = {
    "model_config": ("model", "tokenizer", "revision", "dtype", "quantization", "seed"),
    "cache_config": (
        "block_size",
        "kv_cache_dtype",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "state_cache_bytes",
        "num_gpu_blocks_override",
    ),
    "scheduler_config": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "scheduling_policy",
        "async_scheduling",
        "long_prefill_token_threshold",
        "num_scheduler_steps",
    ),
    "load_config": ("load_format", "download_dir"),
    "parallel_config": (
        "tensor_parallel_size",
        "enable_expert_parallel",
        "decode_context_parallel_size",
        "enable_eplb",
        "eplb_config",
    ),
}


class HealthResponse(msgspec.Struct):
    """Answer of GET /health and GET /ready with the status "ok"."""

    status: str = "ok"


class VersionResponse(msgspec.Struct):
    """Answer of GET /version: the version of jaxserve."""

    version: str


class LoadResponse(msgspec.Struct):
    """Answer of GET /load, in vLLM's form: the number of running and waiting requests."""

    server_load: int


class ServerInfo(msgspec.Struct):
    """Answer of GET /server_info, in vLLM's form: settings, environment variables, machine."""

    vllm_config: str | dict[str, dict[str, Any]]
    vllm_env: dict[str, str]
    system_env: dict[str, str]


class ModelInfo(msgspec.Struct):
    """Answer of GET /model_info in SGLang's form: a model's name, tokenizer and capabilities."""

    model_path: str
    tokenizer_path: str
    max_model_len: int
    is_generation: bool = True
    has_image_understanding: bool = False
    has_audio_understanding: bool = False


class Capabilities(msgspec.Struct, frozen=True):
    """Capabilities of a model besides text generation, such as log-probabilities."""

    logprobs: bool = True


class ChatSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling settings of a model for the playground.

    The fields are absent if the checkpoint recommends settings. API requests without these fields
    get vLLM's defaults instead.
    """

    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None


class ModelCard(msgspec.Struct):
    """Entry of the list of models, in OpenAI's form: one model under one of its names."""

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
    """Answer of GET /v1/models: the models of the server, once for each name."""

    data: list[ModelCard]
    object: str = "list"


async def health(request: Request) -> Response:
    """Endpoint `GET /health`: answer 200 if the engines of all models run and make progress.

    The answer does not wait for an engine, so an engine that hangs cannot delay it. Routers send no
    more requests after status 503.

    Raises:
        ApiError: 503, the server is stopping, or an engine has ended or makes no progress.
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
    """Endpoint `GET /ready`: answer 200 if the server is healthy and a model accepts requests.

    Raises:
        ApiError: 503, the queues of all models are full, or the server is not healthy.
    """
    models: Models = request.app.state.served.models
    if all(model.admission.is_full for model in models.all):
        raise ApiError(503, "the queue is full", code="queue_full")
    return await health(request)


async def model_info(request: Request) -> Response:
    """Endpoint `GET /model_info`: answer with a model's name, tokenizer and context length.

    SGLang's gateway reads them. The model is the first one, or the one of `?model=`.
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
    """Endpoint `GET /version`: answer with the version of jaxserve."""
    return json_response(VersionResponse(jaxserve.__version__))


async def load(request: Request) -> Response:
    """Endpoint `GET /load`: answer with the number of unfinished requests of all models."""
    models: Models = request.app.state.served.models
    return json_response(LoadResponse(sum(len(model.active) for model in models.all)))


async def server_info(request: Request) -> Response:
    """Endpoint `GET /server_info`: answer with a model's settings and facts about the machine.

    The settings contain no secrets. The model is the first one, or the one of `?model=`. The
    settings are one text, or with `?config_format=json` an object in vLLM's groups.

    Raises:
        ApiError: 404, there is no such model, or the path is not open (`check_operator`). 400, the
            format is unknown.
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
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(model.llm.config).items()
        if not _SECRET.search(name)
    }
    del settings["max_model_len"]  # the configured length, which the effective one replaces
    groups: dict[str, dict[str, Any]] = {}
    for group, names in _GROUPS.items():
        groups[group] = {name: settings.pop(name) for name in names if name in settings}
    groups["model_config"] |= {
        "served_model_name": model.names,
        "max_model_len": model.limits.max_model_len,
    }
    cache = groups["cache_config"]
    cache |= {"cache_dtype": cache.pop("kv_cache_dtype"), "num_gpu_blocks": model.llm.num_pages}
    groups["parallel_config"] |= {"pipeline_parallel_size": 1, "data_parallel_size": 1}
    return groups | {"additional_config": settings}


async def list_models(request: Request) -> Response:
    """Endpoint `GET /v1/models`: answer with the list of all models, an entry for each name."""
    models: Models = request.app.state.served.models
    cards = [_card(model, name) for model in models.all for name in model.names]
    return json_response(ModelList(cards))


async def get_model(request: Request) -> Response:
    """Endpoint `GET /v1/models/{model}`: answer with the list entry of the model of this name."""
    name = request.path_params["model"]
    return json_response(_card(request.app.state.served.models.find(name), name))


def _card(model: ServedModel, name: str) -> ModelCard:
    sampling = ChatSampling(**model.chat_sampling)
    card = ModelCard(name, model.created, model.limits.max_model_len, model.name)
    card.chat_sampling = sampling
    return card


async def reset_prefix_cache(request: Request) -> Response:
    """Endpoint `POST /reset_prefix_cache`: empty the prefix caches of all models.

    The answer says whether this succeeded. With `?reset_running_requests=true`, running requests
    are preempted, so that their pages are computed again.

    Raises:
        ApiError: 404, the path is not open (`check_operator`).
        InvalidRequest: a query argument is neither true nor false.
    """
    check_operator(request)
    query, models = Query(request), request.app.state.served.models
    flags = {
        "reset_running_requests": query.flag("reset_running_requests"),
        "reset_connector": query.flag("reset_external"),
    }
    resets = [model.llm.reset_prefix_cache(**flags) for model in models.all]
    return json_response({"success": all(await asyncio.gather(*resets))})
