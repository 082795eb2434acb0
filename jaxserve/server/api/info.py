"""Endpoints that describe the server: liveness, readiness, models and version."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import jaxserve
from jaxserve.server.api.streaming import json_response
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.served.models import Models, ServedModel


class HealthResponse(msgspec.Struct):
    """Answer of GET /health and /ready."""

    status: str = "ok"


class VersionResponse(msgspec.Struct):
    """Answer of GET /version."""

    version: str


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
    """Answer 200 while every engine lives and makes progress.

    This waits for no engine, so that a hung one cannot hang it.

    Raises:
        ApiError: 503, an engine has ended or stands still.
    """
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
        ApiError: 503, the server is stopping, its queues are full, or see `health`.
    """
    if request.app.state.served.lifecycle.is_draining:
        raise ApiError(503, "the server is stopping", code="shutting_down")
    models: Models = request.app.state.served.models
    if all(model.admission.is_full for model in models.all):
        raise ApiError(503, "the queue is full", code="queue_full")
    return await health(request)


async def version(request: Request) -> Response:
    """Answer with the version of this package."""
    return json_response(VersionResponse(jaxserve.__version__))


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
