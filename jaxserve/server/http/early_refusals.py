"""EarlyRefusals: answers to requests for a full queue, before the HTTP parser reads them.

A server at ten times its capacity refuses nine of ten requests. A refusal through h11, uvicorn and
Starlette costs as much time as hundreds of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import NamedTuple

from jaxserve.errors import Overloaded
from jaxserve.server.api.streaming import JSON, encode
from jaxserve.server.http.guard import SMALL_BODY_BYTES
from jaxserve.server.http.head_checks import HeadChecks, by_name, check_media, id_of_request
from jaxserve.server.schema.errors import ApiError, as_api_error
from jaxserve.server.served.admission import Place
from jaxserve.server.settings import ServerConfig

# Heads that every HTTP parser reads in the same way. The h11 parser reads all other heads.
_HEAD = re.compile(
    rb"POST (?P<path>/[!->@-~]*+)(?:\?[!-~]*+)? HTTP/1\.1\r\n"
    rb"(?P<headers>(?:[!#$%&'*+.^_`|~0-9A-Za-z-]++:[\t -~]*+\r\n)++)\r\n"
)
_LENGTH = re.compile(rb"[0-9]{1,9}")
# With at least this number of free places, new connections are made without a look at their data.
_FEW_PLACES = 32
# Headers that change how a request is read or answered.
_UNUSUAL = (b"expect", b"transfer-encoding", b"upgrade")


class EarlyRefusal(NamedTuple):
    """Response to a refused HTTP request, with the size of the request.

    Attributes:
        answer: the bytes of the whole response.
        size: number of bytes of the request's head and body.
        is_last: whether the connection must be closed after the response.
    """

    answer: bytes
    size: int
    is_last: bool


class _TokenRequest(NamedTuple):
    # The head of a request to a path that generates tokens.
    path: str
    named: dict[bytes, bytes]  # headers by name in lower case
    length: int  # bytes of the body
    size: int  # bytes of head and body


class EarlyRefusals:
    """Reader of plain HTTP requests that refuses them with 429 while the queue is full.

    The bytes of a refusal are the same as the application's answer. Requests with an unusual head,
    or with an error in the head, are not refused here. The application answers them. An admitted
    request takes a `Place`, so that the server parses no more requests than the queue has room for.

    Args:
        config: the server's settings.
        checks: checks of the headers, origin and API key.
        paths: paths whose requests generate tokens, without the root path.
        count_free: returns the number of free places in the queue.
        check_room: called with a path. Raises Overloaded, and counts the refusal, if the queue has
            no room.
        take_place: takes a place in the queue. Returns None if places are not counted.
    """

    def __init__(
        self,
        config: ServerConfig,
        checks: HeadChecks,
        paths: Iterable[str],
        count_free: Callable[[], int],
        check_room: Callable[[str], None],
        take_place: Callable[[], Place | None],
    ) -> None:
        self._count_free = count_free
        self._checks = checks
        self._check_room = check_room
        self._take_place = take_place
        # The application answers requests of web pages, whose answers need further headers. If
        # every origin is allowed, all requests may be of pages.
        origins = config.allowed_origins or ()
        self._are_all_of_pages = "*" in origins
        self._page_header = b"origin" if origins else b""
        self._vary = [(b"vary", b"Origin")] if origins else []
        self._most_bytes = config.max_body_bytes
        roots = {"", config.root_path}
        self._paths = {f"{root}{path}".encode(): path for path in paths for root in roots}
        # The last error message and its encoded response. Most refusals have the same message.
        self._response: tuple[str, bytes] = ("", b"")

    def is_full(self) -> bool:
        """Return whether the queue has no free place, so that it refuses all new requests."""
        return self._count_free() == 0

    def is_nearly_full(self) -> bool:
        """Return whether the queue has fewer than 32 free places.

        The connections accepted in one iteration of the event loop may then fill the queue.
        """
        return self._count_free() < _FEW_PLACES

    def reserve(self, data: bytes) -> Place | None:
        """Take a place in the queue for the HTTP request at the start of `data`.

        Returns:
            The place, or None if the request generates no tokens, has an unusual head or an error
            in the head, or is incomplete. A client that sends its body slowly takes no place.
        """
        request = self._read(data)
        if request is None or request.size > len(data):
            return None
        return self._take_place()

    def find(self, data: bytes, more_headers: list[tuple[bytes, bytes]]) -> EarlyRefusal | None:
        """Return the refusal of the HTTP request at the start of `data`, or None.

        None means that the application must read the request: the queue has room, the head is
        incomplete, unusual or has an error, or the request generates no tokens.

        Args:
            data: bytes from a client. The body of the request may be incomplete.
            more_headers: headers to add to the response.
        """
        request = self._read(data)
        if request is None:
            return None
        try:
            self._check_room(request.path)
        except Overloaded as error:
            named = request.named
            is_last = (
                request.length > SMALL_BODY_BYTES
                or named.get(b"connection", b"").lower() == b"close"
            )
            headers = [*more_headers, *self._vary, (b"x-request-id", id_of_request(named))]
            if is_last:
                headers.append((b"connection", b"close"))
            return EarlyRefusal(self._write(error, headers), request.size, is_last)
        return None

    def _read(self, data: bytes) -> _TokenRequest | None:
        """Parse and check the head of the HTTP request at the start of `data`.

        Returns:
            The head, or None if it is incomplete, unusual or has an error, or if the request's path
            generates no tokens.
        """
        head = _HEAD.match(data)
        path = None if head is None else self._paths.get(head["path"])
        if head is None or path is None:
            return None
        headers = [
            (name.lower(), value.strip(b"\t "))
            for name, _, value in (line.partition(b":") for line in head["headers"].splitlines())
        ]
        named = by_name(headers)
        length = named.get(b"content-length", b"")
        if not self._is_usual(named, len(headers)) or not _LENGTH.fullmatch(length):
            return None
        if int(length) > self._most_bytes:
            return None
        try:
            self._checks.check(path, headers, named)
            check_media(named)
        except ApiError:
            return None
        return _TokenRequest(path, named, int(length), head.end() + int(length))

    def _is_usual(self, named: Mapping[bytes, bytes], num_headers: int) -> bool:
        # No header is missing, repeated, or in need of an answer of its own.
        if len(named) < num_headers or b"host" not in named:
            return False
        if self._are_all_of_pages or self._page_header in named:
            return False
        is_kept = named.get(b"connection", b"keep-alive").lower() in (b"keep-alive", b"close")
        return is_kept and not any(name in named for name in _UNUSUAL)

    def _write(self, error: Overloaded, more_headers: list[tuple[bytes, bytes]]) -> bytes:
        if self._response[0] != str(error):
            self._response = (str(error), _response(error))
        begin, _, body = self._response[1].partition(b"\r\n\r\n")
        lines = b"".join(b"%b: %b\r\n" % header for header in more_headers)
        return b"%b\r\n%b\r\n%b" % (begin, lines, body)


# The HTTP response to an error, without the headers that vary by request.
def _response(error: Overloaded) -> bytes:
    problem = as_api_error(error)
    body = encode(problem.body())
    headers = {**problem.headers, "content-length": str(len(body)), "content-type": JSON}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    status = HTTPStatus(problem.status)
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{lines}\r\n".encode() + body
