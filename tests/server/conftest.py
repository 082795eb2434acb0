from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.live import SMALL, Canary, Server

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="session")
def main_server() -> Iterator[Server]:
    """The bundled model, with short times for slow clients."""
    times = "--header-timeout 1.5 --body-timeout 1.5 --write-timeout 1.5"
    buffers = "--max-unread-tokens 64 --send-buffer-bytes 4096"
    slow = [*times.split(), *buffers.split()]
    with Server([*SMALL, *slow]) as server:
        yield server


@pytest.fixture(scope="session")
def main_canary(main_server: Server) -> Canary:
    return Canary(main_server)


@pytest.fixture
def server(main_server: Server, main_canary: Canary) -> Iterator[Server]:
    """The main server, which must be as it was after each test."""
    yield main_server
    main_canary.check()


@pytest.fixture(scope="session")
def narrow_server() -> Iterator[Server]:
    """One slot, a short queue, short deadlines, keys, and no unknown fields."""
    narrow = (
        "--max-num-queued-reqs 2 --max-queued-prompt-tokens 64 --queue-timeout 0.15 "
        "--request-timeout 0.8 --max-connections 24 --strict --max-num-seqs 1 --decode-sizes 1 "
        "--allowed-origins http://app.example --reasoning-parser qwen3 --tool-call-parser hermes"
    )
    keys = [part for key in KEYS for part in ("--api-key", key)]
    with Server([*SMALL, *narrow.split(), *keys], key=KEYS[0]) as server:
        yield server


@pytest.fixture(scope="session")
def narrow_canary(narrow_server: Server) -> Canary:
    return Canary(narrow_server)


@pytest.fixture
def narrow(narrow_server: Server, narrow_canary: Canary) -> Iterator[Server]:
    """The narrow server, which must be as it was after each test."""
    yield narrow_server
    narrow_canary.check()
