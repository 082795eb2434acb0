"""Cost of a step's message from a leader to its followers: bytes, and microseconds of the leader.

    python -m scripts.bench.hosts
    python -m scripts.bench.hosts --followers 3

The message is that of a decode launch. A follower is a process of this machine that confirms each
message and drops it. The time is that of the leader's work before it may call its own program.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import time

import numpy as np

from jaxserve.execution.batch import pack
from jaxserve.execution.buckets import Bucket
from jaxserve.execution.hosts.group import Follower, Leader
from jaxserve.execution.hosts.replay import STEP
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.hosts import HostsConfig
from scripts.lib.argument_types import at_least, bench_parser
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep

ROWS = (1, 32, 256)
GOAL_US = 200.0
SECRET = bytes(32)


def message(rows: int) -> bytes:
    """Return the words of a decode of so many rows, of sequences of up to 32,768 tokens."""
    config = EngineConfig(block_size=16)
    slots = SlotTable(rows, 32768, config.block_size)
    none = np.zeros(0, np.int32)
    plan = LaunchPlan(none, none, none, none.astype(bool), none.astype(np.int64))
    return pack(plan, slots, Bucket(rows, rows, True)).tobytes()


def send_us(leader: Leader, words: bytes, steps: int) -> tuple[float, float]:
    """Return the median and the 99th percentile of the microseconds that a message takes."""
    times: list[float] = []
    for _ in range(steps):
        started = time.perf_counter()
        leader.send(STEP, 0, words)
        times.append(1e6 * (time.perf_counter() - started))
        time.sleep(0.002)  # a step's time: followers keep up
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def _hosts(rank: int, followers: int, port: int) -> HostsConfig:
    return HostsConfig(nnodes=followers + 1, node_rank=rank, master_port=port, nodes_secret="given")


def main() -> int:
    parser = bench_parser("scripts.bench.hosts", __doc__)
    parser.add_argument("--followers", type=at_least(1), default=1, help="default %(default)d")
    parser.add_argument("--steps", type=at_least(10), default=1000, help="default %(default)d")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        hosts = _hosts(arguments.rank, arguments.followers, arguments.port)
        follower = Follower(hosts, SECRET)
        follower.follow(lambda frame: None)
        follower.close()
        return 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = range(1, arguments.followers + 1)
    given = ["--followers", str(arguments.followers), "--port", str(port)]
    own = [sys.executable, "-m", "scripts.bench.hosts", *given]
    processes = [subprocess.Popen([*own, "--rank", str(rank)]) for rank in ranks]
    leader = Leader(_hosts(0, arguments.followers, port), SECRET)
    found: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        words, before = message(rows), leader.sent_bytes
        median, late = send_us(leader, words, arguments.steps)
        size = (leader.sent_bytes - before) // arguments.steps // arguments.followers
        found[f"{rows} rows"] = {"bytes": size, "us": round(median, 1), "p99 us": round(late, 1)}
        verdict = "held" if median <= GOAL_US else "BEHIND"
        print(
            f"{rows:>4} rows: {size:,} bytes a step and follower, {median:.0f} us of the leader, "
            f"99th percentile {late:.0f} (goal {GOAL_US:.0f}: {verdict})"
        )
    leader.close()
    for process in processes:
        process.wait(30)
    if arguments.json is not None:
        keep(arguments.json, {"followers": arguments.followers, "steps": found}, about_run())
    return 0


if __name__ == "__main__":
    run_main(main)
