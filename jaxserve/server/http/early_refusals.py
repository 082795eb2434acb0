"""EarlyRefusals: answers for requests to a full queue, before they are parsed and routed.

A server at ten times its capacity refuses nine requests of ten. The usual way of a refusal, through
h11, uvicorn and Starlette, takes as long as hundreds of tokens.
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
from jaxserve.server.served.admission import Reservation
from jaxserve.server.settings import ServerConfig

# Heads that mean the same to every parser; any other goes the usual way.
_HEAD = re.compile(
    rb"POST (?P<path>/[!->@-~]*+)(?:\?[!-~]*+)? HTTP/1\.1\r\n"
    rb"(?P<headers>(?:[!#$%&'*+.^_`|~0-9A-Za-z-]++:[\t -~]*+\r\n)++)\r\n"
)
_LENGTH = re.compile(rb"[0-9]{1,9}")
# While more are free, connections are made before their requests get places.
_FEW_PLACES = 32
# Headers that change how a request is read or answered.
_UNUSUAL = (b"expect", b"transfer-encoding", b"upgrade")


class EarlyRefusal(NamedTuple):
    """Refusal of a request.

    Attributes:
        answer: the whole response.
        size: bytes of the request, head and body.
        is_last: whether the connection is to be closed behind it.
    """

    answer: bytes
    size: int
    is_last: bool


class _Request(NamedTuple):
    """Request for tokens: the bytes of its body, and of head and body."""

    path: str
    named: dict[bytes, bytes]
    length: int
    size: int


class EarlyRefusals:
    """Finder of requests that are refused whatever their bodies.

    It refuses what `check_room` refuses with 429, and answers as the application would, to the
    byte. Where a head is unusual, or refused for another reason, it finds nothing. Requests that
    are not refused get places, so that no more are read than can be admitted.

    Args:
        config: the limits.
        checks: of the head.
        paths: of requests for tokens.
        count_free: returns for how many more there are places.
        check_room: refuses one for which there is none, and counts it.
        take_place: takes a place; None where they are not counted.
    """

    def __init__(
        self,
        config: ServerConfig,
        checks: HeadChecks,
        paths: Iterable[str],
        count_free: Callable[[], int],
        check_room: Callable[[str], None],
        take_place: Callable[[], Reservation | None],
    ) -> None:
        self._count_free = count_free
        self._checks = checks
        self._check_room = check_room
        self._take_place = take_place
        # Requests of pages, whose answers need headers of their own, go the usual way; all of them
        # where every page may call.
        origins = config.allowed_origins or ()
        self._are_all_of_pages = "*" in origins
        self._page_header = b"origin" if origins else b""
        self._vary = [(b"vary", b"Origin")] if origins else []
        self._most_bytes = config.max_body_bytes
        roots = {"", config.root_path}
        self._paths = {f"{root}{path}".encode(): path for path in paths for root in roots}
        self._made: tuple[str, bytes] = ("", b"")

    def is_full(self) -> bool:
        """Return whether every request for tokens is refused now."""
        return self._count_free() == 0

    def is_nearly_full(self) -> bool:
        """Return whether the connections that come in one turn of the loop may fill the queue."""
        return self._count_free() < _FEW_PLACES

    def reserve(self, data: bytes) -> Reservation | None:
        """Take a place for the request that some bytes begin with.

        Returns:
            The place; None where it needs none, or is refused for its head, or part of it is still
            to come: a client that is slow with its body keeps no other from a place.
        """
        request = self._read(data)
        if request is None or request.size > len(data):
            return None
        return self._take_place()

    def find(self, data: bytes, more_headers: list[tuple[bytes, bytes]]) -> EarlyRefusal | None:
        """Refuse the request that some bytes begin with; None where it must go the usual way.

        Args:
            data: with at least the whole head.
            more_headers: of every answer.
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
            more = [*more_headers, *self._vary, (b"x-request-id", id_of_request(named))]
            if is_last:
                more.append((b"connection", b"close"))
            return EarlyRefusal(self._written(error, more), request.size, is_last)
        return None

    def _read(self, data: bytes) -> _Request | None:
        """Read the head that some bytes begin with.

        Returns:
            The request; None where it is not for tokens, or unusual, or refused for its head.
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
        return _Request(path, named, int(length), head.end() + int(length))

    def _is_usual(self, named: Mapping[bytes, bytes], num_headers: int) -> bool:
        """Return whether no header is missing, given twice, or in need of an answer of its own."""
        if len(named) < num_headers or b"host" not in named:
            return False
        if self._are_all_of_pages or self._page_header in named:
            return False
        is_kept = named.get(b"connection", b"keep-alive").lower() in (b"keep-alive", b"close")
        return is_kept and not any(name in named for name in _UNUSUAL)

    def _written(self, error: Overloaded, more_headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the response for an error, most of which is that of the last one."""
        if self._made[0] != str(error):
            self._made = (str(error), _response(error))
        begin, _, body = self._made[1].partition(b"\r\n\r\n")
        lines = b"".join(b"%b: %b\r\n" % header for header in more_headers)
        return b"%b\r\n%b\r\n%b" % (begin, lines, body)


def _response(error: Overloaded) -> bytes:
    """Return the response for an error, without the headers that differ between requests."""
    problem = as_api_error(error)
    body = encode(problem.body())
    headers = {**problem.headers, "content-length": str(len(body)), "content-type": JSON}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    status = HTTPStatus(problem.status)
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{lines}\r\n".encode() + body
