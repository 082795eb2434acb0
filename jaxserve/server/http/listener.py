"""Listening sockets, bound before JAX is imported so that a port in use is reported at once."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to a port, which refuses connections until `listen` is called.

    Raises:
        OSError: the port is in use, or the host is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
            )  # accepted ones inherit it
            listener.bind(address)
            # With address reuse, a second server that starts at the same time could bind the port
            # as well, and would fail only after it has loaded its models.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            stack.pop_all()
            return listener
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def allow_reuse(listener: socket.socket) -> None:
    """Allow this socket and a later server to listen on a port with recently closed connections."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


@contextmanager
def bind_path(path: str) -> Iterator[socket.socket]:
    """Return a bound Unix domain socket, and delete its file at the end.

    The file of a server that has ended is replaced. A lock file beside it marks a server that has
    bound the path and does not listen yet.

    Raises:
        OSError: another server uses the path, another kind of file is there, or the file cannot be
            created.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
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
