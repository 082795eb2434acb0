"""Routers of others in front of replicas: each as a process, with prefixes in its policy."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.error import URLError
from urllib.request import Request, urlopen

from scripts.lib.paths import ROOT
from scripts.lib.server_process import Server, free_port

PROGRAMS = ROOT / ".venv-clients" / "bin"
KEY = "key-of-the-fleet"
MODEL = "demo_model"
# Small programs, so that a replica starts in seconds. Routers read /metrics without a key.
REPLICA = (
    "--max-num-seqs 8 --max-num-batched-tokens 128 --decode-sizes 8 --token-sizes 128 "
    f"--max-num-queued-reqs 8 --drain-timeout 120 --api-key {KEY} --open-metrics "
    "--enable-auto-tool-choice --tool-call-parser hermes"
).split()
_START_S, _STOP_S = 120, 10
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


class Front:
    """A router over running replicas, as a context manager.

    Args:
        kind: a name of `KINDS`.
        replicas: the servers behind it.
        programs: the folder of its program.

    Attributes:
        url: without `/v1`.

    Raises:
        RuntimeError: on entering, with the end of its output: it did not come up.
    """

    def __init__(self, kind: str, replicas: list[Server], programs: Path = PROGRAMS) -> None:
        self.kind = KINDS[kind]
        self.replicas = replicas
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        program, *words = self.kind.command
        self._command = [
            *(str(programs / program), *words, "--host", "127.0.0.1", "--port", str(port)),
            *("--worker-urls", *(replica.url for replica in replicas)),
            *("--policy", "cache_aware", "--prometheus-port", str(free_port())),
            *("--api-key", KEY, *_POLLING),
        ]
        self._stack = ExitStack()
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self._log = self._stack.enter_context(tempfile.TemporaryFile("w+"))
        self.process = subprocess.Popen(
            self._command, stdout=self._log, stderr=self._log, start_new_session=True
        )
        try:
            self.wait_for(len(self.replicas))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the router, which may wait for connections that clients keep open."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                try:
                    self.process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    continue
        self._stack.close()

    def get(self, path: str) -> Any:
        """Return the JSON of a GET."""
        request = Request(self.url + path, headers={"authorization": f"Bearer {KEY}"})
        with urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def num_workers(self) -> int:
        """Return how many replicas it routes to now, or 0 while it does not answer."""
        try:
            found = self.get(self.kind.workers)
        except (URLError, OSError, ValueError):
            return 0
        workers = found.get("workers", found.get("urls", []))
        return sum(not isinstance(worker, dict) or worker["is_healthy"] for worker in workers)

    def wait_for(self, count: int) -> None:
        """Wait until it routes to so many replicas."""
        end = time.monotonic() + _START_S
        while self.num_workers() != count:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"it does not route to {count} replicas: {self.log()[-2000:]}")
            time.sleep(0.1)

    def log(self) -> str:
        """Read its output so far."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read()
