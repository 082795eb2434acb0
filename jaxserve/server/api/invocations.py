"""Endpoint POST /invocations: SageMaker's one path for requests of every kind."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.api.batch_chat import batch_chat_completions
from jaxserve.server.api.chat import chat_completions
from jaxserve.server.api.completions import completions
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.schema.decode import parse_json
from jaxserve.server.schema.errors import ApiError


async def invocations(http_request: Request) -> Response:
    """Answer as the endpoint that the body is made for: one with messages, or with a prompt.

    Raises:
        ApiError: 400, it is made for neither; and what these endpoints raise.
    """
    config = EndpointRequest(http_request).config
    body: bytes = http_request.scope["jaxserve.body"]
    value: Any = parse_json(body, config.max_json_depth, config.max_json_nodes)
    fields = value if isinstance(value, dict) else {}
    messages = fields.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[0], list):
        return await batch_chat_completions(http_request)
    if "messages" in fields:
        return await chat_completions(http_request)
    if "prompt" in fields:
        return await completions(http_request)
    raise ApiError(400, "the body must hold messages or a prompt", "messages", "invalid_value")
