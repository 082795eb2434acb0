"""Events of the prefix cache as a subscriber gets them, over ZeroMQ's sockets."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from jaxserve import SamplingParams
from jaxserve.engine import event_peer, event_publisher, kv_events
from jaxserve.engine.engine import Engine
from jaxserve.engine.event_publisher import EventPublisher
from jaxserve.scheduling.page_index import ClearedPages, RemovedPages, StoredPages
from jaxserve.settings.kv_events import KVEventsConfig
from jaxserve.start.loaded import Loaded
from tests.scheduling.subscriber import Subscriber

PATIENCE = 60
SETTINGS: dict[str, Any] = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://*:0",
    "replay_endpoint": "tcp://*:0",
}
KEYS = np.arange(1, 9, dtype=np.uint64).reshape(4, 2)
Message = tuple[bytes, int, Any]


def hash_of(key: np.ndarray) -> int:
    return int.from_bytes(blake2b(key.astype("<u8").tobytes(), digest_size=8).digest(), "big")


def stored(slots: list[int], nth: list[int], salts: list[str], size: int = 2) -> StoredPages:
    count = len(slots)
    tokens = np.arange(count * size, dtype=np.int32).reshape(count, size) + 10
    parents = np.roll(KEYS[:count], 1, axis=0)
    return StoredPages(KEYS[:count], np.array(slots), np.array(nth), parents, tokens, salts)


class Client:
    """The sockets of a subscriber."""

    def __init__(self, events: EventPublisher, room: int = 1000) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.sub, self.dealer = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.sub.set_hwm(room)
        self.sub.subscribe(b"")
        self.sub.connect(events.endpoint.replace("0.0.0.0", "127.0.0.1"))
        assert events.replay_endpoint is not None
        self.dealer.connect(events.replay_endpoint.replace("0.0.0.0", "127.0.0.1"))

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.sub.close()
        self.dealer.close()

    def next(self, milliseconds: int = 1000 * PATIENCE) -> Message | None:
        if not self.sub.poll(milliseconds):
            return None
        topic, number, payload = self.sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def join(self, events: EventPublisher) -> int:
        """Send changes until one arrives, since a subscription takes a moment.

        Returns their number.
        """
        count = 0
        while self.next(20) is None:
            events.add(ClearedPages())
            count += 1
        return count

    def next_removed(self) -> Message:
        """Return the next message that ends with the removal of a page."""
        while (found := self.next()) is not None:
            if found[2][1][-1]["type"] == "BlockRemoved":
                return found
        raise AssertionError("it never came")

    def replay(self, first: int) -> list[Message]:
        """Return the messages that the publisher still has, from number `first` on."""
        self.dealer.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[Message] = []
        while self.dealer.poll(1000 * PATIENCE):
            empty, topic, number, payload = self.dealer.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert topic == payload == b""
                return found
            found.append((topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
        raise AssertionError("a replay has no end")

    def replay_until(self, is_enough: Callable[[list[Message]], bool], first: int = 0):
        until = time.monotonic() + PATIENCE
        while not is_enough(found := self.replay(first)):
            assert time.monotonic() < until, found
        return found


@pytest.fixture
def publish() -> Iterator[Callable[..., tuple[EventPublisher, Client]]]:
    """Yield a function that makes a publisher and its client, and close all of them at the end."""
    made: list[Any] = []

    def make(room: int = 1000, window: int | None = None, **settings: Any):
        events = EventPublisher(KVEventsConfig(**SETTINGS | settings), 2, window)
        made.append(events)
        client = Client(events, room)
        made.append(client)
        return events, client

    yield make
    for thing in reversed(made):
        thing.close()


def events_in(messages: list[Message]) -> list[Any]:
    return [event for _, _, batch in messages for event in batch[1]]


def test_a_message_is_that_of_vllm(publish) -> None:
    """vLLM 0.33: the batch is an array, each event a map whose first entry is its type."""
    events, client = publish(topic="kv@pod@model", buffer_steps=3)
    before = time.time()
    for change in (
        stored([3, 3, 5, 3], [0, 1, 2, 4], ["tenant"]),
        RemovedPages(KEYS[1:3]),
        ClearedPages(),
    ):
        events.add(change)
    messages = client.replay_until(lambda found: len(events_in(found)) == 5)
    assert [topic for topic, _, _ in messages] == [b"kv@pod@model"] * len(messages)
    assert [number for _, number, _ in messages] == list(range(len(messages)))
    for _, _, (sent, _, rank) in messages:
        assert before <= sent <= time.time() and rank == 0
    one, two, three, four = (hash_of(key) for key in KEYS)

    def block_stored(hashes: list[int], parent: int | None, tokens: list[int], extra: list[Any]):
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": extra,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    want = [
        block_stored([one, two], None, [10, 11, 12, 13], [["tenant"], None]),
        block_stored([three], two, [14, 15], [None]),
        block_stored([four], three, [16, 17], [None]),
        {"type": "BlockRemoved", "block_hashes": [two, three], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]
    got = events_in(messages)
    assert [msgspec.msgpack.encode(event) for event in got] == list(
        map(msgspec.msgpack.encode, want)
    ), "other fields, or in another order"


def test_bytes_of_a_message() -> None:
    batch = kv_events.KVEventBatch(1.5, [kv_events.AllBlocksCleared()], 0)
    data = b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x91\x81\xa4type\xb0AllBlocksCleared\x00"
    assert msgspec.msgpack.encode(batch) == data


def test_pages_of_a_window_say_so(publish) -> None:
    events, client = publish(window=64)
    events.add(stored([1], [0], [""]))
    [event] = events_in(client.replay_until(lambda found: len(found) == 1))
    assert event["kv_cache_spec_kind"] == "sliding_window"
    assert event["kv_cache_spec_sliding_window"] == 64
    assert event["extra_keys"] == [None] and event["parent_block_hash"] is None


def test_a_subscriber_gets_what_comes_and_may_have_the_rest_again(publish) -> None:
    events, client = publish()
    client.join(events)
    events.add(RemovedPages(KEYS))
    found = client.next_removed()
    last = found[1]
    assert last and [number for _, number, _ in client.replay(0)] == list(range(last + 1))
    assert client.replay(last) == [found]
    assert client.replay(last + 1) == client.replay(2**64 - 1) == []


def test_a_bad_request_for_a_replay_is_not_answered(publish, caplog) -> None:
    events, client = publish()
    for frames in ((b"",), (b"", b"\0"), (b"", b"\0" * 9), (b"", b"a", b"b"), (b"\0" * 8,)):
        client.dealer.send_multipart(frames)
    events.add(ClearedPages())
    assert len(client.replay_until(lambda found: len(found) == 1)) == 1
    assert caplog.text.count("a request for a replay is not one sequence number of 8 bytes") == 5


def test_a_slow_subscriber_misses_messages_and_nobody_waits_for_it(publish, monkeypatch) -> None:
    """Lost messages can be fetched again, as far as the buffer goes."""
    monkeypatch.setattr(event_publisher, "_MOST_CHANGES", 1)
    monkeypatch.setattr(event_publisher, "_PAUSE", 0)
    events, client = publish(hwm=1, room=1, buffer_steps=15)
    first = client.join(events)
    large = stored([1], [0], [""], size=1 << 18)._replace(
        tokens=np.full((1, 1 << 18), 2**31 - 1, np.int32)  # 1.3 MB a message
    )
    for _ in range(20):
        events.add(large)
    last = first + 19
    client.replay_until(bool, last)
    assert [number for _, number, _ in client.replay(first)] == list(range(last - 14, last + 1))
    got = []
    while (message := client.next(200)) is not None:
        got += [message[1]] if message[1] >= first else []
    assert got == sorted(got) and len(got) < 20, "it was waited for"


def test_a_full_queue_drops_the_oldest_and_leaves_a_gap(publish, caplog) -> None:
    events, client = publish(max_queue_size=2)
    with events._sent_lock:  # the thread stands still as if its encoding took long
        events.add(ClearedPages())
        until = time.monotonic() + PATIENCE
        while events._queue:
            assert time.monotonic() < until
            time.sleep(0.001)
        with caplog.at_level(logging.WARNING):
            for number in range(10):
                events.add(RemovedPages(KEYS[: 1 + number // 3]))
    messages = client.replay_until(lambda found: len(found) == 2)
    assert [number for _, number, _ in messages] == [0, 9]
    counts = [len(event["block_hashes"]) for event in messages[1][2][1]]
    assert counts == [3, 4], "not the last two"
    assert events.num_dropped == 8
    assert caplog.text.count("the oldest are dropped") == 1


def test_closing_sends_what_is_left(publish) -> None:
    events, client = publish()
    client.join(events)
    events.add(RemovedPages(KEYS))
    events.close()
    events.close()
    assert client.next_removed()


def test_a_subscriber_may_bind_and_the_publisher_connect() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.subscribe(b"")
        port = sub.bind_to_random_port("tcp://127.0.0.1")
        config = KVEventsConfig(True, endpoint=f"tcp://127.0.0.1:{port}")
        events = EventPublisher(config, 2)
        while not sub.poll(20):
            events.add(ClearedPages())
        events.close()
        assert sub.recv_multipart()[0] == b""


def test_a_subscriber_knows_what_an_engine_holds(loaded: Loaded, monkeypatch) -> None:
    """Through eviction, preemption, an abort, a lost cache and the engine's end."""
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    config = replace(loaded.config, kv_events_config=SETTINGS)
    engine = Engine(replace(loaded, config=config))
    client, subscriber = Client(engine._events), Subscriber()
    client.join(engine._events)
    keys, rng = engine.scheduler.publisher.page_keys, np.random.default_rng(3)
    num_events = {"BlockStored": 0, "BlockRemoved": 0, "AllBlocksCleared": 0}

    def compare() -> None:
        want = {hash_of(key) for key in engine.pool.index.keys(engine.pool.cached())}
        until = time.monotonic() + PATIENCE
        while subscriber.held != want:
            assert time.monotonic() < until, "an event is missing"
            for event in events_in([message] if (message := client.next(20)) else []):
                num_events[event["type"]] += 1
                subscriber.receive(event)
        subscriber.check(engine.pool, keys)

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    stem = rng.integers(10, 90, 64).tolist()
    for name in range(12):
        prompt = stem[: 16 * (name % 4)] + rng.integers(10, 90, 30 + 9 * name).tolist()
        salt = "tenant" if name % 5 == 4 else None
        request = engine.requests.make(prompt, params, request_id=str(name), cache_salt=salt)
        engine.add(request, lambda delta: None)
    for step in range(10_000):
        if not engine.has_work:
            break
        engine.step()
        if step == 20:
            engine.abort("3")
        if step % 25 == 0:
            compare()
    compare()
    assert engine.pool.num_evictions and engine.scheduler.num_preemptions
    engine.pool.clear_cache()
    compare()
    engine.add(engine.requests.make(stem, params, request_id="last"), lambda delta: None)
    for _ in range(8):
        engine.step()
    engine.close()
    compare()
    assert subscriber.held and all(num_events.values())
    client.close()


