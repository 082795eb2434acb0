"""Endpoint POST /reset_prefix_cache."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.api.endpoint_request import check_operator
from jaxserve.server.api.query import Query
from jaxserve.server.api.streaming import json_response


async def reset_prefix_cache(request: Request) -> Response:
    """Forget the cached prefixes of all models.

    Raises:
        ApiError: 404, see `check_operator`.
        InvalidRequest: a query parameter is no flag.
    """
    check_operator(request)
    query, models = Query(request), request.app.state.served.models
    flags = {
        "reset_running_requests": query.flag("reset_running_requests"),
        "reset_connector": query.flag("reset_external"),
    }
    resets = [model.llm.reset_prefix_cache(**flags) for model in models.all]
    return json_response({"success": all(await asyncio.gather(*resets))})
