"""Entry point for configuration files of Ray Serve: `jaxserve.ray_app:deployment`."""

# Ray has no wheels for some versions of Python.
# pyright: reportMissingImports=false
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ray import serve

from jaxserve.errors import InvalidRequest
from jaxserve.fleet.application import make_application
from jaxserve.fleet.options import FleetConfig
from jaxserve.server.served.specs import check_models, plan_models
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.config import EngineConfig


def deployment(args: Mapping[str, Any]) -> serve.Application:
    """Return the Ray Serve application that runs replicas of the jaxserve server.

    A configuration file of Ray Serve names this function, and it can be passed to `serve.run`.

    Args:
        args: settings by name: `model`, and fields of `EngineConfig`, `ServerConfig` and
            `FleetConfig`. In a configuration file they are the mapping `args`.

    Raises:
        InvalidRequest: (a ValueError) a setting is unknown, out of range, or not supported with
            replicas.
        CheckpointError: the model does not exist.
    """
    settings = dict(args)
    settings.setdefault("data_parallel_backend", "ray")
    fleet, server, engine = (
        _take(settings, kind) for kind in (FleetConfig, ServerConfig, EngineConfig)
    )
    if settings:
        raise InvalidRequest(f"{', '.join(map(str, settings))}: there is no such setting")
    model = engine.pop("model", None)
    config = ServerConfig(**server)
    specs = plan_models([] if model is None else [str(model)], engine, config)
    check_models(specs)
    # Serve deploys the file to a running cluster.
    return make_application(specs, config, FleetConfig(**{"ray_address": "auto", **fleet}))


def _take(settings: dict[str, Any], kind: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: settings.pop(name) for name in list(settings) if name in names}
