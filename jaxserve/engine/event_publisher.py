"""EventPublisher: changes of the prefix cache as vLLM's KV events, over ZeroMQ.

This module is imported only if `kv_events_config` enables events, because pyzmq comes with the
extra `events`. The format is that of vLLM 0.33 (`vllm/distributed/kv_events.py`). A message has
three frames: the topic, a sequence number (8 bytes, big-endian), and `[time, events,
data_parallel_rank]` in msgpack. An event is a map whose "type" is its name.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import zmq

from jaxserve.engine.event_peer import EventPeer
from jaxserve.engine.kv_events import batch_of
from jaxserve.errors import InvalidRequest
from jaxserve.scheduling.page_index import Change
from jaxserve.settings.kv_events import NAME, KVEventsConfig

_log = logging.getLogger(__name__)
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
# Seconds between batches. A subscriber reads one batch of many changes faster than many of one.
_PAUSE = 0.005
_MOST_CHANGES = 256
# Milliseconds for which a closing engine waits until subscribers have read all messages.
_LINGER = 1000
# The most milliseconds between attempts to connect.
_MOST_RECONNECT = 1000
# Seconds between checks of the socket of an idle publisher.
_LOOK = 1.0


class EventPublisher:
    """The publisher of an engine's KV events: changes of the prefix cache, sent over ZeroMQ.

    The engine's thread calls `add`, which only queues a change. One thread encodes and sends the
    changes through a PUB socket. If there is a replay endpoint, another thread sends up to
    `buffer_steps` earlier messages again, through a ROUTER socket, to subscribers that request
    them.

    A PUB socket drops messages that a slow subscriber does not read. Messages are numbered, and a
    change that was dropped from a full queue uses up a number too. A gap in the numbers therefore
    shows a subscriber that messages are missing.

    Args:
        window: the attention window if all layers have the same, otherwise None.

    Attributes:
        endpoint: the opened endpoint, with the port that the system chose.

    Raises:
        InvalidRequest: an endpoint cannot be opened.
    """

    def __init__(self, config: KVEventsConfig, block_size: int, window: int | None = None) -> None:
        self._config, self._block_size, self._window = config, block_size, window
        self._topic = config.topic.encode()
        self._queue: deque[Change] = deque()
        self._wake = threading.Condition()
        self._closing = False
        # The changes that were dropped from a full queue, up to the newest batch.
        self.num_dropped = 0
        self._num_gone = 0  # dropped since the newest batch, their numbers not yet skipped
        self._next_number = 0
        num_replayed = 0 if config.replay_endpoint is None else config.buffer_steps
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=num_replayed)
        self._sent_lock = threading.Lock()
        self._context: zmq.Context[Any] = zmq.Context()
        self.replay_endpoint: str | None = None  # the opened endpoint of replays, or None
        self._peer = EventPeer(self._context)
        threads = [threading.Thread(target=self._publish, name="kv-events", daemon=True)]
        try:
            self._pub, self.endpoint = self._open(zmq.PUB, "endpoint", config.hwm)
            if config.replay_endpoint is not None:
                # Room for a whole replay and its end. ZeroMQ notices that half of the queue was
                # sent only after all of that half, and checks after a hundred successive requests.
                most = 2 * (config.buffer_steps + 1) + 1000
                self._router, self.replay_endpoint = self._open(zmq.ROUTER, "replay_endpoint", most)
                threads.append(
                    threading.Thread(target=self._replay, name="kv-events-replay", daemon=True)
                )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._threads = threads
        for thread in threads:
            thread.start()

    def _open(self, kind: int, field: str, most: int) -> tuple[Any, str]:
        """Open a PUB or ROUTER socket, and return it with its endpoint (the port is resolved).

        A ROUTER socket binds its endpoint. A PUB socket binds a local or wildcard address, and
        connects to any other address.

        Args:
            field: name of the setting with the endpoint.
            most: the most messages in the send queue of one peer.

        Raises:
            InvalidRequest: the endpoint cannot be opened.
        """
        endpoint: str = getattr(self._config, field)
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, most)
        socket.setsockopt(zmq.LINGER, _LINGER)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        is_bound = any(text in endpoint for text in ("*", "::", "//0.0.0.0:", "ipc://"))
        try:
            if is_bound or kind == zmq.ROUTER:
                socket.bind(endpoint)
            else:
                # Each connection of a peer that is not a subscriber may leave a message in one
                # queue. ZeroMQ aborts the process if that queue is full.
                socket.setsockopt(zmq.RCVHWM, 0)
                socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT)
                self._peer.watch(socket, endpoint)
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)
            if error.errno == errno.EADDRINUSE:
                reason += "; another process or model has it"
            raise InvalidRequest(
                f"{NAME}.{field}: {endpoint} cannot be opened ({reason})", NAME
            ) from None
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def add(self, change: Change) -> None:
        """Queue a change of the prefix cache for sending, without waiting.

        If the queue is full, its oldest change is dropped.
        """
        with self._wake:
            if len(self._queue) >= self._config.max_queue_size:
                self._queue.popleft()
                self._num_gone += 1
            self._queue.append(change)
            self._wake.notify()

    def _publish(self) -> None:
        while (changes := self._take()) is not None:
            try:
                self._look()
                if changes:
                    self._send(changes)
            except Exception:
                _log.exception("events of the prefix cache were not published")
            if changes and not self._closing:
                time.sleep(_PAUSE)
        self._peer.close()
        self._pub.close()

    def _look(self) -> None:
        self._pub.getsockopt(zmq.EVENTS)  # reads subscriptions, and frees messages of old peers
        if self._peer.has_given_up():
            self._peer.close()
            self._pub, self.endpoint = self._open(zmq.PUB, "endpoint", self._config.hwm)

    def _take(self) -> list[Change] | None:
        """Wait up to `_LOOK` seconds for queued changes, and return the next ones in order.

        The result has at most `_MOST_CHANGES` changes. It is empty if none has arrived, and None if
        the publisher is closing and the queue is empty. Dropped changes are counted, and their
        message numbers are skipped.
        """
        with self._wake:
            if not (self._queue or self._closing):
                self._wake.wait(_LOOK)
            if not self._queue:
                return None if self._closing else []
            count = min(len(self._queue), _MOST_CHANGES)
            changes = [self._queue.popleft() for _ in range(count)]
            gone, self._num_gone = self._num_gone, 0
        if gone:
            if not self.num_dropped:
                _log.warning(
                    "changes of the prefix cache come faster than they are published: of more than "
                    "%d (%s.max_queue_size) the oldest are dropped; subscribers see a gap",
                    self._config.max_queue_size,
                    NAME,
                )
            self.num_dropped += gone
            self._next_number += gone
        return changes

    def _send(self, changes: Iterable[Change]) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        payload = batch_of(changes, self._block_size, self._window)
        with self._sent_lock:  # before sending, since a subscriber may request a replay at once
            self._sent.append((number, payload))
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _replay(self) -> None:
        try:
            while True:
                frames = self._router.recv_multipart()
                if len(frames) == 3 and len(frames[2]) == 8:
                    self._send_again(frames[0], int.from_bytes(frames[2], "big"))
                else:
                    _log.warning("a request for a replay is not one sequence number of 8 bytes")
        except zmq.ContextTerminated:
            self._router.close(linger=0)

    def _send_again(self, client: bytes, first: int) -> None:
        """Send the stored messages from number `first` on, and the end marker, to a subscriber."""
        with self._sent_lock:
            messages = [(number, payload) for number, payload in self._sent if number >= first]
        for number, payload in messages:
            head = (client, b"", self._topic, number.to_bytes(8, "big"))
            self._router.send_multipart((*head, payload))
        self._router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        """Send the queued changes, and close the sockets and threads of the publisher. Idempotent.

        Messages that a subscriber does not read within a second are dropped.
        """
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        self._threads[0].join()
        # This interrupts the other thread, and returns once all sockets are closed.
        self._context.term()
        for thread in self._threads[1:]:
            thread.join()
