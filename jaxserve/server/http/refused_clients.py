"""RefusedClients: connections that cost little while all that they send is refused.

A task, a transport and a parser for each cost as much as several refusals. Whoever comes while the
queue is full gets them when there is something to serve.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.server import ServerState

from jaxserve.server.http.early_refusals import EarlyRefusals
from jaxserve.server.http.refuser import Refuser
from jaxserve.server.served.admission import Reservation
from jaxserve.server.settings import ServerConfig

# Bytes that are read at once.
_READ_BYTES = 64 << 10
_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class RefusedClients:
    """Taker of connections that come while the queue is full.

    Args:
        refusals: what is refused.
        limits: the server's settings.
        state: the server's connections, and the headers of every answer.
        make_connection: returns the protocol of a connection whose request was read and is not
            refused, for `received` bytes of it and those of answers that are still `unsent`.
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
        """Take over a connection that has just been accepted, and read and refuse what it sent.

        Returns:
            False where the connection is another's: there is room for many requests, or none for
            connections, or it has sent nothing yet.
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
        """Make an ordinary connection of one that was taken over.

        The request that `received` begins with has its place from now on.
        """
        place = self.refusals.reserve(received)
        make = partial(self._make_connection, received=received, place=place, unsent=unsent)
        task = self.loop.create_task(self.loop.connect_accepted_socket(make, client))
        self._tasks.add(task)
        task.add_done_callback(partial(self._end_giving, place))

    def _end_giving(self, place: Reservation | None, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if place is not None and (task.cancelled() or task.exception() is not None):
            place.leave()


class RefusedClient:
    """Connection all of whose requests were refused so far, as a member of the server's.

    Args:
        client: its socket.
        home: what it shares with the others.
    """

    def __init__(self, client: socket.socket, home: RefusedClients) -> None:
        self._client = client
        self._home = home
        self._refuser = Refuser(home.refusals, home.limits, home.loop)
        self._unsent = b""
        self._is_watched = False
        home.state.connections.add(self)  # type: ignore[arg-type]

    def take(self, data: bytes) -> None:
        """Refuse the requests in some bytes; become an ordinary connection where one is not."""
        state = self._home.state
        rest = self._refuser.feed(self, data, state.default_headers)
        if self._client.fileno() < 0:
            self._refuser.clear()
        elif rest or self._unsent:
            self._become_ordinary(rest)
        elif not self._is_watched:
            self._is_watched = True
            # By its number: a selector that does not know a socket describes it, which takes calls
            # of the kernel.
            self._home.loop.add_reader(self._client.fileno(), self._read)

    def can_answer(self) -> bool:
        return not self._unsent and self._client.fileno() >= 0

    def send_early(self, answer: bytes) -> None:
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
        self._leave()
        self._client.close()

    # As the server's other connections have them.
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
