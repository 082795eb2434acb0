"""Ends of two hosts that serve: one is stopped or killed at random moments of a stream.

    python -m tests.execution.ends_of_hosts --times 20

At the end the leader gets SIGTERM once. After each end both are started again by the same command
lines, as a supervisor does, and have to answer as before. Prints how each process ended, and after
how many seconds. Exit code 1 where the other host was there longer than `--limit` seconds, or a
client read a token that is not the right one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.execution.over_hosts import free_ports
from tests.execution.test_hosts import SIZES, Hosts, answer_of

KINDS = [(who, sent) for who in ("leader", "follower") for sent in (signal.SIGSTOP, signal.SIGKILL)]
LONG = {"prompt": "Count", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def text_of(events: bytes) -> str:
    """Join the texts of a stream's whole events, without a last event that was cut."""
    found = ""
    for data in re.findall(rb"^data: (\{.*\})\r?$", events, re.MULTILINE):
        with suppress(json.JSONDecodeError):
            event = json.loads(data)
            found += "".join(choice["text"] for choice in event.get("choices", ()))
    return found


class Ends:
    """A running engine over two hosts, one of which a test ends.

    Attributes:
        right: the text that one stream has to give, and `seconds`, how long it takes.
        starts: of both hosts; each after the first is a restart.
    """

    def __init__(self, arguments: list[str], limit: float) -> None:
        self.arguments, self.limit, self.failures, self.starts = arguments, limit, 0, 0
        self.port = free_ports()
        self.answer: list[int] | None = None
        with self.hosts() as hosts:
            started = time.monotonic()
            self.right = hosts.server.complete(**LONG).json()["choices"][0]["text"]
            self.seconds = time.monotonic() - started

    @contextmanager
    def hosts(self) -> Iterator[Hosts]:
        with Hosts(self.arguments, self.port) as hosts:
            answer = answer_of(hosts.server)
            self.answer = self.answer or answer
            assert answer == self.answer, (answer, self.answer)
            self.starts += 1
            yield hosts

    def end(self, who: str, number: signal.Signals, moment: float) -> None:
        """Signal one host at a moment of a stream, in seconds; print the results of both.

        The other has to end with an error, but where SIGTERM ends both in order.
        """
        with self.hosts() as hosts:
            server, leader, follower = hosts.server, hosts.server.process, hosts.follower
            with server.open_stream(LONG | {"stream": True}) as stream:
                said = b""
                while b'"text"' not in said:
                    said += stream.recv(1 << 12)
                time.sleep(moment)
                first, second = (leader, follower) if who == "leader" else (follower, leader)
                first.send_signal(number)
                started = time.monotonic()
                status: int | None = None
                with suppress(subprocess.TimeoutExpired):
                    status = second.wait(60)
                seconds = time.monotonic() - started
                first.send_signal(signal.SIGCONT)
                with suppress(ConnectionError):
                    while piece := stream.recv(1 << 16):
                        said += piece
            own = first.wait(60)
        is_right = self.right.startswith(text_of(said))
        is_orderly = number == signal.SIGTERM
        is_ended = status is not None and (status == own == 0 if is_orderly else status != 0)
        is_good = is_right and is_ended and (is_orderly or seconds <= self.limit)
        self.failures += not is_good
        print(
            f"{number.name} of the {who} after {moment:.2f} s: the other ends with {status} after "
            f"{seconds:.1f} s, it with {own}; {len(text_of(said))} characters were read, "
            + ("all right" if is_right else "WRONG"),
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.execution.ends_of_hosts")
    parser.add_argument("--times", type=int, default=1, help="of each kind of end")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--limit", type=float, default=10.0, metavar="SECONDS")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_bytes(os.urandom(32))
        secret.chmod(0o600)
        words = ["--nodes-secret", str(secret), "--master-port", str(free_ports())]
        ends = Ends([*SIZES, *words], options.limit)
        for who, number in KINDS * options.times:
            ends.end(who, number, draw.uniform(0, ends.seconds))
        ends.end("leader", signal.SIGTERM, 0)
        with ends.hosts():
            pass
    count = len(KINDS) * options.times + 1
    print(
        f"{count} ends, {ends.failures} failures, {ends.starts - 1} restarts that answer the same"
    )
    return 1 if ends.failures else 0


if __name__ == "__main__":
    sys.exit(main())
