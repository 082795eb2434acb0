"""`jaxserve serve`: load the models, then answer until told to stop."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import uvicorn

from jaxserve.config import EngineConfig
from jaxserve.engine.async_llm import AsyncLLM
from jaxserve.errors import InvalidRequest
from jaxserve.server.app import make_app
from jaxserve.server.served import Models, ServedModel
from jaxserve.server.settings import ServerConfig


@dataclass(frozen=True)
class ModelPlan:
    """A model to be served: under which names, and how.

    Attributes:
        names: the first is what answers carry.
        config: its engine's settings.
    """

    names: list[str]
    config: EngineConfig


Say = Callable[[str], None]
BUNDLED = "demo_model"


def plan_models(
    models: Iterable[str], settings: dict[str, Any], config: ServerConfig
) -> list[ModelPlan]:
    """Read `[NAME=]DIR` of each model; none means the bundled one.

    Raises:
        InvalidRequest: a name given twice, or settings out of range.
    """
    plans = []
    for text in models:
        name, _, folder = text.rpartition("=")
        plans.append(ModelPlan([name or folder], EngineConfig(model=folder, **settings)))
    if not plans:
        plans = [ModelPlan([BUNDLED], EngineConfig(**settings))]
    if config.served_model_name:
        if len(plans) > 1:
            raise InvalidRequest(
                "served_model_name is for one model; name several as NAME=DIR", "served_model_name"
            )
        plans[0] = replace(plans[0], names=list(config.served_model_name))
    names = [name for plan in plans for name in plan.names]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"two models are named {name!r}", "served_model_name")
    return plans


def load_models(plans: Iterable[ModelPlan], config: ServerConfig, say: Say) -> Models:
    """Load one model after the other, saying what is being done."""
    secret = secrets.token_bytes(32)
    served = []
    for plan in plans:
        llm = AsyncLLM(plan.config)
        served.append(ServedModel(plan.names, str(plan.config.model), llm, config, secret))
    return Models(served)


def serve(plans: Iterable[ModelPlan], config: ServerConfig) -> int:
    """Serve until SIGTERM or an interrupt; returns the exit status."""
    models = load_models(plans, config, print)
    app = make_app(models, config)
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http="h11",
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=round(config.keep_alive_timeout),
    )
    server = uvicorn.Server(settings)
    print(f"jaxserve: serving at http://{config.host}:{config.port}", file=sys.stderr, flush=True)
    try:
        asyncio.run(server.serve())
    finally:
        for model in models.all:
            model.llm.close()
    return 0
