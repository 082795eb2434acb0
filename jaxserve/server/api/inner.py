"""InnerClient: requests that come from within the server, of batches."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.types import Message

from jaxserve.errors import JaxserveError
from jaxserve.server.api.chat import chat_completions
from jaxserve.server.api.completions import completions
from jaxserve.server.api.responses import responses
from jaxserve.server.api.streaming import error_response
from jaxserve.server.kept.batch_lines import BatchResponse, Line
from jaxserve.server.schema.errors import ApiError, as_api_error
from jaxserve.server.settings import ServerConfig

_log = logging.getLogger(__name__)
_ENDPOINTS = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": responses,
}


class InnerClient:
    """Client of the endpoints of an application, without a connection between them.

    Args:
        asgi: the application, as Starlette has it.
        config: the server's settings.
        is_behind: whether other clients come first; see `ServedModel.behind`.
    """

    def __init__(self, asgi: Any, config: ServerConfig, is_behind: bool) -> None:
        self._asgi = asgi
        self._config = config
        self._is_behind = is_behind

    async def answer(self, line: Line, owner: str | None = None) -> BatchResponse:
        """Answer a line of a batch, whatever the status of the answer.

        Args:
            line: the request.
            owner: the key of its client.
        """
        request_id, renamed = uuid4().hex, {}
        body = bytes(line.body)
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": line.url,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "app": self._asgi,
            "jaxserve.body": body,
            "jaxserve.key": owner,
            "jaxserve.renamed": renamed,
            "jaxserve.request_id": request_id,
            "jaxserve.behind": self._is_behind,
        }
        try:
            most = self._config.max_body_bytes
            if len(body) > most:
                raise ApiError(413, f"the body is larger than {most} bytes", code="too_large")
            response = await _ENDPOINTS[line.url](Request(scope, _stay))
        except Exception as error:
            if not isinstance(error, ApiError | JaxserveError):
                _log.error("a line of a batch failed: %s", type(error), exc_info=error)
            response = error_response(as_api_error(error, renamed))
        return BatchResponse(response.status_code, request_id, msgspec.Raw(bytes(response.body)))


async def _stay() -> Message:
    """Wait for ever: this client does not go away."""
    await asyncio.Event().wait()
    raise AssertionError
