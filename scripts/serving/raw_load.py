"""A load by a client that costs little: sockets, bytes made ahead, and streams read after the run.

It shares the cores with the server: its own CPU time lowers the throughput that it measures.
"""

from __future__ import annotations

import gc
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from jaxserve.commands.bench.outcome import Outcome, Reader, Run, Target, Work

_READ_BYTES = 64 << 10
_END_OF_STREAM = b"\r\n0\r\n\r\n"
_IDLE_S = 30.0  # without a byte, after which a run has failed


@dataclass
class _Exchange:
    """A request on its connection, and the bytes of its answer, with their times."""

    client: socket.socket
    number: int
    clock: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


class RawLoad:
    """Requests to one address, each at its time.

    Args:
        target: server and form of the requests.
        num_kept: connections that are kept, for all requests. A request waits for a free one. With
            None each request has a connection of its own.
    """

    def __init__(self, target: Target, works: Sequence[Work], num_kept: int | None) -> None:
        url = urlsplit(target.url)
        self._address = (url.hostname or "", url.port or 80)
        head = (
            f"POST {url.path} HTTP/1.1\r\nhost: {url.netloc}\r\naccept: */*\r\n"
            "accept-encoding: gzip, deflate\r\nuser-agent: jaxserve\r\n"
            "content-type: application/json\r\n"
            + "".join(f"{name}: {value}\r\n" for name, value in target.headers.items())
            + "content-length: "
        ).encode()
        bodies = [target.body(work) for work in works]
        self._requests = [b"%b%d\r\n\r\n%b" % (head, len(body), body) for body in bodies]
        self._outcomes = [Outcome(work.input_tokens) for work in works]
        self._is_kept = num_kept is not None
        self._poll = select.epoll()
        # The one that has been free for longest comes first, or servers would end it.
        self._free = deque(self._connect() for _ in range(num_kept or 0))
        self._running: dict[int, _Exchange] = {}
        self._ended: list[_Exchange] = []

    def run(self, arrivals: Sequence[float]) -> Run:
        """Send each request at its time, in seconds from the start, and wait for all answers.

        Raises:
            TimeoutError: no answer came for `_IDLE_S` seconds.
        """
        gc.collect()
        gc.disable()
        try:
            start, cpu = time.perf_counter(), time.process_time()
            self._follow(start, arrivals)
            duration, cpu = time.perf_counter() - start, time.process_time() - cpu
        finally:
            gc.enable()
            for client in self._free:
                client.close()
            self._poll.close()
        for exchange in self._ended:
            _read(self._outcomes[exchange.number], exchange)
        return Run(self._outcomes, duration, cpu)

    def _follow(self, start: float, arrivals: Sequence[float]) -> None:
        waiting: deque[int] = deque()
        num_come, last = 0, start
        while num_come < len(arrivals) or waiting or self._running:
            now = time.perf_counter()
            while num_come < len(arrivals) and start + arrivals[num_come] <= now:
                waiting.append(num_come)
                num_come += 1
            while waiting and (self._free or not self._is_kept):
                number = waiting.popleft()
                self._send(number, start)
                self._outcomes[number].lag = self._outcomes[number].sent - arrivals[number]
            due = start + arrivals[num_come] if num_come < len(arrivals) else now + _IDLE_S
            ready = self._poll.poll(max(0.0, min(due - time.perf_counter(), _IDLE_S)))
            now = time.perf_counter()
            for number, _ in ready:
                self._receive(number, now)
            last = now if ready or not self._running else last
            if now - last > _IDLE_S:
                raise TimeoutError(f"{len(self._running)} requests have no answer")

    def _connect(self) -> socket.socket:
        client = socket.create_connection(self._address, _IDLE_S)
        client.setblocking(False)
        self._poll.register(client, select.EPOLLIN)
        return client

    def _send(self, number: int, start: float) -> None:
        clock = time.perf_counter()
        self._outcomes[number].sent = clock - start
        client = self._free.popleft() if self._is_kept else self._connect()
        client.send(self._requests[number])
        self._running[client.fileno()] = _Exchange(client, number, clock)

    def _receive(self, descriptor: int, now: float) -> None:
        exchange = self._running.get(descriptor)
        if exchange is None:  # the server has ended a connection that was free for too long
            for client in [client for client in self._free if client.fileno() == descriptor]:
                self._free.remove(client)
                client.close()
                self._free.append(self._connect())
            return
        client = exchange.client
        data = client.recv(_READ_BYTES)
        exchange.pieces.append((now, data))
        if data and not _is_whole(exchange):
            return
        del self._running[descriptor]
        self._ended.append(exchange)
        if self._is_kept and data:
            self._free.append(client)
        else:
            client.close()
            if self._is_kept:
                self._free.append(self._connect())


def _is_whole(exchange: _Exchange) -> bool:
    first, last = exchange.pieces[0][1], exchange.pieces[-1][1]
    if b"chunked" in first:
        return last.endswith(_END_OF_STREAM)
    head, _, body = first.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return len(body) + sum(len(data) for _, data in exchange.pieces[1:]) >= length


def _read(outcome: Outcome, exchange: _Exchange) -> None:
    """Fill in an outcome from the bytes of an exchange."""
    end, last = exchange.pieces[-1]
    outcome.latency = end - exchange.clock
    head, _, rest = exchange.pieces[0][1].partition(b"\r\n\r\n")
    outcome.status = int(head[9:12] or b"0")
    if outcome.status != 200:
        outcome.error = rest.decode(errors="replace")[:500] or "no answer"
        return
    if not last:
        outcome.error = "the stream broke off"
        return
    reader, pieces = Reader(outcome, exchange.clock), [(exchange.pieces[0][0], rest)]
    rest = b""
    for now, data in [*pieces, *exchange.pieces[1:]]:
        rest += data
        while b"\r\n" in rest:
            size, _, behind = rest.partition(b"\r\n")
            length = int(size, 16)
            if len(behind) < length + 2:
                break
            reader.feed(behind[:length], now)
            rest = behind[length + 2 :]
    if not reader.is_done and not outcome.error:
        outcome.error = "the stream broke off"
