"""Hostile templates of requests beside /health: `python -m tests.server.slow_templates`.

It prints how long each template took and the slowest answer of /health meanwhile, and fails where
one took more than half a second. The machine should be quiet.
"""

from __future__ import annotations

import threading
import time

from tests.engine.test_template_costs import LARGE, ROWS, STOPPED
from tests.support.live_server import SMALL, Server

MOST_SECONDS = 0.5
EVERY_SECONDS = 0.1
CHAT = "/v1/chat/completions"
LISTS = (
    "{% set L = range(100000) | list %}{% set A = 'a' * 1000000 %}{% set B = 'a' * 8000000 %}"
    "{% set N = '\n' * 1000000 %}{% set T = 'ab \t\n' * 200000 %}{% set W = 'ΐ' * 1000000 %}"
    "{% set C = range(0, 230584300921369395100000, 2305843009213693951) %}"
    "{% set ns = namespace(x=['a'], y=['a'], t=('a',)) %}"
    "{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
    "{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
)


class Probe(threading.Thread):
    """Thread that asks for /health, and keeps the slowest answer and all states."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.slowest = 0.0
        self.states: set[int] = set()
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(EVERY_SECONDS):
            before = time.monotonic()
            self.states.add(self.server.request("/health").status)
            self.slowest = max(self.slowest, time.monotonic() - before)


def main() -> None:
    attacks = [
        LISTS + "{% for i in range(99999) %}{% set q = " + row[1] + " %}{% endfor %}"
        for row in ROWS
    ]
    large = [
        made(size) for made in LARGE.values() for size in (900, 2900) if len(made(size)) < 65536
    ]
    worst = 0.0
    with Server([*SMALL, "--trust-request-chat-template"]) as server:
        # The input decides how much work a template may do.
        content = "x" * 100_000
        for source in [*STOPPED, *large, *attacks]:
            probe = Probe(server)
            probe.start()
            before = time.monotonic()
            inputs = {"chat_template": source, "chat_template_kwargs": {"x": content * 40}}
            messages = [{"role": "user", "content": "hi"}]
            answer = server.request(CHAT, {"messages": messages, "max_tokens": 1, **inputs})
            seconds = time.monotonic() - before
            probe.ended.set()
            probe.join()
            worst = max(worst, probe.slowest)
            times = f"{seconds:6.2f} s  /health {probe.slowest:.3f} s"
            print(f"{times}  {answer.status}  {source[-60:]!r}", flush=True)
            assert probe.states <= {200}, probe.states
            assert answer.status in (200, 400), answer.body
    print(f"the slowest answer of /health took {worst:.3f} s; at most {MOST_SECONDS} s")
    raise SystemExit(worst > MOST_SECONDS)


if __name__ == "__main__":
    main()
