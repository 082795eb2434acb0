"""Processes of servers: started, waited for, stopped."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import Request, urlopen

from scripts.lib.paths import ROOT
from scripts.lib.processes import cpu_seconds

START_S, STOP_S, PROGRAMS_S = 300, 60, 1200


def free_port() -> int:
    """Find a port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Serving:
    """Server of any kind in a process of its own, as a context manager.

    Args:
        url: without `/v1`.
        ready: path that is answered with a status of success once the server is ready.
        environment: all of its variables. None means those of this process.
        folder: that it runs in.
        log: file for its output. None means a temporary one.
        start_s, stop_s: most seconds of its start, and of its end after SIGTERM.

    Attributes:
        process: the running server.
        start_seconds: from the start of the process until it was ready.

    Raises:
        RuntimeError: on entering, with the server's output: it did not come up.
    """

    def __init__(
        self,
        command: list[str],
        url: str,
        *,
        ready: str = "/health",
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        log: Path | None = None,
        start_s: float = START_S,
        stop_s: float = STOP_S,
    ) -> None:
        self.url, self.start_seconds = url, 0.0
        self.process: subprocess.Popen[bytes]
        self._command, self._ready, self._environment = command, ready, environment
        self._folder, self._log_path = folder, log
        self._start_s, self._stop_s = start_s, stop_s
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        path = self._log_path
        log = tempfile.TemporaryFile("w+") if path is None else path.open("w+")
        self._log = self._stack.enter_context(log)
        begin = time.perf_counter()
        # A process group of its own: an interrupt at the terminal is for us to pass on.
        self.process = subprocess.Popen(
            self._command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            self._has_begun()
            self._wait(begin)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _has_begun(self) -> None:
        """Prepare a process that has just been started. Subclasses override it."""

    def _wait(self, begin: float) -> None:
        while time.perf_counter() < begin + self._start_s:
            if (status := self.process.poll()) is not None:
                raise RuntimeError(f"the server ended with {status}: {self.last_words()}")
            if self.is_ready():
                self.start_seconds = time.perf_counter() - begin
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server was not ready after {self._start_s} s: {self.last_words()}")

    def is_ready(self) -> bool:
        """Return whether the server answers."""
        try:
            with urlopen(self.url + self._ready, timeout=5):
                return True
        except (URLError, OSError):
            return False

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._stack.close()

    def stop(self) -> int:
        """Stop the server, and wait. Return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(self._stop_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def log(self) -> str:
        """Read the server's output so far."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read()

    def last_words(self) -> str:
        """Return the part of the output that explains a failed start."""
        return self.log()

    def cpu_seconds(self) -> float:
        """Return CPU time of the server so far (Linux only)."""
        return cpu_seconds(self.process.pid)


class Server(Serving):
    """`jaxserve serve` in a process of its own.

    Args:
        arguments: of `jaxserve serve`, besides the port.
        port: to listen on, by default a free one.
    """

    def __init__(
        self,
        *arguments: str,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        port = free_port() if port is None else port
        command = [sys.executable, "-m", "jaxserve", "serve", "--port", str(port), *arguments]
        super().__init__(command, f"http://127.0.0.1:{port}", environment=environment)


def ask(url: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> Any:
    """Send GET, or POST with a body as JSON. Return the answer's JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | (headers or {})
    with urlopen(Request(url, data, headers), timeout=300) as answer:
        return json.load(answer)


def read_metric(url: str, name: str) -> float:
    """Return a running server's count by its name without "jaxserve:", summed over its models.

    Raises:
        RuntimeError: the server has no such count.
    """
    with urlopen(url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line.split()[-1] for line in lines if line.startswith(f"jaxserve:{name}{{")]
    if not counts:
        raise RuntimeError(f"{url}/metrics has no {name}")
    return sum(map(float, counts))


def wait_for_programs(url: str) -> None:
    """Wait until a running server has compiled all programs of the background.

    Raises:
        RuntimeError: it still does after `PROGRAMS_S`.
    """
    end = time.monotonic() + PROGRAMS_S
    while missing := read_metric(url, "engine_programs_missing"):
        if time.monotonic() > end:
            raise RuntimeError(f"{missing:.0f} programs are still missing after {PROGRAMS_S} s")
        time.sleep(0.25)
