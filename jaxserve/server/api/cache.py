"""Endpoint POST /reset_prefix_cache."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.api.streaming import json_response
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.served.models import Models
from jaxserve.server.settings import ServerConfig


async def reset_prefix_cache(request: Request) -> Response:
    """Forget the cached prefixes of all models.

    Raises:
        ApiError: 404, the server has neither keys nor --server-dev-mode: whoever can reach it
            could slow others down.
        InvalidRequest: a query parameter is no flag.
    """
    config: ServerConfig = request.app.state.served.config
    if not (config.server_dev_mode or config.api_key):
        raise ApiError(
            404,
            "/reset_prefix_cache is not served: it is with --server-dev-mode, or with an --api-key",
            code="not_supported",
        )
    flags: dict[str, bool] = {}
    for name in ("reset_running_requests", "reset_external"):
        given = request.query_params.get(name, "false").lower()
        if given not in ("true", "1", "false", "0"):
            raise InvalidRequest(f"{name} must be true or false", name)
        flags[name] = given in ("true", "1")
    models: Models = request.app.state.served.models
    resets = [model.llm.reset_prefix_cache(**_renamed(flags)) for model in models.all]
    return json_response({"success": all(await asyncio.gather(*resets))})


def _renamed(flags: dict[str, bool]) -> dict[str, bool]:
    """Return the engine's names of what vLLM's route calls otherwise."""
    return {
        "reset_running_requests": flags["reset_running_requests"],
        "reset_connector": flags["reset_external"],
    }
