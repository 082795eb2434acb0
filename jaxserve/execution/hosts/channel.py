"""Channel: authenticated frames over one connection between a leader and a follower.

A frame consists of its length, a kind, a number, raw bytes, and an HMAC-SHA256 (RFC 2104) over a
counter and the rest. Each direction of a connection has its own key, derived from the shared secret
and a random number of each side, so a recorded frame cannot be replayed. Bytes are never executed.
"""

from __future__ import annotations

import hmac
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.settings.hosts import HostsConfig

PROTOCOL = b"jaxserve hosts 1"
NONCE_BYTES = 16
MAC_BYTES = 32
# Most bytes of a frame. The largest launch, a page table row for each slot, is much smaller.
MOST_BYTES = 1 << 28
# Most bytes of a frame before the other side is authenticated.
MOST_GREETING_BYTES = 1 << 16
BEAT_SECONDS = 0.5
_HEADER = struct.Struct("<IHH")  # payload bytes, kind, number
_COUNTER = struct.Struct("<Q")
# Kinds of frames that the channel itself reads.
BEAT, CLOSE = 0, 1


class ChannelError(JaxserveError, ConnectionError):
    """Raised if a connection is closed or silent, or receives an invalid frame."""


class Frame(NamedTuple):
    """A message between a leader and a follower.

    Attributes:
        kind: the kind of the message.
        number: a number whose meaning depends on the kind: the number of a program, or the rank of
            a host.
        payload: raw bytes.
    """

    kind: int
    number: int
    payload: memoryview


