"""A fleet in processes of its own: started, its replicas found by their processes, stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from scripts.lib import server_process
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
        arguments: of `jaxserve serve` besides.
        num_replicas: replicas to start.
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
        super().__init__(
            *SMALL,
            *("--data-parallel-size", str(num_replicas), "--data-parallel-backend", "ray"),
            *("--ray-actor-options", SHARE),
            *(("--host", "0.0.0.0", "--insecure") if with_haproxy else ()),
            *arguments,
        )
        variables = dict(environment or {})
        if with_haproxy:
            variables["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
        words = [f"{name}={value}" for name, value in variables.items()]
        self._command = ["env", *words, *self._command]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        before = self.processes()
        super().__exit__(kind, error, trace)
        left = left_over(before)
        for number in left:
            os.kill(number, signal.SIGKILL)
        if left and error is None:
            raise RuntimeError(f"processes were left over: {', '.join(left.values())}")

    def processes(self) -> dict[int, str]:
        """Return the fleet's processes: number and command line."""
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


def _stat(folder: Path) -> tuple[int, str]:
    """Return a process's parent and its time of start, which tell it from a later one."""
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), fields[19]


def descendants(root: int) -> dict[int, str]:
    """Return a process and all below it, with their command lines."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                children.setdefault(_stat(folder)[0], []).append(int(folder.name))
            except OSError:
                continue
    found: dict[int, str] = {}
    waiting = [root]
    while waiting:
        number = waiting.pop()
        waiting += children.get(number, [])
        try:
            line = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found[number] = line.strip()
    return found


def left_over(before: dict[int, str], seconds: float = LEAVE_SECONDS) -> dict[int, str]:
    """Return which processes are still there after a while."""
    end = time.monotonic() + seconds
    while True:
        left = {}
        for number, line in before.items():
            try:
                now = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if now.strip() == line:
                left[number] = line
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.2)


def resident(number: int) -> int:
    """Return the bytes of memory of a process."""
    return int(Path(f"/proc/{number}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(number: int) -> int:
    """Return the number of files that a process has open."""
    return len(list(Path(f"/proc/{number}/fd").iterdir()))


def cpu_seconds(numbers: Iterable[int]) -> dict[int, float]:
    """Return the CPU time that processes have taken so far, without processes that have ended."""
    found = {}
    for number in numbers:
        with suppress(OSError):
            found[number] = server_process.cpu_seconds(number)
    return found


def cpu_since(before: Mapping[int, float]) -> float:
    """Return the CPU time since `before` of the processes that still live."""
    return sum(seconds - before[number] for number, seconds in cpu_seconds(before).items())
