"""Connection: uvicorn's h11 protocol with further limits of time and size."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from jaxserve.server.http.early_refusals import EarlyRefusals
from jaxserve.server.http.guard import FILES, FORM_BYTES, WEIGHTS
from jaxserve.server.http.head_checks import MAX_HEADER_BYTES
from jaxserve.server.http.refused_clients import Refuser
from jaxserve.server.schema.errors import ApiError, too_many_connections
from jaxserve.server.served.admission import Place
from jaxserve.server.settings import ServerConfig

# The least average size of the chunks of a body, after the first FREE_PIECES chunks. Parsing tiny
# chunks would take more time than the request itself.
MIN_PIECE_BYTES, FREE_PIECES = 16, 4096
# Seconds that a connection beyond the limit has to send a request.
CROWD_SECONDS = 1.0
_ABSOLUTE = re.compile(rb"https?://(?P<authority>[^/?#]*)(?P<path>[^#]*).*", re.IGNORECASE)


class HttpParser(h11.Connection):
    """h11's HTTP/1 parser, which refuses bodies that are too large or come in tiny chunks.

    A request target in absolute form is replaced by its path, and its host becomes the Host header
    (RFC 9112, 3.2.2). Bodies may have `max_body_bytes`, or by their path those of `uploads`.
    """

    def __init__(self, max_body_bytes: int, uploads: Mapping[str, int]) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._max_body_bytes = self._most_bytes = max_body_bytes
        self._uploads = {path.encode(): most for path, most in uploads.items()}
        self._pieces = self._bytes = 0

    def next_event(self) -> Any:
        """Return h11's next event: a request, a part of its body, its end, or NEED_DATA.

        Raises:
            RemoteProtocolError: the data is not valid HTTP/1.0 or 1.1. The status hint is 413 if
                the body is too large or comes in tiny chunks.
        """
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._pieces += 1
            self._bytes += len(event.data)
            if self._pieces > max(FREE_PIECES, self._bytes // MIN_PIECE_BYTES):
                raise _too_large(f"The body comes in chunks of fewer than {MIN_PIECE_BYTES} bytes.")
        elif isinstance(event, h11.Request):
            self._pieces = self._bytes = 0
            if event.http_version not in (b"1.0", b"1.1"):
                raise h11.RemoteProtocolError("this version of HTTP is not served")
            event = _with_path(event)
            self._most_bytes = self._max_body_bytes
            path = event.target.partition(b"?")[0]
            for upload, most in self._uploads.items():
                if event.method == b"POST" and path.endswith(upload):
                    self._most_bytes = max(most, self._most_bytes)
        # Bytes of the current chunk that have not arrived, in a private field of h11.
        announced = getattr(self._reader, "_bytes_in_chunk", 0)
        if self._bytes + announced > self._most_bytes:
            raise _too_large(f"The body is larger than {self._most_bytes} bytes.")
        return event


def _too_large(message: str) -> h11.RemoteProtocolError:
    return h11.RemoteProtocolError(message, error_status_hint=413)


def _with_path(request: h11.Request) -> h11.Request:
    """Return the request with an absolute target (http://host/path) as a path and a Host header."""
    target = _ABSOLUTE.fullmatch(request.target)
    if target is None:
        return request
    if not target["authority"]:
        raise h11.RemoteProtocolError("the target names no host")
    path = target["path"] if target["path"].startswith(b"/") else b"/" + target["path"]
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        target=path,
        headers=[(b"host", target["authority"]), *headers],
        http_version=request.http_version,
    )


class Crowd:
    """Set of the connections beyond the server's limit, which may request only the health checks.

    Args:
        most: maximum number of members, at least 1. One more closes the oldest with a 503 error.
    """

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._members: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, connection: object) -> bool:
        return connection in self._members

    def add(self, connection: Connection) -> None:
        self._members[connection] = None
        if len(self._members) > self._most:
            next(iter(self._members)).refuse()

    def discard(self, connection: Connection) -> None:
        self._members.pop(connection, None)


# Stand-in for an asyncio transport that collects the written bytes.
class _Pieces:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


