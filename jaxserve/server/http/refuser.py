"""Refuser: early refusals on one connection, one request after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from jaxserve.server.http.early_refusals import EarlyRefusals
from jaxserve.server.http.guard import LINGER_SECONDS
from jaxserve.server.settings import ServerConfig

Headers = list[tuple[bytes, bytes]]


class Refusable(Protocol):
    """Connection whose requests may be refused early."""

    def can_answer(self) -> bool:
        """Return whether nothing of another request, or of its answer, is still to come or go."""
        ...

    def send_early(self, answer: bytes) -> None:
        """Send a whole answer."""
        ...

    def end(self) -> None:
        """Close behind the answers that were sent."""
        ...


class Refuser:
    """Refuser of the requests of one connection.

    Of a refused request's body, what comes later is dropped. The connection stays, as long as
    others do between requests, unless its client or a large body ends it.

    Args:
        refusals: what is refused.
        limits: the server's settings.
        loop: of the connection.
    """

    def __init__(
        self, refusals: EarlyRefusals, limits: ServerConfig, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._refusals = refusals
        self._limits = limits
        self._num_to_drop = 0
        self._is_last = False
        self._deadline = _Deadline(loop)

    def feed(self, connection: Refusable, data: bytes, more_headers: Headers) -> bytes:
        """Refuse what can be refused of some bytes; return those that must go the usual way.

        Args:
            connection: from which they came.
            data: the bytes.
            more_headers: of every answer.
        """
        if self._num_to_drop:
            num_dropped = min(self._num_to_drop, len(data))
            self._num_to_drop -= num_dropped
            data = data[num_dropped:]
            if not self._num_to_drop:
                self._wait(connection)
        while data and self._refusals.is_full() and connection.can_answer():
            refusal = self._refusals.find(data, more_headers)
            if refusal is None:
                break
            connection.send_early(refusal.answer)
            self._num_to_drop = max(0, refusal.size - len(data))
            self._is_last = refusal.is_last
            data = data[refusal.size :]
            self._wait(connection)
        if self._is_last:
            return b""
        if data:
            self._deadline.clear()
        return data

    def clear(self) -> None:
        """End the time limit, at the end of the connection."""
        self._deadline.clear()

    def _wait(self, connection: Refusable) -> None:
        """Wait for the rest of a body, or the next request; close where neither is to come."""
        if not self._num_to_drop and self._is_last:
            connection.end()
            return
        limits = self._limits
        seconds = limits.header_timeout if self._num_to_drop else limits.keep_alive_timeout
        self._deadline.set(LINGER_SECONDS if self._is_last else seconds, connection.end)


class _Deadline:
    """Time at which something is done; putting it off costs no new timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._when = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, action: Callable[[], None]) -> None:
        self._when = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._when:
            self.clear()
        if self._timer is None:
            self._timer = self._loop.call_at(self._when, self._check, action)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, action: Callable[[], None]) -> None:
        self._timer = None
        if self._loop.time() < self._when:
            self._timer = self._loop.call_at(self._when, self._check, action)
        else:
            action()
