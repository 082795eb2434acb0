"""Listening sockets, their certificates, and the connections that the limit of open files allows.

The module imports no JAX, so that a port in use or a wrong certificate is reported at once.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.server.settings import ServerConfig

# Sockets taken over before the event loop does other work. An iteration of the loop may take 60 ms
# beside an engine. With 32 sockets in each, refusals waited for seconds.
_TAKEN_AT_ONCE = 256


class Listener(socket.socket):
    """Listening socket that offers each accepted socket to a function before uvicorn gets it.

    Attributes:
        take: called with each accepted socket. Returns True if it serves the socket itself. None
            leaves all sockets to uvicorn.
    """

    take: Callable[[socket.socket], bool] | None = None

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept sockets until `take` leaves one, and return this one with its client's address.

        Raises:
            BlockingIOError: no socket is waiting, or `take` has taken 256 sockets.
        """
        for _ in range(_TAKEN_AT_ONCE):
            client, address = super().accept()
            if self.take is None or not self.take(client):
                return client, address
        raise BlockingIOError


def bind(host: str, port: int) -> Listener:
    """Return a TCP socket bound to a host and port. Connections are refused until it listens.

    Port 0 takes a free port.

    Raises:
        OSError: the port is in use, or the host is not an address of this machine.
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
            # With address reuse, a second server that starts at the same time could bind the port
            # as well, and would fail only after it has loaded its models.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            stack.pop_all()
            return listener
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def allow_reuse(listener: socket.socket) -> None:
    """Set SO_REUSEADDR on a socket, so that it and a later server can use a port in TIME_WAIT."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


@contextmanager
def bind_path(path: str) -> Iterator[Listener]:
    """Context manager that yields a bound Unix domain socket, and finally deletes its file.

    The file of a server that has ended is replaced. A lock file beside it marks a server that has
    bound the path and does not listen yet.

    Raises:
        OSError: another server uses the path, another kind of file is there, or the file cannot be
            created.
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


# Files that a process has open besides its connections, including short-lived ones.
SPARE_FILES = 256
# Spare files per connection that the event loop may accept in one iteration.
_SHARE_OF_A_TURN = 8
_FEWEST = 16


@dataclass(frozen=True)
class Room:
    """Limit of open files, number of connections to serve, and number that may wait beyond it."""

    limit: float  # number of files that the process may have open
    connections: int  # number of connections served at a time
    # Number of further connections that may be accepted in one iteration of the event loop, or wait
    # for a refusal. The file of a refused connection is closed some iterations later.
    beyond: int


def make_room(connections: int) -> Room:
    """Raise the process's limit of open files for a number of connections, up to its hard limit.

    Returns:
        The limit, and the numbers of connections that fit. At most `connections` are served.

    Raises:
        ValueError: the hard limit leaves too little room beside the files that are open now.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + 2 * SPARE_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    num_open = len(os.listdir("/dev/fd"))
    num_free = (needed if limit == resource.RLIM_INFINITY else limit) - num_open
    if num_free < _FEWEST:
        raise ValueError(
            f"the limit of open files, {limit}, leaves no room for connections beside the "
            f"{num_open} that are open: raise it (ulimit -n)"
        )
    spare = min(SPARE_FILES, num_free // 2)
    return Room(limit, min(connections, num_free - spare), spare // _SHARE_OF_A_TURN)


_FIELDS = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")


def check_certificates(config: ServerConfig) -> None:
    """Check that the TLS certificate, key, authorities and ciphers in the settings can be loaded.

    Settings without a certificate need no check.

    Raises:
        InvalidRequest: a file is missing or malformed, or a cipher is unknown. The error names the
            setting.
    """
    if config.ssl_certfile is None:
        return
    import ssl  # takes 10 ms, and few servers need it

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key = config.ssl_keyfile
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(config, name)
        try:
            with open(path or config.ssl_certfile, "rb"):
                pass
        except OSError as error:
            raise InvalidRequest(f"{name}: cannot read {path}: {error.strerror}", name) from error
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(config.ssl_certfile, key, lambda: b"")
    except (ssl.SSLError, OSError) as error:
        name = "ssl_certfile" if key is None else "ssl_keyfile"
        raise InvalidRequest(
            f"{name}: {key or config.ssl_certfile} is no private key without a password, in PEM, "
            f"that belongs to {config.ssl_certfile}",
            name,
        ) from error
    try:
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (ssl.SSLError, OSError) as error:
        raise InvalidRequest(
            f"ssl_ca_certs: {config.ssl_ca_certs} holds no certificates in PEM", "ssl_ca_certs"
        ) from error
    try:
        if config.ssl_ciphers is not None:
            context.set_ciphers(config.ssl_ciphers)
    except ssl.SSLError as error:
        raise InvalidRequest(
            f"ssl_ciphers: OpenSSL has no cipher {config.ssl_ciphers!r}", "ssl_ciphers"
        ) from error


def uvicorn_options(config: ServerConfig) -> dict[str, Any]:
    """Return uvicorn's keyword arguments for TLS from the settings, {} without a certificate."""
    if config.ssl_certfile is None:
        return {}
    ciphers = {} if config.ssl_ciphers is None else {"ssl_ciphers": config.ssl_ciphers}
    return {name: getattr(config, name) for name in _FIELDS} | ciphers
