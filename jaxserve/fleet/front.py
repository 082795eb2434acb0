"""Middleware for Serve's proxy: a second attempt for requests, and errors in OpenAI's form."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.api.streaming import error_response
from jaxserve.server.schema.errors import ApiError

# Bodies up to this size are stored until the answer begins, for a second attempt.
MOST_KEPT_BYTES = 8 << 20
_JSON = b"application/json"
# Paths that Serve itself answers.
_OWN = "/-/"


def middlewares() -> list[Middleware]:
    """Return the middleware of Ray Serve's HTTP proxy, a list with `Front`.

    Ray Serve finds this function by its name, from an environment variable.
    """
    return [Middleware(Front)]


class Front:
    """ASGI middleware of Ray Serve's proxy that sends a request again if its replica has died.

    The proxy returns without an answer in this case. The request is then sent to another replica,
    once, and the client gets an error 503 if that fails, too. After the first byte of an answer the
    request is not sent again, and the client sees a broken stream. Errors of Ray Serve itself are
    converted to OpenAI's form.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_OWN):
            await self._app(scope, receive, send)
            return
        body, answer = _StoredBody(receive), _FrontAnswer(send)
        for _ in range(2):
            # A copy, because Serve changes the scope.
            await self._app(dict(scope), body.receive, answer.send)
            if answer.is_started or not body.can_be_sent_again:
                break
            body.rewind()
        if not answer.is_started and not body.is_gone:
            error = ApiError(
                503, "the replica that had this request has ended", code="replica_died"
            )
            await error_response(error)(scope, receive, send)


class _StoredBody:
    """The body of an HTTP request, whose ASGI messages are stored so that it can be sent again.

    A body above `MOST_KEPT_BYTES` is not stored.

    Attributes:
        can_be_sent_again: whether all received messages are stored and the client is connected.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: list[Message] = []
        self._next = 0
        self._size = 0
        self.is_gone = False  # whether the client has disconnected

    @property
    def can_be_sent_again(self) -> bool:
        return self._size <= MOST_KEPT_BYTES and not self.is_gone

    async def receive(self) -> Message:
        """Return the body's next ASGI message: a stored one after `rewind`, else a new one."""
        if self._next < len(self._kept):
            self._next += 1
            return self._kept[self._next - 1]
        message = await self._receive()
        if message["type"] != "http.request":
            self.is_gone = True
            return message
        self._size += len(message.get("body", b""))
        if self._size > MOST_KEPT_BYTES:
            self._kept.clear()
            self._next = 0
        else:
            self._kept.append(message)
            self._next += 1
        return message

    def rewind(self) -> None:
        """Make `receive` return the stored messages again, from the first one."""
        self._next = 0


class _FrontAnswer:
    """The answer to an HTTP request, in which Ray Serve's own errors get OpenAI's form.

    Attributes:
        is_started: whether a replica or Ray Serve has begun to answer.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._error: ApiError | None = None
        self.is_started = False  # whether the answer has begun

    async def send(self, message: Message) -> None:
        """Send an ASGI message of the answer to the client.

        If the answer is an error of Ray Serve itself, its messages are dropped, and the last one is
        replaced by an error in OpenAI's form.
        """
        if message["type"] == "http.response.start":
            self.is_started = True
            self._error = _serve_error(message)
            if self._error is None:
                await self._send(message)
        elif self._error is None:
            await self._send(message)
        elif not message.get("more_body", False):
            response = error_response(self._error)
            await self._send(
                {
                    "type": "http.response.start",
                    "status": response.status_code,
                    "headers": response.raw_headers,
                }
            )
            await self._send({"type": "http.response.body", "body": response.body})


def _serve_error(message: Message) -> ApiError | None:
    # Errors of replicas are JSON, those of Serve are not.
    status, headers = message["status"], {k.lower(): v for k, v in message["headers"]}
    if status < 400 or headers.get(b"content-type", b"").startswith(_JSON):
        return None
    more = {"retry-after": headers[b"retry-after"].decode()} if b"retry-after" in headers else {}
    if status == 429:
        return ApiError(429, "all replicas are busy", code="queue_full", headers=more)
    if status == 408:
        return ApiError(408, "the request took too long", code="request_timeout")
    # Serve answers 404 at every path while it stops, or before the first replica is ready.
    return ApiError(503, "no replica is ready", code="no_replica", headers=more)
