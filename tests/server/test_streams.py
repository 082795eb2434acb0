"""A server serves on when the reader of its standard error has gone."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from jaxserve.server.http.listener import bind
from tests.support.kept_programs import users_environment
from tests.support.live_server import ROOT, SECONDS, SMALL


def free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


def answer(port: int, path: str, body: Any = None) -> int:
    """Return the status of a request; raise OSError if no server answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    headers = {"content-type": "application/json"}
    try:
        connection.request("GET" if body is None else "POST", path, json.dumps(body), headers)
        return connection.getresponse().status
    finally:
        connection.close()


@contextmanager
def serving(port: int, shell: str, **streams: Any) -> Iterator[None]:
    """Run a server that a shell starts with these redirections, and check that it ends in order."""
    flags = [*SMALL[: SMALL.index("--port")], "--port", str(port)]
    words = [sys.executable, "-m", "jaxserve", "serve", *flags]
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {shell}', "sh", *words],
        cwd=ROOT,
        env=users_environment(),
        **streams,
    )
    try:
        deadline = time.monotonic() + 3 * SECONDS
        status = 0
        while status != 200:
            assert process.poll() is None, f"it ended with {process.returncode}"
            assert time.monotonic() < deadline
            with suppress(OSError):
                status = answer(port, "/health")
            time.sleep(0.05)
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "shell", ["2>/dev/full", pytest.param("2>&-", marks=pytest.mark.long), "<&- >&- 2>&-"]
)
def test_it_starts_although_it_cannot_say_so(shell: str) -> None:
    port = free_port()
    with serving(port, shell):
        assert answer(port, "/v1/completions", {"prompt": "a", "max_tokens": 2}) == 200


def test_it_serves_on_although_the_reader_of_its_log_has_left() -> None:
    port = free_port()
    reader, writer = os.pipe()
    os.close(reader)
    with serving(port, "", stderr=writer):
        os.close(writer)
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(b"nonsense\r\n\r\n")  # which is logged
            assert one.recv(100).startswith(b"HTTP/1.1 400 ")
        assert answer(port, "/v1/completions", {"prompt": "a", "max_tokens": 2}) == 200
