"""Requests from within the server: the lines of batches, which use otherwise idle slots."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
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
from jaxserve.server.kept.batch_lines import BatchResponse, Line, model_of
from jaxserve.server.schema.errors import ApiError, as_api_error
from jaxserve.server.served.models import Models, ServedModel
from jaxserve.server.settings import ServerConfig

_log = logging.getLogger(__name__)
# One of this many slots stays free for other clients while a batch runs.
SLOTS_FOR_ONE_FREE = 8
# Seconds after which the slots are looked at again, unless a line has ended earlier.
POLL_SECONDS = 0.02
# Seconds after which an interrupted line is sent again.
AGAIN_SECONDS = 0.5
_ENDPOINTS = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": responses,
}


class InnerClient:
    """Client that calls the server's generating endpoints directly, without a connection.

    Args:
        asgi: the Starlette application.
        config: the server's settings.
        is_behind: whether other clients take precedence, as described in `ServedModel.behind`.
    """

    def __init__(self, asgi: Any, config: ServerConfig, is_behind: bool) -> None:
        self._asgi = asgi
        self._config = config
        self._is_behind = is_behind

    async def answer(self, line: Line, owner: str | None = None) -> BatchResponse:
        """Return the answer to a request of a batch. Errors become answers with their status.

        Args:
            line: the request, with its URL and body.
            owner: digest of the API key of the batch, or None.
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
    # Wait forever: this client never disconnects.
    await asyncio.Event().wait()
    raise AssertionError


class BatchService:
    """Service that sends requests of batches to the endpoints while slots of the models are free.

    Args:
        models: the models of the server.
        client: sends the requests to the endpoints.
    """

    def __init__(self, models: Models, client: InnerClient) -> None:
        self._models = models
        self._client = client
        self._taken = dict.fromkeys((model.name for model in models.all), 0)
        self._freed = asyncio.Event()

    async def answer(self, line: Line, owner: str | None = None) -> BatchResponse:
        """Return the answer to a request of a batch, sent by the client `InnerClient`.

        Errors become answers with their status. A request that a pause or an update of weights
        aborts, or that a sleeping model refuses, is sent again. `owner` is the digest of the
        batch's API key, or None.
        """
        response = await self._client.answer(line, owner)
        while response.status_code == 503 and self._is_interrupted(line, response):
            await asyncio.sleep(AGAIN_SECONDS)
            response = await self._client.answer(line, owner)
        return response

    def _is_interrupted(self, line: Line, response: BatchResponse) -> bool:
        model = self._find(model_of(line))
        code = msgspec.json.decode(response.body)["error"]["code"]
        may_be = model.config.enable_weight_updates and model.llm.is_alive()
        return may_be and code in ("aborted", "engine_asleep")

    def is_alive(self, model: str | None) -> bool:
        """Return whether the engine of the model with this name runs. None is the first model."""
        return self._find(model).llm.is_alive()

    async def enter(self, model: str | None) -> None:
        """Wait for a slot of the model that no other client needs, and count it as taken.

        Args:
            model: name of the model. The first model is used for None or an unknown name.
        """
        served = self._find(model)
        while not self._has_room(served):
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._freed.wait()
        self._taken[served.name] += 1

    def leave(self, model: str | None) -> None:
        """Count a slot of the model that `enter` took as free, and wake the tasks that wait."""
        self._taken[self._find(model).name] -= 1
        self._freed.set()
        self._freed = asyncio.Event()

    def _has_room(self, served: ServedModel) -> bool:
        slots = served.admission.num_slots
        taken = max(self._taken[served.name], served.behind().admission.num_live)
        most = max(1, slots - max(1, slots // SLOTS_FOR_ONE_FREE))
        return taken < most and taken + served.admission.num_live < slots

    def _find(self, model: str | None) -> ServedModel:
        try:
            return self._models.find(model)
        except ApiError:  # the endpoint refuses the line
            return self._models.all[0]
