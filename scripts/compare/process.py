"""Process of a server and all it started: up, watched, down."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.error import URLError
from urllib.request import urlopen

START_S, STOP_S, LOOK_S = 600, 10, 0.25
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def tree(root: int) -> list[int]:
    """List a process and its descendants (Linux only)."""
    found = [root]
    for pid in found:
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:  # it has ended
            continue
    return found


def memory_bytes(pids: list[int]) -> int:
    """Count resident bytes, pages that are shared between them counted in each."""
    return sum(int(fields[21]) * PAGE for fields in map(_stat, pids) if fields)


def cpu_seconds(pids: list[int]) -> float:
    """Sum CPU time of living processes and of their ended children."""
    return sum(sum(map(int, fields[11:15])) for fields in map(_stat, pids) if fields) / TICKS


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class Started:
    """A server that was started and answers, as a context manager.

    Args:
        command: its command line.
        environment: variables to add to ours.
        url: without /v1. /health is polled until it answers.
        log: file for its output.
        threads: number of cores that it may use, by default all of ours.

    Attributes:
        start_seconds: from the start of the process to the first answer of /health.

    Raises:
        RuntimeError: on entering, with the end of the log: it did not come up.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        url: str,
        log: Path,
        threads: int | None = None,
    ) -> None:
        self._command, self._environment = command, environment
        self._cores = sorted(os.sched_getaffinity(0))[:threads]
        self.url, self._log = url, log
        self._stack = ExitStack()
        self._is_over = threading.Event()
        self._is_paused = False
        self.start_seconds = 0.0
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        log = self._stack.enter_context(self._log.open("wb"))
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            self._command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | self._environment,
            start_new_session=True,
        )
        # Before it makes threads: some engines have no setting for their number.
        os.sched_setaffinity(self.process.pid, self._cores)
        self._stack.callback(self._stop)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        try:
            self._wait(begin)
        except BaseException:
            self._stack.close()
            raise
        return self

    def _wait(self, begin: float) -> None:
        while time.perf_counter() - begin < START_S:
            if self.process.poll() is not None:
                raise RuntimeError(f"ended with {self.process.returncode}: {self.last_words()}")
            try:
                with urlopen(self.url + "/health", timeout=5):
                    self.start_seconds = time.perf_counter() - begin
                    return
            except (URLError, OSError):
                time.sleep(0.05)
        raise RuntimeError(f"not ready after {START_S} s: {self.last_words()}")

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])[-500:]

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S):
            if self._is_paused:  # its memory stays, and others are measured
                continue
            self.peak_bytes = max(self.peak_bytes, memory_bytes(tree(self.process.pid)))

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def pause(self) -> None:
        """Pause it and all of its processes until `go_on`. Connections stay."""
        self._is_paused = True
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self._is_paused = False

    def _signal(self, sign: signal.Signals) -> None:
        for pid in tree(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, sign)

    def cpu_seconds(self) -> float:
        """Count CPU seconds spent so far by the server and all it started."""
        return cpu_seconds(tree(self.process.pid))

    def _stop(self) -> None:
        """Stop it with all its descendants."""
        self._is_over.set()
        self._watcher.join()
        pids = tree(self.process.pid)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, sign)
                    os.kill(pid, signal.SIGCONT)  # or a paused one would not hear it
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                continue
            if sign == signal.SIGTERM:
                time.sleep(0.2)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
