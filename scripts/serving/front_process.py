"""Routers of others in front of replicas: each as a process, with prefixes in its policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError

from scripts.lib.paths import ROOT
from scripts.lib.server_process import Server, Serving, ask, free_port

PROGRAMS = ROOT / ".venv-clients" / "bin"
KEY = "key-of-the-fleet"
MODEL = "demo_model"
# Small programs, so that a replica starts in seconds. Routers read /metrics without a key.
REPLICA = (
    "--max-num-seqs 8 --max-num-batched-tokens 128 --decode-sizes 8 --token-sizes 128 "
    f"--max-num-queued-reqs 8 --drain-timeout 120 --api-key {KEY} --open-metrics "
    "--enable-auto-tool-choice --tool-call-parser hermes"
).split()
# Health is polled each second, and where requests failed they are tried again after two seconds.
_POLLING = (
    "--worker-startup-check-interval 1 --health-check-interval-secs 1 "
    "--health-check-timeout-secs 5 --health-failure-threshold 1 --health-success-threshold 1 "
    "--cb-timeout-duration-secs 2 --cb-success-threshold 1"
).split()


class Kind(NamedTuple):
    """A router as a Python package: its program, and where it lists its workers."""

    package: str
    command: tuple[str, ...]
    workers: str


KINDS = {
    "vllm-router": Kind("vllm-router", ("vllm-router",), "/list_workers"),
    "smg": Kind("smg", ("smg", "launch"), "/workers"),
}


class Front(Serving):
    """A router over running replicas.

    Args:
        kind: a name of `KINDS`.
        programs: the folder of its program.
    """

    def __init__(self, kind: str, replicas: list[Server], programs: Path = PROGRAMS) -> None:
        self.kind = KINDS[kind]
        self.replicas = replicas
        port = free_port()
        program, *words = self.kind.command
        command = [
            *(str(programs / program), *words, "--host", "127.0.0.1", "--port", str(port)),
            *("--worker-urls", *(replica.url for replica in replicas)),
            *("--policy", "cache_aware", "--prometheus-port", str(free_port())),
            *("--api-key", KEY, *_POLLING),
        ]
        super().__init__(command, f"http://127.0.0.1:{port}", start_s=120, stop_s=10)

    def is_ready(self) -> bool:
        """Return whether it routes to all replicas."""
        return self.num_workers() == len(self.replicas)

    def last_words(self) -> str:
        return self.log()[-2000:]

    def get(self, path: str) -> Any:
        return ask(self.url + path, headers={"authorization": f"Bearer {KEY}"})

    def num_workers(self) -> int:
        """Return how many replicas it routes to now, or 0 while it does not answer."""
        try:
            found = self.get(self.kind.workers)
        except (URLError, OSError, ValueError):
            return 0
        workers = found.get("workers", found.get("urls", []))
        return sum(not isinstance(worker, dict) or worker["is_healthy"] for worker in workers)
