"""Guard: the middleware that every request passes before it is routed.

It bounds headers, body and the time for the body, and checks the key and the request's origin.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import JaxserveError
from jaxserve.server.api.streaming import ClientGone, error_response
from jaxserve.server.schema.errors import ApiError, as_api_error, too_many_connections
from jaxserve.server.served.admission import Lifecycle
from jaxserve.server.settings import ServerConfig

_log = logging.getLogger(__name__)
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
MAX_HEADER_LINE = 8 << 10
MAX_REQUEST_ID = 128
# A body up to this size is read even where the answer is a refusal, so that the connection stays.
SMALL_BODY_BYTES = 64 << 10
LINGER_SECONDS = 0.5
# The path whose endpoint reads its body itself, a form with a file.
FILES = "/v1/files"
# Fields and boundaries of such a form, besides its file.
FORM_BYTES = 64 << 10
# Paths without a key: an orchestrator, which has none, checks whether the process lives, and has
# room.
OPEN_PATHS = frozenset({"/health", "/v1/health", "/ping", "/ready"})
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """ASGI middleware, which adds entries to the scope.

    `jaxserve.body` is the whole body, `jaxserve.key` the API key (None where none is required).
    `jaxserve.renamed` is that of `EndpointRequest`. `jaxserve.crowded` marks connections over the
    limit.

    Args:
        app: the application that it guards.
        config: the limits.
        lifecycle: while the server drains, answers end their connections.
        open_paths: paths that need no key, besides those of health.
        check_room: raises where a request to a path could not be admitted now, whatever its body;
            called before the body is parsed.
        reads_no_body: whether a path's endpoint reads no body, so that its kind does not matter.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        lifecycle: Lifecycle,
        open_paths: frozenset[str] = frozenset(),
        check_room: Callable[[str], None] = lambda path: None,
        reads_no_body: Callable[[str], bool] = lambda path: False,
    ) -> None:
        self._app = app
        self._config = config
        self._lifecycle = lifecycle
        self._check_room = check_room
        self._reads_no_body = reads_no_body
        self._open_paths = OPEN_PATHS | open_paths
        if config.open_metrics:
            self._open_paths |= {"/metrics"}
        self._keys = [hashlib.sha256(key.encode()).digest() for key in config.api_key or ()]
        self._hosts = _LOCAL_NAMES | {config.host} | set(config.allowed_hosts or ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _by_name(scope["headers"])
        request_id = _printable(headers.get(b"x-request-id", b"")) or uuid4().hex.encode()
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
            self._check_headers(scope["headers"])
            if b"content-length" in headers and b"transfer-encoding" in headers:
                raise ApiError(400, "both Content-Length and Transfer-Encoding", code="bad_http")
            self._check_origin(headers)
            scope["jaxserve.key"] = self._check_key(scope, headers)
            body = b""
            if scope["method"] == "POST" and scope["path"] == FILES:
                self._check_form(headers)
            else:
                if scope["method"] == "POST":
                    body = await self._take_body(scope, headers, receive)
                scope["jaxserve.body"] = body
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

    def _check_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        if len(headers) > MAX_HEADERS:
            raise ApiError(431, f"more than {MAX_HEADERS} headers", code="too_many_headers")
        sizes = [len(name) + len(value) for name, value in headers]
        if sum(sizes) > MAX_HEADER_BYTES:
            raise ApiError(
                431, f"headers of more than {MAX_HEADER_BYTES} bytes", code="headers_too_large"
            )
        if max(sizes, default=0) > MAX_HEADER_LINE:
            raise ApiError(
                431, f"a header is longer than {MAX_HEADER_LINE} bytes", code="header_too_long"
            )

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse what pages of other sites send to a loopback server through a browser."""
        if not self._config.is_local:
            return
        host = _host_of(b"//" + headers.get(b"host", b""))
        # No browser reaches a Unix socket by itself, and clients put any name there.
        if host not in self._hosts and self._config.uds is None:
            raise ApiError(403, "this Host is not served; see --allowed-hosts", code="bad_host")
        origin = headers.get(b"origin")
        allowed = self._config.allowed_origins or ()
        if origin is None or "*" in allowed or origin.decode("latin-1") in allowed:
            return
        if _host_of(origin) not in self._hosts:
            raise ApiError(
                403, "this Origin may not call; see --allowed-origins", code="bad_origin"
            )

    def _check_key(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str | None:
        if not self._keys or scope["path"] in self._open_paths:
            return None
        given = headers.get(b"x-api-key", b"")
        if b"authorization" in headers:
            scheme, _, given = headers[b"authorization"].partition(b" ")
            if scheme.lower() != b"bearer":
                given = b""
        digest = hashlib.sha256(given.strip()).digest()
        # Every key is compared, so that the time reveals nothing.
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(matches):
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return digest.hex()

    async def _take_body(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive
    ) -> bytes:
        """Read the body, unless it is large and the request could not be admitted now.

        A small body is read in any case, but refused before it is parsed. A refusal of a body that
        was not read closes the connection.
        """
        try:
            _check_media(headers)
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
        _check_media(headers, b"multipart/form-data")
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


def _by_name(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Map headers by name; a header given twice has both values, so that it matches nothing."""
    joined: dict[bytes, bytes] = {}
    for name, value in headers:
        joined[name] = joined[name] + b", " + value if name in joined else value
    return joined


def _host_of(url: bytes) -> str | None:
    try:
        return urlsplit(url.decode("ascii")).hostname
    except ValueError:
        return None


def _printable(text: bytes) -> bytes:
    return bytes(byte for byte in text[:MAX_REQUEST_ID] if 32 < byte < 127)


def _check_media(headers: Mapping[bytes, bytes], wanted: bytes = b"application/json") -> None:
    media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media != wanted:
        text = f"Content-Type must be {wanted.decode()}"
        raise ApiError(415, text, code="unsupported_media")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "Content-Encoding is not supported", code="unsupported_encoding")


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
