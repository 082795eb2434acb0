"""Ends of a script: at an interrupt and at SIGTERM."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn


def end_at_sigterm() -> None:
    """End this process at the first SIGTERM by an exception, so that it ends its own processes.

    Later ones are ignored: `timeout` sends several, and the clean-up must not be interrupted.
    """

    def end(_: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if _in_collector(frame):  # where an exception is printed and lost: JAX has such a callback
            signal.signal(signal.SIGALRM, end)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        else:
            raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


def _in_collector(frame: FrameType | None) -> bool:
    """Return whether a frame is within a callback of the garbage collector."""
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a script to its end. An interrupt ends it with a word and not with a traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
