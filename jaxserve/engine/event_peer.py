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
    """The peer of a connecting PUB socket.

    One warning is logged if the peer is not a ZeroMQ subscriber. ZeroMQ reconnects to a peer that
    closes the connection, and gives up a peer that violates the protocol.

    Args:
        context: the ZeroMQ context of the socket.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context
        self._pub: zmq.Socket[Any] | None = None
        self._news: zmq.Socket[Any] | None = None
        self._num_watched = self._num_failed = 0
        self._ended: float | None = None
        self._has_warned = False

    def watch(self, pub: zmq.Socket[Any], endpoint: str) -> None:
        """Start to watch a socket, before it connects to `endpoint`."""
        self._num_watched += 1
        self._pub, self._endpoint, self._ended = pub, endpoint, None
        name = f"inproc://kv-events-peer-{self._num_watched}"
        pub.monitor(name, _WATCHED)
        self._news = news = self._context.socket(zmq.PAIR)
        news.setsockopt(zmq.RCVHWM, 0)  # with a limit, ZeroMQ's own thread would wait for us
        news.connect(name)

    def has_given_up(self) -> bool:
        """Read all events of the connection, and return whether ZeroMQ has given it up."""
        while self._read(0) is not None:
            pass
        return self._ended is not None and time.monotonic() - self._ended > _GIVEN_UP

    def close(self) -> None:
        """Close the watched socket, and drop messages that its peer does not accept.

        ZeroMQ aborts the process if a peer that is not a subscriber answers while the socket is
        being closed. The method therefore waits until no connection is open.
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
        """Return the next event, or None after `milliseconds` without one."""
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
