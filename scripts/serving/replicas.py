"""A fleet in processes of its own: started, its replicas found by their processes, stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from scripts.lib import processes
from scripts.lib.processes import tree, words_of
from scripts.lib.server_process import Server, ask

# Few slots and two sizes of steps, for the bundled model on a small machine.
SMALL = (
    "--max-num-seqs 4 --max-num-batched-tokens 64 --decode-sizes 4 --token-sizes 64 "
    "--drain-timeout 10"
).split()
SHARE = '{"num_cpus": 0.5}'
REPLICA = "ray::ServeReplica:jaxserve:jaxserve"
FOLLOWER = "ray::GangFollower"
# Processes of Ray look after their parents now and then, and late on a busy machine.
LEAVE_SECONDS = 90.0


class Fleet(Server):
    """Replicas of the bundled model on a cluster of their own, as a context manager.

    Args:
        with_haproxy: whether HAProxy is in front instead of Serve's own proxy.
        environment: variables for all of its processes.

    Raises:
        RuntimeError: on leaving, processes are left over.
    """

    def __init__(
        self,
        *arguments: str,
        num_replicas: int = 2,
        with_haproxy: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        proxy = {"RAY_SERVE_ENABLE_HA_PROXY": "1"} if with_haproxy else {}
        super().__init__(
            *SMALL,
            *("--data-parallel-size", str(num_replicas), "--data-parallel-backend", "ray"),
            *("--ray-actor-options", SHARE),
            *(("--host", "0.0.0.0", "--insecure") if with_haproxy else ()),
            *arguments,
            environment=os.environ | dict(environment or {}) | proxy,
        )

    def __exit__(self, *error: object) -> None:
        before = self.processes()
        super().__exit__(*error)
        left = left_over(before)
        for number in left:
            os.kill(number, signal.SIGKILL)
        if left and not any(error):
            raise RuntimeError(f"processes were left over: {', '.join(left.values())}")

    def processes(self) -> dict[int, str]:
        return descendants(self.process.pid)

    def replicas(self) -> list[int]:
        """Return the process ids of the replicas, loading ones included."""
        return self._named(REPLICA)

    def followers(self) -> list[int]:
        """Return the numbers of the processes of replicas' other hosts, as `replicas` does."""
        return self._named(FOLLOWER)

    def _named(self, name: str) -> list[int]:
        # The text behind a dot is the state of the process.
        lines = self.processes().items()
        return [number for number, line in lines if line.partition(".")[0] == name]

    def starts(self, attempts: int = 8) -> set[int]:
        """Return the times at which the replicas that answer were started, in whole seconds."""
        return {ask(self.url + "/v1/models")["data"][0]["created"] for _ in range(attempts)}


def descendants(root: int) -> dict[int, str]:
    """Return a process and all below it, with their command lines."""
    found = {}
    for number in tree(root):
        with suppress(OSError):
            if line := words_of(number):
                found[number] = line
    return found


def left_over(before: dict[int, str], seconds: float = LEAVE_SECONDS) -> dict[int, str]:
    """Return which processes are still there after a while."""
    end = time.monotonic() + seconds
    while True:
        left = {}
        for number, line in before.items():
            with suppress(OSError):
                if words_of(number) == line:
                    left[number] = line
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.2)


def open_files(number: int) -> int:
    return len(list(Path(f"/proc/{number}/fd").iterdir()))


def cpu_seconds(numbers: Iterable[int]) -> dict[int, float]:
    """Return the CPU time that processes have taken so far, without processes that have ended."""
    found = {}
    for number in numbers:
        with suppress(OSError):
            found[number] = processes.cpu_seconds(number)
    return found


def cpu_since(before: Mapping[int, float]) -> float:
    """Return the CPU time since `before` of the processes that still live."""
    return sum(seconds - before[number] for number, seconds in cpu_seconds(before).items())
