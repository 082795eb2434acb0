"""Processes of the servers that are compared: watched, paused, and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from scripts.compare.engine import Engine
from scripts.lib.processes import cpu_seconds, memory_bytes, tree
from scripts.lib.server_process import Serving

START_S, STOP_S, LOOK_S = 600, 10, 0.25


class Started(Serving):
    """A server whose memory is watched, and which can be paused. /health says that it is ready.

    Args:
        environment: variables to add to ours.
        threads: number of cores that it may use, by default all of ours.

    Attributes:
        peak_bytes: the highest sum of resident bytes of the server and its descendants so far.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        url: str,
        log: Path,
        threads: int | None = None,
    ) -> None:
        variables = os.environ | environment
        super().__init__(command, url, environment=variables, log=log, start_s=START_S)
        self._cores = sorted(os.sched_getaffinity(0))[:threads]
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._is_paused = False
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return super().__enter__()

    def _has_begun(self) -> None:
        self._watcher.start()
        # Before it makes threads: some engines have no setting for their number.
        os.sched_setaffinity(self.process.pid, self._cores)

    def last_words(self) -> str:
        return " | ".join(self.log().strip().splitlines()[-3:])[-500:]

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
        total = 0.0
        for pid in tree(self.process.pid):
            with suppress(OSError):
                total += cpu_seconds(pid, with_ended=True)
        return total

    def stop(self) -> int:
        """Stop it with all its descendants. Return its exit status, or 0 if it cannot be ended."""
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
        return self.process.returncode or 0


class Servers:
    """Servers that repeats share: starting anew takes some engines longer than a part.

    As a context manager: whatever was started ends with it.
    `make` returns the server of an engine and a model, not started yet.
    """

    def __init__(self, make: Callable[[Engine, str], Started]) -> None:
        self._make = make
        self._model = ""
        self._kept: dict[str, Started] = {}

    @contextmanager
    def awake(self, engine: Engine, model: str) -> Iterator[tuple[Started, bool]]:
        """Wake the engine's server. Yield it and whether it is new, and halt it afterwards.

        Servers of another model end first. One that has ended by itself is started anew.

        Raises:
            NotInstalled: it cannot be had here.
            RuntimeError: it did not come up.
        """
        if model != self._model:
            self._end()
            self._model = model
        server = self._kept.get(engine.name)
        is_new = server is None or not server.is_alive
        if server is None or not server.is_alive:
            server = self._make(engine, model)
            server.__enter__()
            self._kept[engine.name] = server
        server.go_on()
        try:
            yield server, is_new
        finally:
            server.pause()

    def _end(self) -> None:
        for server in self._kept.values():
            server.__exit__(None, None, None)
        self._kept.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
