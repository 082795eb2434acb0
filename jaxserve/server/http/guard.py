"""Guard: the middleware that every request passes before it is routed.

It bounds headers, body and the time for the body, and checks the key and the request's origin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import JaxserveError
from jaxserve.server.api.streaming import ClientGone, error_response
from jaxserve.server.http.head_checks import (
    OPEN_PATHS,
    HeadChecks,
    by_name,
    check_media,
    id_of_request,
)
from jaxserve.server.schema.errors import ApiError, as_api_error, too_many_connections
from jaxserve.server.served.admission import Lifecycle, Reservation
from jaxserve.server.settings import ServerConfig

_log = logging.getLogger(__name__)
# A body up to this size is read even where the answer is a refusal, so that the connection stays.
SMALL_BODY_BYTES = 64 << 10
LINGER_SECONDS = 0.5
# The path whose endpoint reads its body itself, a form with a file.
FILES = "/v1/files"
# Fields and boundaries of such a form, besides its file.
FORM_BYTES = 64 << 10


class Guard:
    """ASGI middleware, which adds entries to the scope.

    `jaxserve.body` is the whole body, `jaxserve.key` the API key (None where none is required).
    `jaxserve.renamed` is that of `EndpointRequest`. `jaxserve.crowded` marks connections over the
    limit. `jaxserve.place`, where there is one, is left once the body has been read.

    Args:
        app: the application that it guards.
        config: the limits.
        checks: of the head.
        lifecycle: while the server drains, answers end their connections.
        check_room: raises where a request to a path could not be admitted now, whatever its body;
            called before the body is parsed.
        reads_no_body: whether a path's endpoint reads no body, so that its kind does not matter.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        checks: HeadChecks,
        lifecycle: Lifecycle,
        check_room: Callable[[str], None] = lambda path: None,
        reads_no_body: Callable[[str], bool] = lambda path: False,
    ) -> None:
        self._app = app
        self._config = config
        self._checks = checks
        self._lifecycle = lifecycle
        self._check_room = check_room
        self._reads_no_body = reads_no_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = by_name(scope["headers"])
        request_id = id_of_request(headers)
        more_headers = [(b"x-request-id", request_id)]
        is_crowded = scope.get("jaxserve.crowded", False)
        if self._lifecycle.is_draining or is_crowded:
            more_headers.append((b"connection", b"close"))
        answer = _Answer(scope, send, more_headers)
        renamed: dict[str, str] = {}
        scope["jaxserve.renamed"] = renamed
        scope["jaxserve.request_id"] = request_id.decode()
        root = self._config.root_path
        if root and scope["path"] == root:  # the page's paths are relative
            await RedirectResponse(f"{root}/")(scope, receive, answer.send)
            return
        if root and scope["path"].startswith(f"{root}/"):
            scope["path"] = scope["path"][len(root) :]
        try:
            if is_crowded and scope["path"] not in OPEN_PATHS:
                raise too_many_connections()
            key = self._checks.check(scope["path"], scope["headers"], headers)
            scope["jaxserve.key"] = key
            body = b""
            if scope["method"] == "POST" and scope["path"] == FILES:
                self._check_form(headers)
            else:
                if scope["method"] == "POST":
                    body = await self._take_body(scope, headers, receive)
                scope["jaxserve.body"] = body
            _leave_place(scope)
            await self._app(scope, receive, answer.send)
        except ClientGone:
            return
        except asyncio.CancelledError:
            # A request lasts too long after SIGTERM, for example as its body never ends.
            if not self._lifecycle.is_draining or answer.is_started:
                raise
            error = ApiError(503, "the server is stopping", code="shutting_down")
            await error_response(error)(scope, receive, answer.send)
        except Exception as error:
            if not isinstance(error, ApiError | JaxserveError):
                _log.error("a request failed: %s %s", scope["method"], type(error), exc_info=error)
            if not answer.is_started:
                await _refuse(as_api_error(error, renamed), scope, receive, answer.send)
        finally:
            _leave_place(scope)

    async def _take_body(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive
    ) -> bytes:
        """Read the body, unless it is large and the request could not be admitted now.

        A small body is read in any case, but refused before it is parsed. A refusal of a body that
        was not read closes the connection.
        """
        try:
            check_media(headers)
        except ApiError:
            if not self._reads_no_body(scope["path"]):
                raise
        is_small = int(headers.get(b"content-length", SMALL_BODY_BYTES + 1)) <= SMALL_BODY_BYTES
        if not is_small:
            self._check_room(scope["path"])
        body = await self._read_body(headers, receive)
        if is_small:
            scope["jaxserve.body"] = body
            self._check_room(scope["path"])
        return body

    def _check_form(self, headers: Mapping[bytes, bytes]) -> None:
        """Check the head of a form before anything of it is read."""
        most = self._config.max_file_bytes + FORM_BYTES
        if self._config.files_dir is None:
            return
        check_media(headers, b"multipart/form-data")
        if int(headers.get(b"content-length", b"0")) > most:
            raise ApiError(413, f"the body is larger than {most} bytes", "file", "too_large")

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        most, seconds = self._config.max_body_bytes, self._config.body_timeout
        too_large = ApiError(413, f"the body is larger than {most} bytes", code="too_large")
        if int(headers.get(b"content-length", b"0")) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(
                408, f"the body took longer than {seconds:g} s", code="body_timeout"
            ) from None


def _leave_place(scope: Scope) -> None:
    place: Reservation | None = scope.get("jaxserve.place")
    if place is not None:
        place.leave()


class _Answer:
    """Answer whose head is held back until there is a body to send with it.

    Attributes:
        is_started: whether anything has been sent.
    """

    def __init__(self, scope: Scope, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._joined = scope.get("jaxserve.joined", nullcontext)
        self._headers = headers
        self._head: Message | None = None
        self.is_started = False

    async def send(self, message: Message) -> None:
        """Send as ASGI does, but head and first piece together, and last piece and end."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *self._headers]
            self._head = message
            return
        head, self._head = self._head, None
        if head is None and message.get("more_body", False):
            await self._send(message)
            return
        self.is_started = True
        with self._joined():
            if head is not None:
                await self._send(head)
            await self._send(message)


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, then read on for a moment, so that a client still sending receives the answer."""
    response: Any = error_response(error)
    unread = error.status in (408, 413) or "jaxserve.body" not in scope
    if not unread:
        await response(scope, receive, send)
        return
    response.headers["connection"] = "close"

    async def hold_open(message: Message) -> None:
        await send({**message, "more_body": True} if "body" in message else message)

    await response(scope, receive, hold_open)
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while (message := await receive())["type"] == "http.request":
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
