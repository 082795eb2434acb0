"""Reports of a start's progress, and the signals that end it."""

from __future__ import annotations

import signal
import time
from typing import TextIO

from jaxserve.start.interrupts import on_signal

# Cells of the bar that shows a stage's progress.
_BAR = 24
# A total from which on a part of it is a percentage: so many bytes, never so many programs.
_MANY = 100_000


class Stop:
    """Handler of SIGTERM and of interrupts that ends the start.

    The exception that a signal raises is lost where Python happens to collect garbage; `check`
    raises it again.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        on_signal(signal.SIGTERM, lambda: self._stop(SystemExit(0)))
        on_signal(signal.SIGINT, lambda: self._stop(KeyboardInterrupt()))

    def _stop(self, error: BaseException) -> None:
        self._error = error
        raise error

    def check(self) -> None:
        """Raise again what a signal has raised, if one came."""
        if self._error is not None:
            raise self._error


class StartReport:
    """Report of the start's progress on a stream: a line for each stage, with its seconds.

    Args:
        stream: to write to.
        stop: checked with every line.
        is_verbose: whether all that is known of a start is to be reported.
    """

    def __init__(self, stream: TextIO, stop: Stop | None = None, is_verbose: bool = False) -> None:
        self.is_verbose = is_verbose
        self._stream = stream
        self._stop = stop
        self._started = time.perf_counter()
        self._stage = ""

    def say(self, text: str) -> None:
        self._check()
        print(f"jaxserve: {text}", file=self._stream, flush=True)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report progress as an `OnProgress`.

        On a terminal a bar grows, elsewhere a line is written when a stage is done.
        """
        self._check()
        if stage != self._stage:
            self._stage, self._started = stage, time.perf_counter()
        seconds = time.perf_counter() - self._started
        amount = f"{done}/{total}"
        if total >= _MANY and not self.is_verbose:
            amount = f"{100 * done // total} %"
        text = f"jaxserve: {stage} {amount} ({seconds:.1f} s)"
        if self._stream.isatty():
            full = _BAR * min(done, total) // max(total, 1)
            text = f"jaxserve: {stage} [{'#' * full:.<{_BAR}}] {amount} ({seconds:.1f} s)"
            end = "\n" if done >= total else "\r"
            print(text, end=end, file=self._stream, flush=True)
        elif done >= total:
            print(text, file=self._stream, flush=True)

    def _check(self) -> None:
        if self._stop is not None:
            self._stop.check()
