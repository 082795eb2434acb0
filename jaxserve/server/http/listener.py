"""The port, taken before JAX is imported, so that a port in use is reported at once."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

# Connections taken over before the event loop does something else. A turn of the loop may take
# 60 ms beside an engine; with 32 of them, refusals waited for seconds.
_TAKEN_AT_ONCE = 256


class Listener(socket.socket):
    """Listening socket.

    Attributes:
        take: takes a connection over as it is accepted, or returns False; None for no such thing.
    """

    take: Callable[[socket.socket], bool] | None = None

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection that is not taken over.

        Raises:
            BlockingIOError: there is none now.
        """
        for _ in range(_TAKEN_AT_ONCE):
            client, address = super().accept()
            if self.take is None or not self.take(client):
                return client, address
        raise BlockingIOError


def bind(host: str, port: int) -> Listener:
    """Take the port before the models are loaded; no client can connect before `listen`.

    Raises:
        OSError: it is taken, or the host is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as stack:
            listener = stack.enter_context(Listener(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
            )  # accepted ones inherit it
            listener.bind(address)
            # Of two servers that start at the same time neither listens yet, and the second would
            # get the port too, load its models, and fail.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            stack.pop_all()
            return listener
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def allow_reuse(listener: socket.socket) -> None:
    """Let a socket listen, and a later server, on a port with connections that ended lately."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


@contextmanager
def bind_path(path: str) -> Iterator[Listener]:
    """Take a Unix domain socket; its file goes away at the end.

    A file that a server left behind, on which nobody listens, is replaced. A lock beside it shows
    that a server has the path which does not listen yet.

    Raises:
        OSError: a server has it, another kind of file is there, or none can be made.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            stack.enter_context(_locked(path + ".lock"))
            with suppress(FileNotFoundError):
                if not stat.S_ISSOCK(os.lstat(path).st_mode):
                    raise OSError(0, "there is a file, which is no socket")
                if _is_heard(path):
                    raise OSError(0, "another server listens there")
                os.unlink(path)
            listener.bind(path)
        except OSError as error:
            raise OSError(f"cannot listen on {path}: {error.strerror}") from error
        try:
            yield listener
        finally:
            with suppress(OSError):
                os.unlink(path)


@contextmanager
def _locked(path: str) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(0, "another server listens there") from None
        yield
        with suppress(OSError):
            os.unlink(path)
    finally:
        os.close(lock)


def _is_heard(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
