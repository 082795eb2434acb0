"""A server's state after failed steps; `tests.server.memory` does the same at full size."""

from __future__ import annotations

from tests.server.memory import rounds
from tests.support.live_server import SMALL, Canary, Server


def test_failed_steps_leave_nothing_behind() -> None:
    with Server(SMALL, module="tests.server.failing") as server:
        canary = Canary(server)
        first, *_, last = rounds(server, "failing", 4, 20)
        assert last - first < 32  # MiB
        assert server.metric("engine_failed_steps_total") >= 80
        assert canary.sing() == canary.before
