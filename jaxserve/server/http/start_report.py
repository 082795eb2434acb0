"""Reports of a start's progress, and the signals that end it."""

from __future__ import annotations

import signal
import time
from typing import TextIO


class Stop:
    """Ends the start at SIGTERM and at an interrupt.

    The exception that a signal raises is lost where Python happens to collect garbage; `check`
    raises it again.
    """

    def __init__(self) -> None:
        self._asked: BaseException | None = None
        signal.signal(signal.SIGTERM, lambda *_: self._stop(SystemExit(0)))
        signal.signal(signal.SIGINT, lambda *_: self._stop(KeyboardInterrupt()))

    def _stop(self, error: BaseException) -> None:
        self._asked = error
        raise error

    def check(self) -> None:
        """Raise again what a signal has raised, if one came."""
        if self._asked is not None:
            raise self._asked


class StartReport:
    """Says on a stream how far the start has come: a line for each stage, with its seconds.

    Args:
        stream: to write to.
        stop: looked at with everything that is said.
    """

    def __init__(self, stream: TextIO, stop: Stop | None = None) -> None:
        self._stream = stream
        self._stop = stop
        self._started = time.perf_counter()
        self._stage = ""

    def say(self, text: str) -> None:
        self._check()
        print(f"jaxserve: {text}", file=self._stream, flush=True)

    def progress(self, stage: str, done: int, total: int) -> None:
        """As `OnProgress`: rewrites its line on a terminal, else says when a stage is done."""
        self._check()
        if stage != self._stage:
            self._stage, self._started = stage, time.perf_counter()
        seconds = time.perf_counter() - self._started
        text = f"jaxserve: {stage} {done}/{total} ({seconds:.1f} s)"
        if self._stream.isatty():
            end = "\n" if done >= total else "\r"
            print(text, end=end, file=self._stream, flush=True)
        elif done >= total:
            print(text, file=self._stream, flush=True)

    def _check(self) -> None:
        if self._stop is not None:
            self._stop.check()
