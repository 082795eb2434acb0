"""A real server in a process of its own, and blunt tools to talk to it."""

from __future__ import annotations

import http.client
import json
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.support.kept_programs import users_environment

ROOT = Path(__file__).parent.parent.parent
# Few and small programs, and a cache of 40 pages of 16 tokens, less than the model's 1024
# positions.
SMALL = (
    "--max-num-seqs 8 --max-num-batched-tokens 128 --decode-sizes 8 --token-sizes 128 "
    "--num-gpu-blocks-override 41 --check-invariants --port 0"
).split()
SECONDS = 60.0
START_SECONDS = 180.0
BUSY = ("num_requests_running", "num_requests_waiting", "num_pages_in_use")


@dataclass
class Answer:
    """An HTTP answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return the error object; fail if there is none, or if it shows internal details."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert len(error["message"]) < 1000
        assert "Traceback" not in error["message"] and "/jaxserve" not in error["message"]
        return error

    def events(self) -> list[Any]:
        """Return the data of an event stream, with "[DONE]" as text."""
        datas = re.findall(r"^data: (.*)$", self.body.decode(), re.MULTILINE)
        return [data if data == "[DONE]" else json.loads(data) for data in datas]


@dataclass
class Server:
    """A running `jaxserve serve`. Use it as a context manager.

    Attributes:
        module: the module to run. `tests.support.slow_server` leaves time to look at requests.
        files: the limit of open files, soft and hard, by default this process's.
        log: lines that it wrote to standard error.
    """

    arguments: list[str]
    key: str | None = None
    module: str = "jaxserve"
    files: int | None = None
    log: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        limit = [] if self.files is None else ["sh", "-c", f'ulimit -n {self.files}; exec "$@"', ""]
        self.process = subprocess.Popen(
            [*limit, sys.executable, "-m", self.module, "serve", *self.arguments],
            cwd=ROOT,
            env=users_environment(),
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        ready: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_log, args=(ready,), daemon=True)
        self._reader.start()
        try:
            port = ready.get(timeout=START_SECONDS)
        except queue.Empty:
            self.process.kill()  # a running process would slow the next test down
            port = ready.get()
        if port is None:
            raise RuntimeError("the server did not start:\n" + "\n".join(self.log))
        self.port = port
        return self

    def _read_log(self, ready: queue.SimpleQueue[int | None]) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            found = re.search(r"ready at http://\S+:(\d+)$", line.strip())
            if found:
                ready.put(int(found[1]))
        ready.put(None)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=5)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        one = socket.socket()
        if receive_buffer is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        one.settimeout(SECONDS)
        one.connect(("127.0.0.1", self.port))
        return one

    def request(
        self,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        method: str | None = None,
    ) -> Answer:
        """Send one request on its own connection. A body that is not bytes is sent as JSON."""
        named = {"content-type": "application/json"} if body is not None else {}
        if self.key is not None:
            named["authorization"] = f"Bearer {self.key}"
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request(method, path, data, named | (headers or {}))
            response = connection.getresponse()
            got = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, got, response.read())
        finally:
            connection.close()

    def complete(self, prompt: Any, max_tokens: int = 8, **fields: Any) -> Answer:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        return self.request("/v1/completions", body)

    def send(self, data: bytes, then_close: bool = False) -> bytes:
        """Send raw bytes, and return all bytes that the server sends before it closes."""
        with self.connect() as one:
            with suppress(OSError):
                one.sendall(data)
                if then_close:
                    one.shutdown(socket.SHUT_WR)
            return read_all(one)

    def open_stream(self, fields: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        """Send a request and leave its answer unread."""
        one = self.connect(receive_buffer=4096)
        one.sendall(self.http(path, json.dumps(fields).encode()))
        return one

    def open_drawing(self, fields: dict[str, Any]) -> socket.socket:
        """Open a stream as `open_stream` does, and wait for its first token."""
        one, data = self.open_stream(fields), b""
        while b'"text"' not in data:
            piece = one.recv(1 << 12)
            assert piece, data
            data += piece
        return one

    def http(self, path: str, body: bytes) -> bytes:
        """Return the bytes of a POST."""
        key = f"x-api-key: {self.key}\r\n" if self.key else ""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def metric(self, name: str, **labels: str) -> float:
        """Sum a metric's values over the time series with these labels."""
        return sum_of(self.metrics(), name, **labels)

    def metrics(self) -> list[str]:
        """Return the lines of /metrics."""
        return self.request("/metrics").body.decode().splitlines()

    def memory(self) -> int:
        """Return the resident bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]

    def num_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def wait_for(self, name: str, reached: Any, seconds: float = SECONDS) -> None:
        """Wait until a metric's value satisfies a predicate."""
        deadline = time.monotonic() + seconds
        while not reached(value := self.metric(name)):
            assert time.monotonic() < deadline, f"{name} stays at {value}"
            time.sleep(0.02)

    def wait_until_idle(self) -> list[str]:
        """Wait until no request runs, waits or holds a page; return the metrics that show it."""
        deadline = time.monotonic() + SECONDS
        while True:
            metrics = self.metrics()
            busy = [name for name in BUSY if sum_of(metrics, name) != 0]
            if not busy:
                return metrics
            assert time.monotonic() < deadline, f"never at rest: {busy}"
            time.sleep(0.02)


def sum_of(metrics: list[str], name: str, **labels: str) -> float:
    """Sum a metric's values over the time series with these labels."""
    total, start = 0.0, f"jaxserve:{name}{{"
    for line in metrics:
        found = re.fullmatch(r"[^{]*{(.*)} (\S+)", line) if line.startswith(start) else None
        if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
            total += float(found[2])
    return total


def read_all(one: socket.socket) -> bytes:
    """Read until the connection ends in any way."""
    data = bytearray()
    with suppress(ConnectionError):
        while piece := one.recv(1 << 16):
            data += piece
    return bytes(data)


def read_stream(one: socket.socket) -> bytes:
    """Read a chunked answer to its end, where the connection may stay open."""
    data = bytearray()
    while not data.endswith(b"\r\n0\r\n\r\n") and (piece := one.recv(1 << 16)):
        data += piece
    return bytes(data)


def status_of(data: bytes) -> int:
    """Return the status of the first answer in `data`, or 0 without an answer."""
    return int(data.split(b" ", 2)[1]) if data.startswith(b"HTTP/1.1 ") else 0


@dataclass
class Canary:
    """A greedy request: before, and after whatever a test has done.

    Where no step was computed since, the same tokens would be drawn from the same state: it is
    sent again only after steps.
    """

    server: Server

    def __post_init__(self) -> None:
        self.before = self.sing()
        self.steps = self.num_steps(self.server.wait_until_idle())
        assert self.steps > 0

    def sing(self) -> list[int]:
        answer = self.server.complete("Reverse: s-t-o-n-e", 12, return_token_ids=True)
        assert answer.status == 200, answer.body
        return answer.json()["choices"][0]["token_ids"]

    def num_steps(self, metrics: list[str]) -> float:
        return sum_of(metrics, "engine_steps_total")

    def check(self) -> None:
        metrics = self.server.wait_until_idle()
        if self.num_steps(metrics) != self.steps:
            assert self.sing() == self.before
            metrics = self.server.wait_until_idle()
            self.steps = self.num_steps(metrics)
        assert sum_of(metrics, "engine_compiles_total") == 0
        assert sum_of(metrics, "engine_failed_steps_total") == 0
        assert self.server.request("/health").status == 200
        # No client can make the server log an error of its own.
        assert not [line for line in self.server.log if '"level": "error"' in line]
