"""Attacks on a live server, each of any size: small in the tests, full in `tests.server.soak`.

Each asserts properties that hold on every machine, and returns figures.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.live_server import SECONDS, Server, read_all, status_of

POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LONG: dict[str, Any] = {"prompt": [5] * 20, "max_tokens": 600, "ignore_eos": True}
STREAM = LONG | {"stream": True}
WORDY = STREAM | {"n": 2, "logprobs": 5}  # more than the sockets on the way can hold
NO_LINGER = struct.pack("ii", 1, 0)
Figures = dict[str, float]


def ended(server: Server, reason: str) -> float:
    return server.metric("request_success_total", finished_reason=reason)


def cpu_seconds(server: Server) -> float:
    """Return the CPU time of the server's process so far."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@contextmanager
def no_files_left(server: Server) -> Iterator[None]:
    """Check that files opened within the block are closed soon after."""
    files = server.num_files()
    yield
    deadline = time.monotonic() + SECONDS
    while server.num_files() > files + 1:
        assert time.monotonic() < deadline, "connections stay open"
        time.sleep(0.05)


def half_open(server: Server, count: int) -> Figures:
    """Check that connections with half a header are closed in time, and others are served."""
    with no_files_left(server):
        begun = time.monotonic()
        waiting = [server.connect() for _ in range(count)]
        for one in waiting:
            one.sendall(b"GET /health HTTP/1.1\r\nhost: lo")
        for _ in range(5):
            assert server.complete("a").status == 200
        served = time.monotonic() - begun
        for one in waiting:
            assert read_all(one) == b""
            one.close()
    return {"others_served_after_s": served, "all_closed_after_s": time.monotonic() - begun}


def slow_body(server: Server, gap: float) -> Figures:
    """Check that a body that comes a byte every `gap` seconds ends with status 408."""
    begun = time.monotonic()
    with server.connect() as one:
        one.sendall(server.http("/v1/completions", b" " * 10_000)[:-10_000])
        one.settimeout(gap)
        data = b""
        while not data:
            with suppress(OSError):
                one.sendall(b" ")
            with suppress(TimeoutError):
                data = one.recv(1 << 16) or b"closed unanswered"
        one.settimeout(SECONDS)
        seconds = time.monotonic() - begun
        data += read_all(one)
    assert status_of(data) == 408 and b"body_timeout" in data, data
    return {"answered_after_s": seconds}


def tiny_chunks(server: Server, count: int) -> Figures:
    """Check that a body in chunks of one byte is refused or accepted at little cost."""
    cpu = cpu_seconds(server)
    answer = server.send(POST + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * count)
    assert status_of(answer) in (413, 0)  # 0 where the kernel dropped the answer with our bytes
    return {"server_cpu_s": cpu_seconds(server) - cpu}


def slowest_refusal(server: Server, bodies: Sequence[bytes], times: int = 5) -> Figures:
    """Send bad bodies, and check that each is refused within the time of detecting its error."""
    seconds = []
    for body in bodies:
        data = server.http("/v1/completions", body)
        best = []
        for _ in range(times):
            with server.connect() as one:
                begun = time.perf_counter()
                one.sendall(data)
                assert status_of(one.recv(1 << 16)) == 400
                best.append(time.perf_counter() - begun)
        seconds.append(percentile(best, 50))
    return {"slowest_ms": max(seconds) * 1e3}


def pipelined(server: Server, count: int) -> Figures:
    """Check that every one of many requests sent without waiting is answered."""
    one = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    begun = time.monotonic()
    with server.connect() as connection:
        sender = threading.Thread(target=connection.sendall, args=(one * (count - 1) + last,))
        sender.start()
        answers = read_all(connection)
        sender.join()
    assert answers.count(b"HTTP/1.1 200 OK") == count
    return {"requests_per_s": count / (time.monotonic() - begun)}


def reset_in_the_body(server: Server, count: int) -> Figures:
    """Reset connections halfway through a body, and check that the server frees their resources."""
    with no_files_left(server):
        for _ in range(count):
            with server.connect() as one:
                one.sendall(POST + b'content-length: 1000\r\n\r\n{"prompt": ')
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    return {}


def leave(server: Server, count: int, fields: dict[str, Any], reached: Callable[[], bool]) -> None:
    """Let `count` clients leave at once, as soon as `reached` is true."""
    with no_files_left(server):
        streams = [server.open_stream(fields | {"stream": n % 2 > 0}) for n in range(count)]
        deadline = time.monotonic() + SECONDS
        while not reached():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for one in streams:
            one.close()
        server.wait_until_idle()


def leave_in_every_phase(server: Server, count: int) -> Figures:
    """Leave while waiting, at a prompt, at an answer, preempted and at the end; pages return."""
    lines, begun = len(server.log), time.monotonic()
    preempted = server.metric("num_preemptions_total")
    drawn = server.metric("generation_tokens_total")
    leave(server, count, LONG | {"prompt": [7] * 630, "max_tokens": 9}, lambda: True)
    leave(server, count, LONG, lambda: server.metric("num_requests_waiting") >= 1)
    leave(server, count, LONG, lambda: server.metric("generation_tokens_total") > drawn + 50)
    leave(server, count, LONG, lambda: server.metric("num_preemptions_total") > preempted)
    leave(server, count, {"prompt": "a", "max_tokens": 1}, lambda: True)
    assert len(server.log) - lines < 50
    return {"clients": 5 * count, "seconds": time.monotonic() - begun}