class Channel:
    """An authenticated connection between two hosts.

    The constructor exchanges random numbers with the other side, from which keys are derived. After
    `start`, one thread reads frames, and another sends a heartbeat twice a second, so silence means
    that the other process has stopped.

    Args:
        connection: an open, unused connection.
        secret: the secret that all hosts share.
        leads: whether this side is the leader.
        seconds: the timeout for the greeting of the other side.

    Raises:
        OSError: the other side does not greet in time. ChannelError if it uses another protocol.

    Attributes:
        seconds: the silence after which the other side is lost.
        sent_bytes: the number of bytes sent so far.
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, leads: bool, seconds: float = 5.0
    ) -> None:
        connection.settimeout(seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        try:
            ours, theirs = _exchange(connection)
        except OSError:
            connection.close()
            raise
        nonces = ours + theirs if leads else theirs + ours
        keys = [_code(secret, PROTOCOL + nonces + side) for side in (b"leader", b"follower")]
        self._own_key, self._other_key = keys if leads else keys[::-1]
        self._num_sent = self._num_received = 0
        self.sent_bytes = 0
        self.seconds = 60.0
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._on_loss: Callable[[str], None] | None = None
        self._is_closed = False
        self._heard_at = time.monotonic()
        self._reason = "it was closed"

    def send(self, kind: int, number: int = 0, *parts: bytes | memoryview) -> None:
        """Send a frame with an HMAC to the other side. Thread-safe.

        Args:
            kind: the kind of the frame.
            number: the number in the frame.
            parts: bytes that are concatenated to the payload.

        Raises:
            ChannelError: the connection is closed, or the other side is lost.
        """
        size = sum(map(len, parts))
        header = _HEADER.pack(size, kind, number)
        with self._sending:
            message = b"".join((_COUNTER.pack(self._num_sent), header, *parts))
            self._num_sent += 1
            try:
                self._connection.sendall(message[_COUNTER.size :] + _code(self._own_key, message))
            except OSError as error:
                raise ChannelError(f"nothing can be sent: {error}") from error
            self.sent_bytes += len(message) - _COUNTER.size + MAC_BYTES

    def receive_first(self) -> Frame:
        """Return the first frame of the other side, whose HMAC proves that it has the secret.

        Raises:
            OSError: the frame does not arrive in time. ChannelError if it is too long or its HMAC
                is wrong.
        """
        return self._receive(MOST_GREETING_BYTES)

    def start(self, on_loss: Callable[[str], None]) -> None:
        """Start the threads that read frames and send heartbeats, and return at once.

        Args:
            on_loss: called at most once, in another thread, with the reason if the other side is
                lost.
        """
        self._connection.settimeout(None)
        self._on_loss, self._heard_at = on_loss, time.monotonic()
        for run in (self._read, self._beat):
            threading.Thread(target=run, name="jaxserve-hosts", daemon=True).start()

    def take(self) -> Frame:
        """Wait for the next frame that is no heartbeat, and return it.

        Raises:
            ChannelError: the connection has ended.
        """
        frame = self._inbox.get()
        if frame is None:
            self._inbox.put(None)
            raise ChannelError(self._reason)
        return frame

    def leave(self) -> None:
        """Send a CLOSE frame, after which the other host closes the connection. Idempotent."""
        was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            with suppress(ChannelError):
                self.send(CLOSE)

    def wait_closed(self, seconds: float = 5.0) -> None:
        """Wait until the other side closes the connection after `leave`, then close this side.

        Args:
            seconds: the longest wait for each frame. This side then closes the connection.
        """
        with suppress(queue.Empty):
            while self._inbox.get(timeout=seconds) is not None:
                pass
        self.close()

    def close(self) -> None:
        """Close the connection to the other host at once, without calling `on_loss`. Idempotent."""
        self._is_closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                frame = self._receive(MOST_BYTES)
                self._heard_at = time.monotonic()
                # After this frame, the end of the connection is not a loss.
                self._is_closed |= frame.kind == CLOSE
                if frame.kind != BEAT:
                    self._inbox.put(frame)
        except OSError as error:  # of the connection, or a ChannelError
            self._lose(str(error))

    def _beat(self) -> None:
        while not self._is_closed:
            time.sleep(BEAT_SECONDS)
            silence = time.monotonic() - self._heard_at
            if silence > self.seconds:
                self._lose(f"it has been silent for {silence:.0f} s")
                return
            # If another thread is blocked in `send` because the peer does not read, do not wait.
            if self._sending.acquire(blocking=False):
                self._sending.release()
                with suppress(ChannelError):
                    self.send(BEAT)

    def _lose(self, reason: str) -> None:
        was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            self._inbox.put(None)
            return
        self._reason = reason
        self.close()
        self._inbox.put(None)
        if self._on_loss is not None:
            self._on_loss(reason)

    def _receive(self, most: int) -> Frame:
        header = _exactly(self._connection, _HEADER.size)
        size, kind, number = _HEADER.unpack(header)
        if size > most:
            raise ChannelError(f"a frame of {size} bytes; allowed: at most {most}")
        body = _exactly(self._connection, size + MAC_BYTES)
        payload, code = memoryview(body)[:size], body[size:]
        signed = b"".join((_COUNTER.pack(self._num_received), header, payload))
        if not hmac.compare_digest(_code(self._other_key, signed), code):
            raise ChannelError("a frame that the secret does not confirm")
        self._num_received += 1
        return Frame(kind, number, payload)


def _exchange(connection: socket.socket) -> tuple[bytes, bytes]:
    # Returns our number and the number of the other side.
    ours = os.urandom(NONCE_BYTES)
    connection.sendall(PROTOCOL + ours)
    greeting = _exactly(connection, len(PROTOCOL) + NONCE_BYTES)
    if not greeting.startswith(PROTOCOL):
        raise ChannelError("it speaks another protocol, or is another version of jaxserve")
    theirs = bytes(greeting[len(PROTOCOL) :])
    if theirs == ours:  # a mirror
        raise ChannelError("it repeats what it receives")
    return ours, theirs


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if not count:
            raise ChannelError("it closed the connection")
        filled += count
    return data


def _code(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def listen(config: HostsConfig) -> socket.socket:
    """Return a socket that listens for followers on the leader's `master_addr` and `master_port`.

    Raises:
        InvalidRequest: the address cannot be bound.
    """
    host, port = config.master_addr, config.master_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise InvalidRequest(
            f"master_addr: {host}:{port} cannot be bound ({error}); it is this host's own private "
            "address, and a free port",
            "master_addr",
        ) from error


def connect(address: tuple[str, int], seconds: float) -> socket.socket:
    """Return a connection to the leader, with a new attempt every 0.2 s until the leader listens.

    Args:
        address: host and port of the leader.
        seconds: the time after which a failed attempt is the last one.

    Raises:
        OSError: the last attempt failed.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(address, timeout=5.0)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
