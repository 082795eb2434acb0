"""Guard: the middleware that checks every request before it is routed.

It checks headers, API key and origin, refuses requests for which the queue has no room, and reads
the body within its limits of size and time.
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
from jaxserve.server.http import head_checks
from jaxserve.server.schema.errors import ApiError, as_api_error, too_many_connections
from jaxserve.server.served.admission import Lifecycle, Place
from jaxserve.server.settings import ServerConfig

_log = logging.getLogger(__name__)
# A body up to this size is read before a refusal, so that the connection can stay open.
SMALL_BODY_BYTES = 64 << 10
LINGER_SECONDS = 0.5
# The paths whose endpoints read the body themselves: a form with a file, and safetensors bytes.
FILES, WEIGHTS = "/v1/files", "/update_weights"
_BYTES = b"application/octet-stream"
# Bytes for the other fields and the boundaries of the form.
FORM_BYTES = 64 << 10


class Guard:
    """ASGI middleware that checks each HTTP request, reads its body, and turns errors into answers.

    It adds entries to the scope: `jaxserve.body` is the whole body. `jaxserve.key` is the digest of
    the API key, or None if the path needs no key. `jaxserve.request_id` is the id of the request,
    which every answer carries. `jaxserve.renamed` is an empty dict, which endpoints fill with the
    names of fields for error messages. It reads the entry `jaxserve.crowded` of connections over
    the limit, and gives back `jaxserve.place`, the request's place in the queue, after the body has
    been read.

    Args:
        app: the application to call.
        checks: checks of headers, origin and API key.
        lifecycle: state of the server. While it drains, every answer closes its connection.
        check_room: called with the path before a body is parsed, and before a large body is read.
            It raises if no request to this path can be admitted now.
        reads_no_body: returns whether the endpoint of a path ignores the body, so that any
            Content-Type is accepted.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        checks: head_checks.HeadChecks,
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
        headers = head_checks.by_name(scope["headers"])
        request_id = head_checks.id_of_request(headers)
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
            if is_crowded and scope["path"] not in head_checks.OPEN_PATHS:
                raise too_many_connections()
            key = self._checks.check(scope["path"], scope["headers"], headers)
            scope["jaxserve.key"] = key
            body = b""
            if scope["method"] == "POST" and scope["path"] == FILES:
                self._check_form(headers)
            elif scope["method"] == "POST" and scope["path"] == WEIGHTS and _is_bytes(headers):
                head_checks.check_media(headers, _BYTES)
            else:
                if scope["method"] == "POST":
                    body = await self._take_body(scope, headers, receive)
                scope["jaxserve.body"] = body
            _leave_place(scope)
            await self._app(scope, receive, answer.send)
        except ClientGone:
            return
        except asyncio.CancelledError:
            # The request outlasts the time to drain after SIGTERM: its body may never end.
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
        # A small body is read before the queue is checked, so that the connection stays open after
        # a refusal. A large body is refused unread, which closes the connection.
        try:
            head_checks.check_media(headers)
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
        most = self._config.max_file_bytes + FORM_BYTES
        if self._config.files_dir is None:
            return
        head_checks.check_media(headers, b"multipart/form-data")
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


def _is_bytes(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == _BYTES


def _leave_place(scope: Scope) -> None:
    place: Place | None = scope.get("jaxserve.place")
    if place is not None:
        place.leave()


class _Answer:
    """Sender of one HTTP answer, which sends the head together with the first part of the body.

    Args:
        headers: headers to add to the head.
    """

    def __init__(self, scope: Scope, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._joined = scope.get("jaxserve.joined", nullcontext)
        self._headers = headers
        self._head: Message | None = None
        self.is_started = False  # whether a part of the answer has been sent

    async def send(self, message: Message) -> None:
        """Send an ASGI message of the answer. A head is held back until the next message."""
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
    """Send an error response. If the request's body is unread, read it for LINGER_SECONDS.

    The connection closes after an unread body. A client that is still sending would otherwise get a
    reset connection instead of the error.
    """
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
