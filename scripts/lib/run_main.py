"""Ends of a script: at an interrupt and at SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def end_at_sigterm() -> None:
    """End this process at SIGTERM as an exception does, so that it ends what it started.

    The first one: `timeout` sends several, and what ends the others must not be ended.
    """

    def end(number: int, _: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a script to its end; an interrupt ends it with a word and not with a traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
