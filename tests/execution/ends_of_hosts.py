"""Ends of two hosts that serve: one of them is stopped, killed or ended in order, within a stream.

    python -m tests.execution.ends_of_hosts

Prints how each process ended, and after how many seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.execution.over_hosts import free_ports
from tests.execution.test_hosts import SIZES, Hosts

ENDS = [
    *((who, sent) for who in ("leader", "follower") for sent in (signal.SIGSTOP, signal.SIGKILL)),
    ("leader", signal.SIGTERM),
]


def end(arguments: list[str], who: str, number: signal.Signals) -> str:
    """Signal one host in the middle of a stream; return what became of both."""
    with Hosts(arguments) as hosts:
        server, leader, follower = hosts.server, hosts.server.process, hosts.follower
        assert server.complete("What is 47 + 8?").status == 200
        long = {"prompt": "Count", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with server.open_drawing(long):
            started = time.monotonic()
            first, second = (leader, follower) if who == "leader" else (follower, leader)
            first.send_signal(number)
            status, seconds = second.wait(60), time.monotonic() - started
        first.send_signal(signal.SIGCONT)
        ended = f"the other ends with {status} after {seconds:.1f} s, it with {first.wait(60)}"
        return f"{number.name} of the {who}: {ended}"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_bytes(os.urandom(32))
        secret.chmod(0o600)
        for who, number in ENDS:
            given = ["--nodes-secret", str(secret), "--master-port", str(free_ports())]
            print(end([*SIZES, *given], who, number), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
