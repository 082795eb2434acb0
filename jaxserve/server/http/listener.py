"""The port, taken before JAX is imported, so that a port in use is reported at once."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def bind(host: str, port: int) -> socket.socket:
    """Take the port before the models are loaded; no client can connect before `listen`.

    Raises:
        OSError: it is taken, or the host is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            stack.pop_all()
            return listener
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