# A server that answers each connection by some bytes and closes it, and a publisher that connects
# to it, in a process of its own: ZeroMQ's faults end the process.
STRANGER = """
import contextlib, logging, os, socket, sys, threading, time, zmq
from jaxserve.engine import event_peer, event_publisher
from jaxserve.settings.kv_events import KVEventsConfig
from jaxserve.scheduling.page_index import ClearedPages

answer, wanted = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
interval, event_publisher._LOOK = int(sys.argv[3]), float(sys.argv[4])
event_peer._GIVEN_UP = 0.1

class Context(zmq.Context):
    def socket(self, kind):
        made = super().socket(kind)
        made.setsockopt(zmq.RECONNECT_IVL, interval)
        return made

zmq.Context = Context
logging.basicConfig(format="%(message)s")
listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
connections = threading.Semaphore(0)

def serve():
    while True:
        connection, _ = listener.accept()
        connections.release()
        with connection, contextlib.suppress(OSError):
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

threading.Thread(target=serve, daemon=True).start()
endpoint = "tcp://127.0.0.1:%d" % listener.getsockname()[1]

def publisher():
    return event_publisher.EventPublisher(KVEventsConfig(True, endpoint=endpoint), 2)

def wait(count):
    for _ in range(count):
        assert connections.acquire(timeout=100)
"""
MANY = """
events = publisher()
wait(wanted)
events.add(ClearedPages())
while not events._next_number:
    time.sleep(0.01)
wait(10)
print("sent", flush=True)
os._exit(0)
"""
ENDS = """
for _ in range(wanted):
    events = publisher()
    wait(4)
    events.add(ClearedPages())  # which waits for the next connection
    events.close()
print("closed")
"""
HEAD = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n"
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\0PLAIN" + b"\0" * 47


