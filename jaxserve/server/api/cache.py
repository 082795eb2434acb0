"""Endpoint POST /reset_prefix_cache."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.api.query import Query
from jaxserve.server.api.streaming import json_response
from jaxserve.server.schema.errors import ApiError
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
    query, models = Query(request), request.app.state.served.models
    flags = {
        "reset_running_requests": query.flag("reset_running_requests"),
        "reset_connector": query.flag("reset_external"),
    }
    resets = [model.llm.reset_prefix_cache(**flags) for model in models.all]
    return json_response({"success": all(await asyncio.gather(*resets))})
