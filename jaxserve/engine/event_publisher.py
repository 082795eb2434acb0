"""EventPublisher: changes of the prefix cache as vLLM's KV events, over ZeroMQ.

Only imported where `kv_events_config` enables events: pyzmq comes with the extra `events`. The
format is that of vLLM 0.33, `vllm/distributed/kv_events.py`: three frames, the topic, a sequence
number (8 bytes, big-endian) and in msgpack `[time, events, data_parallel_rank]`, where an event is
a map whose "type" names it.
"""

from __future__ import annotations

import errno
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import zmq

from jaxserve.engine.event_peer import EventPeer
from jaxserve.errors import InvalidRequest
from jaxserve.scheduling.page_changes import Change, RemovedPages, StoredPages
from jaxserve.settings.kv_events import NAME, KVEventsConfig

_log = logging.getLogger(__name__)
# Where pages lie; vLLM's word for a device's memory, whatever the device.
MEDIUM = "GPU"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
# Seconds between two batches: a subscriber reads one of many changes faster than many of one.
_PAUSE = 0.005
_MOST_CHANGES = 256
# Milliseconds for which an engine that closes waits for subscribers to take what is left.
_LINGER = 1000
# The most milliseconds between tries to connect.
_MOST_RECONNECT = 1000
# Seconds between looks at the socket of an idle publisher.
_LOOK = 1.0