PROXY = HEAD + b"<html>bad request</html>" * 2


def run_stranger(script: str, *words: str) -> tuple[str, list[str]]:
    """Run a script as a separate client, and return its output and the lines of its log."""
    run = [sys.executable, "-c", STRANGER + script, *words]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr.splitlines()


@pytest.mark.parametrize(
    ("answer", "count", "look"),
    [
        (PROXY, 3000, 1e6),  # a message for each connection
        (PROXY, 300, 0.01),
        (HEAD + b"<html>bad request</html>" * 200, 600, 1e6),  # more than one
        (b"", 100, 0.01),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", 100, 0.01),
        (GREETING, 5, 0.01),  # which breaks the protocol, so that ZeroMQ gives the peer up
    ],
    ids=["proxy", "proxy, looked at", "page", "closed", "ssh", "garbled"],
)
def test_a_peer_that_is_no_subscriber_costs_one_warning(
    answer: bytes, count: int, look: float
) -> None:
    output, [warning] = run_stranger(MANY, answer.hex(), str(count), "1", str(look))
    assert output == "sent\n"
    assert warning.startswith("kv_events_config.endpoint: the peer at tcp://127.0.0.1:")


def test_a_publisher_ends_while_a_stranger_answers() -> None:
    """ZeroMQ aborts where an answer comes while the socket is being closed."""
    output, warnings = run_stranger(ENDS, PROXY.hex(), "3", "100", "0.01")
    assert output == "closed\n" and len(warnings) == 3


def test_a_subscriber_that_comes_after_a_stranger_gets_events(caplog, monkeypatch) -> None:
    """Even where the stranger broke ZeroMQ's protocol."""
    monkeypatch.setattr(event_publisher, "_LOOK", 0.01)
    monkeypatch.setattr(event_peer, "_GIVEN_UP", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        events = EventPublisher(KVEventsConfig(True, endpoint=f"tcp://127.0.0.1:{port}"), 2)
        for _ in range(3):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(GREETING)
                while connection.recv(1 << 16):
                    pass
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.subscribe(b"")
        sub.bind(f"tcp://127.0.0.1:{port}")
        until = time.monotonic() + PATIENCE
        while not sub.poll(20):
            assert time.monotonic() < until
            events.add(ClearedPages())
        events.close()
    assert caplog.text.count("is no subscriber of ZeroMQ") == 1
