"""A server whose process may open few files."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from jaxserve.server.http.listener import make_room
from tests.support.live_server import SECONDS, SMALL, Server


@pytest.fixture(scope="module")
def poor() -> Iterator[Server]:
    with Server([*SMALL, "--max-connections", "300"], files=120) as server:
        yield server


def stand_there(server: Server, count: int, stay: ExitStack) -> None:
    """Open `count` silent connections; some of them are refused."""
    for _ in range(count):
        with suppress(OSError):
            stay.enter_context(server.connect())


def healthy_after(server: Server) -> float:
    """Return the seconds until /health is answered."""
    began = time.monotonic()
    while True:
        with suppress(OSError):
            if server.request("/health").status == 200:
                return time.monotonic() - began
        assert time.monotonic() - began < SECONDS


def test_the_start_says_how_many_connections_are_served(poor: Server) -> None:
    [said] = [line for line in poor.log if "at once" in line]
    found = re.search(r": (\d+) connections are served at once, not the 300 of .* is 120 ", said)
    assert found and 10 < int(found[1]) < 120


def test_more_connections_than_files_leave_health_and_log_alone(poor: Server) -> None:
    lines = len(poor.log)
    for count in (40, 100, 400):
        with ExitStack() as stay:
            stand_there(poor, count, stay)
            assert poor.request("/health").status == 200
            assert poor.num_files() < 120
        healthy_after(poor)
    assert poor.log[lines:] == []
    deadline = time.monotonic() + SECONDS
    while poor.complete("a", 2).status != 200:
        assert time.monotonic() < deadline


def test_when_no_file_is_left_idle_connections_make_room(poor: Server) -> None:
    """As where something else in the process takes the files that connections were to have."""
    healthy_after(poor)
    lines = len(poor.log)
    few = poor.num_files() + 4
    before = resource.prlimit(poor.process.pid, resource.RLIMIT_NOFILE, (few, 120))
    try:
        with ExitStack() as stay:
            stand_there(poor, 20, stay)
            healthy_after(poor)
    finally:
        resource.prlimit(poor.process.pid, resource.RLIMIT_NOFILE, before)
    said = poor.log[lines:]
    assert said
    assert [line for line in said if "no file is left for a connection" not in line] == []
    assert not any("traceback" in line for line in said)
    assert poor.complete("a", 2).status == 200


def test_a_limit_that_leaves_no_room_is_an_error() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
    try:
        room = make_room(150)
        assert room.connections == 150 and room.limit > 150
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    server = Server(SMALL, files=20)
    try:
        with pytest.raises(RuntimeError, match="the limit of open files, 20, leaves no room"):
            server.__enter__()
    finally:
        server.__exit__()