def never_read(server: Server, count: int) -> Figures:
    """Check that clients that stop reading are paused, then dropped, while others are served."""
    before, memory, begun = ended(server, "abort"), server.memory(), time.monotonic()
    stalled = [server.open_stream(WORDY | {"cache_salt": str(n)}) for n in range(count)]
    server.wait_for("num_requests_paused", lambda value: value >= 1)
    assert server.complete("Reverse: a-b").status == 200
    most = 0.0

    def all_dropped(_: float) -> bool:
        nonlocal most
        most = max(most, server.metric("num_requests_paused"))
        return ended(server, "abort") >= before + count

    server.wait_for("request_success_total", all_dropped, 4 * SECONDS)
    grown = server.memory() - memory
    assert grown < (64 << 20) + count * (256 << 10)
    for one in stalled:
        one.close()
    server.wait_until_idle()
    return {
        "paused_at_once": most,
        "grown_mib": grown / 2**20,
        "seconds": time.monotonic() - begun,
    }


def first_token(server: Server, prompt: list[int]) -> float:
    """Return the seconds to the first token of a stream that the client then leaves."""
    with server.connect() as one:
        fields = {"prompt": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True}
        data = server.http("/v1/completions", json.dumps(fields).encode())
        begun = time.perf_counter()
        one.sendall(data)
        got = one.recv(1 << 16)
        seconds = time.perf_counter() - begun
        assert status_of(got) == 200, got
    return seconds


def short_requests(server: Server, seconds: float, at_once: int = 4) -> list[float]:
    """Return the seconds to first tokens of short requests by several sequential clients."""

    def ask(seed: int) -> list[float]:
        draw, end, times = random.Random(seed), time.monotonic() + seconds, []
        while time.monotonic() < end:
            times.append(first_token(server, draw.choices(range(16, 256), k=16)))
        return times

    with ThreadPoolExecutor(at_once) as pool:
        return [one for times in pool.map(ask, range(at_once)) for one in times]


def head_of_line(server: Server, seconds: float, length: int) -> Figures:
    """Time short requests alone, then beside a prompt of `length` tokens every second."""
    alone = short_requests(server, seconds)
    over, sent = threading.Event(), []

    def send_long() -> None:
        draw = random.Random(0)
        while not over.wait(1.0):
            sent.append(first_token(server, draw.choices(range(16, 256), k=length)))

    long = threading.Thread(target=send_long)
    long.start()
    try:
        beside = short_requests(server, seconds)
    finally:
        over.set()
        long.join()
    assert sent
    figures = {f"p{p}_alone_ms": percentile(alone, p) * 1e3 for p in (50, 99)}
    figures |= {f"p{p}_beside_ms": percentile(beside, p) * 1e3 for p in (50, 99)}
    figures |= {"long_prompts": len(sent), "long_p50_ms": percentile(sent, 50) * 1e3}
    return figures | {"ratio": figures["p99_beside_ms"] / figures["p99_alone_ms"]}


def area_under_curve(hits: Sequence[float], misses: Sequence[float]) -> float:
    """Return how often a hit is faster than a miss, ties counting half: 0.5 is pure chance."""
    ordered = sorted(hits)
    slower = sum(bisect_left(ordered, one) + bisect_right(ordered, one) for one in misses)
    return slower / (2 * len(hits) * len(misses))


def prefix_timing(server: Server, trials: int, victim: str, prober: str) -> Figures:
    """Measure whether the time to a first token shows `prober` the prompts of `victim`."""
    draw, owner = random.Random(0), server.key
    times: dict[bool, list[float]] = {True: [], False: []}
    try:
        for number in range(trials):
            prompt = draw.choices(range(16, 256), k=161)
            server.key = victim
            # Asked either way, so that both halves meet the server in the same state.
            asked = number % 2 == 0
            first_token(server, prompt if asked else draw.choices(range(16, 256), k=161))
            server.key = prober
            times[asked].append(first_token(server, prompt))
    finally:
        server.key = owner
    return {"trials": trials, "area_under_curve": area_under_curve(times[True], times[False])}


def flood(server: Server, count: int, at_once: int = 4) -> Figures:
    """Send bad requests at full speed: all are refused, with few log lines and no lost memory."""
    lines, memory = len(server.log), server.memory()
    bad = server.http("/v1/completions", b'{"prompt": "a", "n": 0}')
    each, over = count // at_once, threading.Event()
    times: list[float] = []

    def send(_: int) -> int:
        with server.connect() as one:
            one.sendall(bad * each)
            data = bytearray()
            while data.count(b"HTTP/1.1 400") < each:
                data += one.recv(1 << 16)
        return data.count(b"HTTP/1.1 400")

    def look() -> None:
        while not over.is_set():
            with server.connect() as one:
                begun = time.perf_counter()
                one.sendall(bad)
                assert status_of(one.recv(1 << 16)) == 400
                times.append(time.perf_counter() - begun)

    looking = threading.Thread(target=look)
    looking.start()
    begun = time.monotonic()
    try:
        with ThreadPoolExecutor(at_once) as pool:
            assert sum(pool.map(send, range(at_once))) == each * at_once
        seconds = time.monotonic() - begun
    finally:
        over.set()
        looking.join()
    assert len(server.log) - lines < 50
    assert server.memory() - memory < 32 << 20
    return {
        "refused_per_s": count / seconds,
        "p99_of_a_client_beside_ms": percentile(times, 99) * 1e3,
    }
