"""Replicas from a configuration file of Ray Serve: `import_path: jaxserve.ray_app:deployment`."""

# Ray has no wheels for every Python.
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
    """Return an application of replicas, for `serve.run` or a configuration file.

    Args:
        args: settings, as the file's `args` gives them: `model`, and fields of `EngineConfig`,
            `ServerConfig` and `FleetConfig`.

    Raises:
        InvalidRequest: (a ValueError) a setting is unknown, out of range, or holds in no fleet.
        CheckpointError: the model is not there.
    """
    given = dict(args)
    given.setdefault("data_parallel_backend", "ray")
    fleet, server, engine = (
        _take(given, kind) for kind in (FleetConfig, ServerConfig, EngineConfig)
    )
    if given:
        raise InvalidRequest(f"{', '.join(map(str, given))}: there is no such setting")
    model = engine.pop("model", None)
    config = ServerConfig(**server)
    specs = plan_models([] if model is None else [str(model)], engine, config)
    check_models(specs)
    # A file's replicas are those of a cluster that is there.
    return make_application(specs, config, FleetConfig(**{"ray_address": "auto", **fleet}))


def _take(given: dict[str, Any], kind: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: given.pop(name) for name in list(given) if name in names}
