"""Relay: a local port for JAX's connection to the leader that stays open if the leader is lost."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

_CONNECT_SECONDS = 5.0
_PIECE = 1 << 16


class Relay:
    """A loopback port that forwards each connection to another address, in background threads.

    JAX's client aborts its process with stack frames of C++ as soon as its connection closes, and
    offers no other choice (jax 0.10.2). Connections to this port stay open when the other end
    closes, so that `Group` says which host is lost and ends the process.

    Args:
        address: host and port to which connections are forwarded.

    Attributes:
        address: host and port of the loopback port.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._far = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._open: set[socket.socket] = {self._listener}
        threading.Thread(target=self._accept, name="jaxserve-relay", daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # `close` ends it
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._far, _CONNECT_SECONDS)
        except OSError:  # the leader's service has not started yet, and JAX tries again
            near.close()
            return
        far.settimeout(None)
        self._open |= {near, far}
        threading.Thread(target=_copy, args=(far, near), daemon=True).start()
        _copy(near, far)
        for end in (near, far):
            self._open.discard(end)
            _end(end)

    def close(self) -> None:
        """Close all forwarded connections and the listening loopback port."""
        for end in list(self._open):
            _end(end)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_PIECE):
            sink.sendall(data)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # wakes the threads that wait for it
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
