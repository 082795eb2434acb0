"""EventPeer: watches the connection of a PUB socket through the socket's monitor."""

from __future__ import annotations

import logging
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from jaxserve.settings.kv_events import NAME

_log = logging.getLogger(__name__)
# Consecutive failed handshakes after which the peer is reported. A single handshake fails if a
# subscriber exits during it.
_MOST_FAILED = 3
# Seconds without a new attempt after which ZeroMQ has given up a closed connection.
_GIVEN_UP = 1.0
# Milliseconds to wait for a moment without a connection.
_PATIENCE = 1000
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_TRIED = zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CONNECTED
_WATCHED = _FAILED | _TRIED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class EventPeer:
    """A watcher of a PUB socket's connection to a ZeroMQ subscriber, its peer.

    ZeroMQ reconnects to a peer that closes the connection, and gives up a peer that violates the
    protocol. One warning is logged if several handshakes in succession fail, because the peer is
    then not a ZeroMQ subscriber.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context
        self._pub: zmq.Socket[Any] | None = None
        self._news: zmq.Socket[Any] | None = None
        self._num_watched = self._num_failed = 0
        self._ended: float | None = None
        self._has_warned = False

    def watch(self, pub: zmq.Socket[Any], endpoint: str) -> None:
        """Start to watch a PUB socket, before it connects to its peer at `endpoint`."""
        self._num_watched += 1
        self._pub, self._endpoint, self._ended = pub, endpoint, None
        name = f"inproc://kv-events-peer-{self._num_watched}"
        pub.monitor(name, _WATCHED)
        self._news = news = self._context.socket(zmq.PAIR)
        news.setsockopt(zmq.RCVHWM, 0)  # with a limit, ZeroMQ's own thread would wait for us
        news.connect(name)

    def has_given_up(self) -> bool:
        """Read all pending events, and return whether ZeroMQ has given up the connection.

        This is the case a second after the connection was closed, without a new attempt.
        """
        while self._read(0) is not None:
            pass
        return self._ended is not None and time.monotonic() - self._ended > _GIVEN_UP

    def close(self) -> None:
        """Close the watched PUB socket and its monitor.

        If handshakes have failed, messages that wait for the peer are dropped. ZeroMQ aborts the
        process if a peer that is not a subscriber answers while the socket is being closed, so the
        method first waits about a second for a moment without a connection.
        """
        if self._news is None or self._pub is None:
            return
        is_lost = self.has_given_up() or self._num_failed > 0
        if is_lost and self._ended is None:
            until = time.monotonic() + _PATIENCE / 1000
            while self._read(_PATIENCE) not in (None, zmq.EVENT_CONNECT_RETRIED):
                if time.monotonic() > until:
                    break
        self._pub.close(linger=0 if is_lost else None)
        self._news.close(linger=0)
        self._news = self._pub = None

    def _read(self, milliseconds: int) -> int | None:
        """Return the next event of the socket's monitor, or None after `milliseconds` without.

        The method records failed handshakes and the end of the connection.
        """
        if self._news is None or not self._news.poll(milliseconds):
            return None
        event: int = recv_monitor_message(self._news)["event"]
        self._ended = time.monotonic() if event == zmq.EVENT_DISCONNECTED else None
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_failed = 0
        if event & _FAILED:
            self._num_failed += 1
        if self._num_failed >= _MOST_FAILED and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s.endpoint: the peer at %s is no subscriber of ZeroMQ and gets no events; it is "
                "tried again and again",
                NAME,
                self._endpoint,
            )

        return event
