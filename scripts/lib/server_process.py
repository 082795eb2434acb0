"""Process of `jaxserve serve`: started, waited for, stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import URLError
from urllib.request import Request, urlopen

from scripts.lib.paths import ROOT

START_S, STOP_S, PROGRAMS_S = 300, 60, 1200


def free_port() -> int:
    """Find a port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def cpu_seconds(number: int) -> float:
    """Return CPU time of a process so far (Linux only).

    Raises:
        OSError: there is no such process.
    """
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Server:
    """Server in a process of its own, as a context manager.

    Args:
        arguments: of `jaxserve serve`, besides the port.
        port: to listen on, by default a free one.

    Attributes:
        url: without `/v1`.
        process: the running server.

    Raises:
        RuntimeError: on entering, with the server's output: it did not come up.
    """

    def __init__(self, *arguments: str, port: int | None = None) -> None:
        port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "jaxserve", "serve", "--port", str(port), *arguments]
        self._stack = ExitStack()
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self._log = self._stack.enter_context(tempfile.TemporaryFile("w+"))
        # A process group of its own: an interrupt at the terminal is for us to pass on.
        self.process = subprocess.Popen(
            self._command, cwd=ROOT, stdout=self._log, stderr=self._log, start_new_session=True
        )
        try:
            self._wait()
        except BaseException:
            self.process.kill()
            self.process.wait()
            self._stack.close()
            raise
        return self

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}: {self.log()}")
            try:
                with urlopen(self.url + "/health", timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(f"the server was not ready after {START_S} s: {self.log()}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._stack.close()

    def stop(self) -> int:
        """Stop the server, and wait. Return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def log(self) -> str:
        """Read the server's output so far."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read()

    def cpu_seconds(self) -> float:
        """Return CPU time of the server so far (Linux only)."""
        return cpu_seconds(self.process.pid)


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
