"""An engine over two hosts, which are processes here, against the oracle.

    python -m tests.execution.over_hosts --devices 2 --schedules 500

The leader starts its follower, and prints its findings as a JSON object.
"""

from __future__ import annotations

import argparse
import json
import secrets
import socket
import subprocess
import sys
from collections import Counter
from typing import Any

import jax

from jaxserve.execution.hosts.group import Follower, Group
from jaxserve.execution.hosts.join import open_group
from jaxserve.models.shards import Split
from jaxserve.request import MAX_LOGPROBS
from jaxserve.settings.hosts import HostsConfig
from jaxserve.start.programs.warm_up import WarmUp
from scripts.lib.placed_model import model_leaves, plan_of_model
from tests.equivalence import TINY, Bench, divided_model, run_schedule, small_config
from tests.support.quick_code import compile_quickly

HOSTS = 2
# Two sizes of rows, which a follower must tell apart. More sizes of tokens would test the same.
SIZES: dict[str, Any] = {"token_sizes": (64,)}


def free_ports() -> int:
    """Return a port that is free with the one after it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


def lead(group: Group, devices: int, schedules: range) -> dict[str, Any]:
    """Run schedules and return counts of their events."""
    bench = Bench(TINY, (4,), split=Split(devices), group=group, sizes=SIZES)
    totals: Counter[str] = Counter()
    for seed in schedules:
        totals += run_schedule(bench, seed)
    group.close()
    return dict(totals)


def follow(group: Group, devices: int) -> None:
    """Take part in the leader's schedules as its follower."""
    assert isinstance(group, Follower)
    model_config, model = divided_model(TINY, Split(devices), "float64")
    own: dict[str, Any] = {"dtype": "float64", "max_logprobs": MAX_LOGPROBS, **SIZES}
    config = small_config(model_config, block_size=4, **own)
    warm_up = WarmUp(plan_of_model(config, model_config, model), group=group)
    replay = warm_up.replay(model_leaves(model))
    group.follow(replay.run)
    replay.wait()
    group.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=1, help="of each host")
    parser.add_argument("--schedules", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--secret", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    jax.config.update("jax_enable_x64", True)
    compile_quickly()
    port = arguments.port or free_ports()
    secret = arguments.secret or secrets.token_hex(32)
    follower = None
    if not arguments.rank:
        given = ["--devices", str(arguments.devices), "--port", str(port), "--secret", secret]
        own = [sys.executable, "-m", "tests.execution.over_hosts", "--rank", "1", *given]
        follower = subprocess.Popen(own)
    hosts = HostsConfig(
        nnodes=HOSTS, node_rank=arguments.rank, master_port=port, nodes_secret="given"
    )
    group = open_group(hosts, secret.encode())
    assert group is not None
    if follower is None:
        follow(group, HOSTS * arguments.devices)
        return 0
    schedules = range(arguments.seed, arguments.seed + arguments.schedules)
    found = lead(group, HOSTS * arguments.devices, schedules)
    found["follower"] = follower.wait(60)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