class KVCacheEvent(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A change of the cache."""


class BlockStored(KVCacheEvent):
    """Pages of one prefix, one after the other, that can be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    """Pages that are found no more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """No page is found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one message."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def block_hashes(keys: np.ndarray) -> list[int]:
    """Return for keys, u64[n, WORDS], what stands for them in public: integers below 2**64.

    A digest, because keys themselves would tell the numbers that they are made of: sums of those.
    """
    data = keys.astype("<u8").tobytes()
    size = keys.shape[1] * 8
    return [
        int.from_bytes(blake2b(data[i : i + size], digest_size=8).digest(), "big")
        for i in range(0, len(data), size)
    ]


def events_of(change: Change, block_size: int, window: int | None) -> Iterator[Event]:
    """Convert a change of the cache to events.

    Args:
        block_size: tokens of a page.
        window: of the model's layers, where all have the same.
    """
    if isinstance(change, StoredPages):
        kind = "full_attention" if window is None else "sliding_window"
        hashes, parents = block_hashes(change.keys), block_hashes(change.parents)
        salts = iter(change.salts)
        extra = [
            (salt,) if nth == 0 and (salt := next(salts)) else None for nth in change.nth.tolist()
        ]
        follows = (np.diff(change.slots) == 0) & (np.diff(change.nth) == 1)
        ends = [*((~follows).nonzero()[0] + 1).tolist(), len(hashes)]
        for first, end in itertools.pairwise([0, *ends]):
            yield BlockStored(
                block_hashes=hashes[first:end],
                parent_block_hash=parents[first] if change.nth[first] else None,
                token_ids=change.tokens[first:end].ravel().tolist(),
                block_size=block_size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=extra[first:end],
                group_idx=0,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
    elif isinstance(change, RemovedPages):
        yield BlockRemoved(block_hashes(change.keys), MEDIUM, group_idx=0)
    else:
        yield AllBlocksCleared()


class EventPublisher:
    """A PUB socket that tells of every change, and a ROUTER socket that tells of it again.

    `add` belongs to the engine's thread and hands over, no more: a thread of the publisher's own
    encodes and sends, another answers subscribers that lost messages. A PUB socket drops what a
    slow subscriber does not take. Each message has the next number, and so has each change that was
    dropped because the queue was full: a gap in the numbers says that something is missing, and a
    replay has it unless it was never sent, or `buffer_steps` messages ago.

    Args:
        config: that publishes.
        block_size: tokens of a page.
        window: of the model's layers, where all have the same.

    Attributes:
        endpoint, replay_endpoint: as they were opened, with the ports that the system chose.
        num_dropped: changes that a full queue pushed out, as of the newest batch.

    Raises:
        InvalidRequest: an endpoint cannot be opened.
    """

    def __init__(self, config: KVEventsConfig, block_size: int, window: int | None = None) -> None:
        self._config, self._block_size, self._window = config, block_size, window
        self._topic = config.topic.encode()
        self._queue: deque[Change] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self.num_dropped = 0
        self._num_gone = 0  # dropped since the newest batch; their numbers are still to be left out
        self._next_number = 0
        kept = 0 if config.replay_endpoint is None else config.buffer_steps
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._sent_lock = threading.Lock()
        self._context: zmq.Context[Any] = zmq.Context()
        self.replay_endpoint: str | None = None
        self._peer = EventPeer(self._context)
        threads = [threading.Thread(target=self._publish, name="kv-events", daemon=True)]
        try:
            self._pub, self.endpoint = self._open(zmq.PUB, "endpoint", config.hwm)
            if config.replay_endpoint is not None:
                # For a whole replay and its end. ZeroMQ learns that half of it left only when all
                # of that half did, and looks for such news after a hundred requests in a row.
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
        """Return a socket and its endpoint.

        Args:
            field: of the configuration, with the endpoint.
            most: messages that wait for one peer.
        """
        endpoint: str = getattr(self._config, field)
        found = self._context.socket(kind)
        found.setsockopt(zmq.SNDHWM, most)
        found.setsockopt(zmq.LINGER, _LINGER)
        found.setsockopt(zmq.IPV6, int("[" in endpoint))
        is_bound = any(text in endpoint for text in ("*", "::", "//0.0.0.0:", "ipc://"))
        try:
            if is_bound or kind == zmq.ROUTER:
                found.bind(endpoint)
            else:
                # Each connection of a peer that is no subscriber may leave a message in one queue.
                # ZeroMQ aborts the process where that queue is full.
                found.setsockopt(zmq.RCVHWM, 0)
                found.setsockopt(zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT)
                self._peer.watch(found, endpoint)
                found.connect(endpoint)
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)
            if error.errno == errno.EADDRINUSE:
                reason += "; another process or model has it"
            raise InvalidRequest(
                f"{NAME}.{field}: {endpoint} cannot be opened ({reason})", NAME
            ) from None
        return found, found.getsockopt_string(zmq.LAST_ENDPOINT)

    def add(self, change: Change) -> None:
        """Hand over a change. It never waits for a subscriber, nor for room in the queue."""
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
        """Read the peers' messages, and connect again where ZeroMQ has given up a peer."""
        self._pub.getsockopt(zmq.EVENTS)  # reads subscriptions, and frees what peers left behind
        if self._peer.has_given_up():
            self._peer.close()
            self._pub, self.endpoint = self._open(zmq.PUB, "endpoint", self._config.hwm)

    def _take(self) -> list[Change] | None:
        """Wait for changes; return the next ones, in their order, or None once all were taken.

        There may be none after `_LOOK` seconds.
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
                    *(self._config.max_queue_size, NAME),
                )
            self.num_dropped += gone
            self._next_number += gone
        return changes

    def _send(self, changes: Iterable[Change]) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        events = [
            event
            for change in changes
            for event in events_of(change, self._block_size, self._window)
        ]
        payload = msgspec.msgpack.encode(KVEventBatch(time.time(), events, 0))
        with self._sent_lock:  # first: who sees the gap behind it may request it at once
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
        """Send what is kept from a number on, and the end."""
        with self._sent_lock:
            kept = [(number, payload) for number, payload in self._sent if number >= first]
        for number, payload in kept:
            head = (client, b"", self._topic, number.to_bytes(8, "big"))
            self._router.send_multipart((*head, payload))
        self._router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        """Send what was added, as far as subscribers take it within a second. Idempotent."""
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
