"""Stored responses: generation in the background, streams of stored events, and endpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.server.api import streaming
from jaxserve.server.api.generation import Generation
from jaxserve.server.api.query import Query
from jaxserve.server.api.response_events import ResponsesFormatter
from jaxserve.server.kept.response_store import ResponseStore, Turn
from jaxserve.server.schema.errors import ApiError, as_api_error
from jaxserve.server.schema.response_items import DeletedResponse, InputItems

_log = logging.getLogger(__name__)


async def draw(
    generation: Generation,
    formatter: ResponsesFormatter,
    turn: Turn,
    store: ResponseStore,
    renamed: Mapping[str, str],
) -> None:
    """Generate a response in the background, and store its events and its final form.

    An exception ends the response as failed or cancelled, and is not raised.

    Args:
        generation: the generation, whose context has been entered. The context is left at the end.
        formatter: makes the response object and its events.
        turn: receives the events, the status and the response.
        store: store of the turn, whose size is updated.
        renamed: maps the engine's field names to the API's, for error messages.
    """
    error: Exception | asyncio.CancelledError | None = None
    try:
        turn.append(formatter.take_events())
        while not generation.is_finished:
            parts = await generation.take()
            if turn.status == "queued":
                turn.status = "in_progress"
                turn.response = streaming.encode(formatter.started(generation))
            formatter.parts(generation, parts)
            turn.append(formatter.take_events())
            store.resize(turn)
        formatter.closing(generation)
    except (Exception, asyncio.CancelledError) as problem:
        error = problem
        _fail(as_failure(problem, renamed), formatter, turn)
        if not isinstance(problem, ApiError | JaxserveError | asyncio.CancelledError):
            _log.error("a response in the background failed: %s", type(problem), exc_info=problem)
    finally:
        generation.__exit__(type(error) if error else None, error, None)  # type: ignore[arg-type]
        turn.cancel = None
        turn.append(formatter.take_events())
        store.resize(turn)


def as_failure(error: BaseException, renamed: Mapping[str, str]) -> ApiError:
    """Return the API error for an exception that ended a background response.

    A cancellation means that the server is stopping (503).

    Args:
        renamed: maps the engine's field names to the API's, for error messages.
    """
    if isinstance(error, Exception):
        return as_api_error(error, renamed)
    return ApiError(503, "the server is stopping", code="shutting_down")


def _fail(error: ApiError, formatter: ResponsesFormatter, turn: Turn) -> None:
    if error.code == "cancelled":
        turn.status, turn.response = "cancelled", streaming.encode(formatter.cancelled())
    else:
        turn.status, turn.response = "failed", streaming.encode(formatter.failed(error))
        formatter.failure(error)


class StoredStream(streaming.EventResponse):
    """Streaming response with the stored and the new events of a background response.

    Args:
        turn: the background response.
        first: sequence number of the first event to send.
    """

    def __init__(self, turn: Turn, first: int = 0) -> None:
        super().__init__()
        self._turn = turn
        self._next = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events to the client until the background response ends.

        Raises:
            ClientGone: the client disconnected. The response is generated nevertheless.
        """
        await streaming.while_connected(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        await self.start(send)
        turn = self._turn
        while True:
            events = (turn.events or [])[self._next :]
            self._next += len(events)
            if events:
                await streaming.send_body(send, b"".join(events))
            elif not turn.is_running:
                break
            else:
                await turn.wait()
        await streaming.send_body(send, b"", more=False)


def _store(http_request: Request) -> ResponseStore:
    return http_request.app.state.served.responses


def _turn(http_request: Request) -> Turn:
    owner: str | None = http_request.scope["jaxserve.key"]
    return _store(http_request).get(http_request.path_params["response_id"], owner)


async def get_response(http_request: Request) -> Response:
    """Endpoint `GET /v1/responses/{response_id}`: answer with a stored response.

    With `?stream=true` the answer is a stream of the response's events after number
    `starting_after`.

    Raises:
        ApiError: 404, there is no such response.
        InvalidRequest: its events are not stored, or a query argument is wrong.
    """
    query = Query(http_request)
    is_stream, after = query.flag("stream"), query.integer("starting_after", -1, 0, 2**31 - 1)
    turn = _turn(http_request)
    if not is_stream:
        return Response(turn.response, media_type=streaming.JSON)
    if turn.events is None:
        raise InvalidRequest(
            "stream is only kept of a response that had background and stream", "stream"
        )
    return StoredStream(turn, after + 1)


async def cancel_response(http_request: Request) -> Response:
    """Endpoint `POST /v1/responses/{response_id}/cancel`: cancel a background response.

    The answer is the response, after its generation has ended.

    Raises:
        ApiError: 404, there is no such response.
        InvalidRequest: the response is not in the background.
    """
    turn = _turn(http_request)
    if turn.task is None:
        raise InvalidRequest("Cannot cancel a synchronous response.", "response_id")
    if turn.cancel is not None:
        turn.cancel()
    while turn.is_running:
        await turn.wait()
    return Response(turn.response, media_type=streaming.JSON)


async def delete_response(http_request: Request) -> Response:
    """Endpoint `DELETE /v1/responses/{response_id}`: delete a stored response, and cancel it."""
    turn = _turn(http_request)
    _store(http_request).remove(turn)
    return streaming.json_response(DeletedResponse(turn.id))


async def list_input_items(http_request: Request) -> Response:
    """Endpoint `GET /v1/responses/{response_id}/input_items`: answer with a page of input items.

    They belong to a stored response. The newest item comes first by default.
    """
    query = Query(http_request)
    turn = _turn(http_request)
    page = query.page(turn.input_items(), lambda item: item["id"], "desc")
    return streaming.json_response(InputItems(*page))
