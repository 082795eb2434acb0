"""Early refusals on connections: on ordinary ones, and on sockets that have no connection yet.

A task, a transport and a parser for each client cost as much as several refusals. A client that
comes while the queue is full gets them with its first request that is not refused.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from uvicorn.server import ServerState

from jaxserve.server.http.early_refusals import EarlyRefusals
from jaxserve.server.http.guard import LINGER_SECONDS
from jaxserve.server.served.admission import Place
from jaxserve.server.settings import ServerConfig

# Maximum number of bytes of one read from a socket.
_READ_BYTES = 64 << 10
_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Refusable(Protocol):
    """Connection of a client whose HTTP requests may be refused before they are parsed."""

    def can_answer(self) -> bool:
        """Return whether no other request is being read, and no answer is waiting to be sent."""
        ...

    def send_early(self, answer: bytes) -> None:
        """Send the bytes of a whole response to a request that was not parsed."""
        ...

    def end(self) -> None:
        """Close the connection after the responses that were sent."""
        ...


class Refuser:
    """Reader of one connection's bytes that answers refused HTTP requests and drops their bodies.

    After a refusal the connection stays open for the keep-alive time. It is closed if the client
    asked for it, or if the body is large. The rest of a body must arrive within the header's time,
    or within LINGER_SECONDS if the connection closes.

    Args:
        refusals: decides which requests are refused, and builds the responses.
        limits: the server's settings, with the times.
        loop: the event loop of the connection.
    """

    def __init__(
        self, refusals: EarlyRefusals, limits: ServerConfig, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._refusals = refusals
        self._limits = limits
        self._num_to_drop = 0  # missing bytes of a refused request's body
        self._is_last = False  # whether the connection closes after the last refusal
        self._deadline = _Deadline(loop)

    def feed(
        self, connection: Refusable, data: bytes, more_headers: list[tuple[bytes, bytes]]
    ) -> bytes:
        """Answer the refused requests at the start of `data`, and return the other bytes.

        Args:
            connection: the connection that received the bytes, on which refusals are sent.
            data: the received bytes. They may begin with the rest of a refused request's body.
            more_headers: headers to add to every refusal.

        Returns:
            The bytes from the first request on that is not refused, for the HTTP parser. Empty if
            all requests are refused, or if the connection closes after a refusal.
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
        """Cancel the timer that would close the connection."""
        self._deadline.clear()

    def _wait(self, connection: Refusable) -> None:
        # Close the connection now, or when the rest of a body or the next request is late.
        if not self._num_to_drop and self._is_last:
            connection.end()
            return
        limits = self._limits
        seconds = limits.header_timeout if self._num_to_drop else limits.keep_alive_timeout
        self._deadline.set(LINGER_SECONDS if self._is_last else seconds, connection.end)


class _Deadline:
    """Timer of an event loop that calls an action once. Delaying it further makes no new timer."""

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


class RefusedClients:
    """Reader of sockets that are accepted while the queue is full or nearly full.

    Args:
        refusals: decides which requests are refused, and builds the responses.
        limits: the server's settings.
        state: uvicorn's state of the server, with its connections and the headers of every answer.
        make_connection: returns the protocol of an ordinary connection. Its keyword arguments are
            `received`, bytes read from the socket, `place`, the place of the request at their
            start, and `unsent`, bytes of refusals that the socket has not accepted.
    """

    def __init__(
        self,
        refusals: EarlyRefusals,
        limits: ServerConfig,
        state: ServerState,
        make_connection: Callable[..., asyncio.Protocol],
    ) -> None:
        self.refusals = refusals
        self.limits = limits
        self.state = state
        self.loop = asyncio.get_running_loop()
        self._make_connection = make_connection
        self._tasks: set[asyncio.Task[Any]] = set()

    def take(self, client: socket.socket) -> bool:
        """Read from a socket that has just been accepted, and answer the refused requests.

        Returns:
            True if the socket is served here, or closed since its client has left. False, for
            uvicorn to serve it, if the queue has many free places, the server has no room for a
            connection, or the client has not sent data yet.
        """
        is_room = len(self.state.connections) < self.limits.max_connections
        if not is_room or not self.refusals.is_nearly_full():
            return False
        try:
            data = client.recv(_READ_BYTES, _NOW)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            RefusedClient(client, self).take(data)
        else:
            client.close()
        return True

    def give_back(self, client: socket.socket, received: bytes, unsent: bytes) -> None:
        """Make an ordinary connection of a socket, which parses the bytes read from it.

        The request at the start of `received` takes its place in the queue at once.

        Args:
            client: the socket.
            received: bytes read from it that are not refused.
            unsent: bytes of refusals to send first.
        """
        place = self.refusals.reserve(received)
        make = partial(self._make_connection, received=received, place=place, unsent=unsent)
        task = self.loop.create_task(self.loop.connect_accepted_socket(make, client))
        self._tasks.add(task)
        task.add_done_callback(partial(self._end_giving, place))

    def _end_giving(self, place: Place | None, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if place is not None and (task.cancelled() or task.exception() is not None):
            place.leave()


class RefusedClient:
    """Client's socket whose requests were all refused so far, one of the server's connections.

    Args:
        client: the socket.
        home: the server's `RefusedClients`.
    """

    def __init__(self, client: socket.socket, home: RefusedClients) -> None:
        self._client = client
        self._home = home
        self._refuser = Refuser(home.refusals, home.limits, home.loop)
        self._unsent = b""
        self._is_watched = False
        home.state.connections.add(self)  # type: ignore[arg-type]

    def take(self, data: bytes) -> None:
        """Answer the refused requests in `data`, bytes read from the socket, and watch the socket.

        If a request is not refused, or the socket does not accept all bytes of a refusal, an
        ordinary connection takes over the socket.
        """
        state = self._home.state
        rest = self._refuser.feed(self, data, state.default_headers)
        if self._client.fileno() < 0:
            self._refuser.clear()
        elif rest or self._unsent:
            self._become_ordinary(rest)
        elif not self._is_watched:
            self._is_watched = True
            # By its number: a selector formats an unknown socket object, which takes system calls.
            self._home.loop.add_reader(self._client.fileno(), self._read)

    def can_answer(self) -> bool:
        """Return whether the socket is open and has accepted all bytes of the refusals."""
        return not self._unsent and self._client.fileno() >= 0

    def send_early(self, answer: bytes) -> None:
        """Send the bytes of a refusal. Bytes that the socket does not accept now are stored.

        The socket is closed if its client has left.
        """
        self._home.state.total_requests += 1
        try:
            num_sent = self._client.send(answer, _NOW)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            self.end()
            return
        self._unsent = answer[num_sent:]

    def end(self) -> None:
        """Close the socket, and remove it from the server's connections."""
        self._leave()
        self._client.close()

    # The methods of uvicorn's connections with the same effect.
    shutdown = close_idle = end

    def _leave(self) -> None:
        self._refuser.clear()
        self._home.state.connections.discard(self)  # type: ignore[arg-type]
        if self._is_watched:
            self._is_watched = False
            self._home.loop.remove_reader(self._client.fileno())

    def _read(self) -> None:
        try:
            data = self._client.recv(_READ_BYTES, _NOW)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.take(data)
        else:
            self.end()

    def _become_ordinary(self, received: bytes) -> None:
        self._leave()
        self._home.give_back(self._client, received, self._unsent)