class Connection(H11Protocol):
    """HTTP connection of one client: uvicorn's protocol with limits on time and size.

    It is aborted if the client does not send a complete request header within `header_timeout`, or
    does not read for `write_timeout` while more than `send_buffer_bytes` wait to be sent.

    Args:
        limits: the server's settings, with `max_connections` that fit the limit of open files.
        crowd: the connections beyond `max_connections`, which this one may join.
        refusals: refuses requests to a full queue before they are parsed.
        received: bytes that were read from the socket before this connection was made.
        place: the place in the queue of the request at the start of `received`, or None.
        unsent: bytes of earlier responses to send first.
    """

    def __init__(
        self,
        *,
        limits: ServerConfig,
        crowd: Crowd,
        refusals: EarlyRefusals,
        received: bytes = b"",
        place: Place | None = None,
        unsent: bytes = b"",
        **named: Any,
    ) -> None:
        super().__init__(**named)
        uploads: dict[str, int] = {}
        if limits.files_dir is not None:
            uploads[FILES] = limits.max_file_bytes + FORM_BYTES
        if limits.enable_weight_updates:
            uploads[WEIGHTS] = sys.maxsize  # its endpoint knows the size of the model
        self.conn = HttpParser(limits.max_body_bytes, uploads)
        self._limits = limits
        self._crowd = crowd
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._refusals = refusals
        self._refuser: Refuser | None = None  # made by the first refusal
        self._received, self._place, self._unsent = received, place, unsent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) - len(self._crowd) > self._limits.max_connections:
            self._crowd.add(self)
            self._header_timer = self.loop.call_later(CROWD_SECONDS, self.refuse)
        size = self._limits.send_buffer_bytes
        transport.set_write_buffer_limits(high=size)
        connected: socket.socket | None = transport.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        self._watch_header()
        if self._unsent:
            transport.write(self._unsent)
        if self._received:
            self.data_received(self._received)

    def refuse(self) -> None:
        """Close this surplus connection, after a 503 error unless an answer is being sent."""
        self._stop("_header_timer")
        self._crowd.discard(self)
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_raw(too_many_connections(), 503))
        self.transport.close()

    def close_idle(self) -> None:
        """Close the connection unless a request on it is being answered."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        is_next = self.conn.their_state is h11.IDLE
        if is_next:
            self._leave_place()  # taken again below, unless other requests have all places
        if self._refuser is not None or self._refusals.is_full():
            data = self._refuse_early(data)
            if not data:
                return
        if is_next:
            self._place = self._refusals.reserve(data)
            head = data.partition(b"\r\n\r\n")[0]
            if b"\r\n " in head or b"\r\n\t" in head:
                self.send_400_response("A header is folded over several lines.")
                return
        super().data_received(data)
        self._watch_header()

    def _refuse_early(self, data: bytes) -> bytes:
        if self._refuser is None:
            self._refuser = Refuser(self._refusals, self._limits, self.loop)
        return self._refuser.feed(self, data, self.server_state.default_headers)

    def _leave_place(self) -> None:
        if self._place is not None:
            self._place.leave()

    def can_answer(self) -> bool:
        """Return whether a refusal can be sent on this connection now.

        It can if no other request is being read or answered, no sent bytes are waiting, and the
        connection is neither closing nor beyond the limit.
        """
        parser, cycle = self.conn, self.cycle
        return (
            parser.their_state is h11.IDLE
            and parser.our_state is h11.IDLE
            and not parser.trailing_data[0]
            and (cycle is None or cycle.response_complete)
            and not self.flow.write_paused
            and not self.transport.is_closing()
            and self not in self._crowd
        )

    def send_early(self, answer: bytes) -> None:
        """Send the bytes of a refusal of a request that was not parsed, and count the request."""
        self.transport.write(answer)
        self.server_state.total_requests += 1
        self._unset_keepalive_if_required()
        self._stop("_header_timer")

    def end(self) -> None:
        """Close the connection after the responses that were sent."""
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_header()

    def handle_events(self) -> None:
        before = self.scope
        super().handle_events()
        scope = self.scope
        if scope is before or scope is None:
            return
        if scope["http_version"] == "1.1":
            scope["jaxserve.write"] = self._write_event  # type: ignore[typeddict-unknown-key]
            scope["jaxserve.joined"] = self._joined  # type: ignore[typeddict-unknown-key]
        scope["jaxserve.place"] = self._place  # type: ignore[typeddict-unknown-key]
        if self in self._crowd:
            scope["jaxserve.crowded"] = True  # type: ignore[typeddict-unknown-key]

    def _should_upgrade(self) -> bool:
        # Requests for another protocol are answered in HTTP/1.
        return False

    async def _write_event(self, data: bytes) -> bool:
        # This saves the cost of ASGI and h11, which a chunk needs (False) until the head is sent.
        cycle = self.cycle
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if cycle.disconnected:
            return True
        if not cycle.response_started or self.conn.our_state is not h11.SEND_BODY:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Context manager in which data for the client is collected. Its end writes the data."""
        cycle, joined = self.cycle, _Pieces()
        cycle.transport = joined  # type: ignore[assignment]
        try:
            yield
        finally:
            cycle.transport = self.transport
            if joined.pieces:
                self.transport.write(b"".join(joined.pieces))
            if joined.is_closed:
                self.transport.close()

    def shutdown(self) -> None:
        """Close the connection after the answer that is being sent, or at once without one."""
        if self.conn.our_state is h11.ERROR:
            self.transport.close()
        else:
            super().shutdown()

    def _watch_header(self) -> None:
        # The timer aborts the connection after `header_timeout`. It runs until the first header, or
        # a header that has begun, is complete, and while the rest of a body is missing.
        state, cycle = self.conn.their_state, self.cycle
        waiting = state is h11.IDLE and self.timeout_keep_alive_task is None
        if state is h11.SEND_BODY and cycle is not None and cycle.response_complete:
            waiting = True
        if not waiting or self.transport.is_closing():
            self._stop("_header_timer")
        elif self._header_timer is None:
            seconds = self._limits.header_timeout
            self._header_timer = self.loop.call_later(seconds, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop("_write_timer")
        self._write_timer = self.loop.call_later(self._limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("_write_timer")

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.discard(self)
        self._leave_place()
        self._stop("_header_timer")
        self._stop("_write_timer")
        if self._refuser is not None:
            self._refuser.clear()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _stop(self, name: str) -> None:
        timer: asyncio.TimerHandle | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with an error unless an answer has begun, and close the connection.

        The status is 400, or the parser's hint (413 or 431). `msg` is the text of the error.
        """
        reason = sys.exc_info()[1]
        status = getattr(reason, "error_status_hint", 400)
        if status == 431:
            msg = f"The headers are larger than {MAX_HEADER_BYTES} bytes."
        elif status == 413:
            msg = str(reason)
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_raw(ApiError(status, msg, code="bad_http"), status))
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def _raw(error: ApiError, status: int) -> bytes:
    # A whole response, for data that does not reach the application.
    body, phrase = msgspec.json.encode(error.body()), STATUS_PHRASES[status]
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b" % (status, phrase, len(body), body)
    )
