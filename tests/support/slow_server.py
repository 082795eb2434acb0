"""Run `jaxserve` with steps of at least `SECONDS`, so that tests can observe running requests.

python -m tests.support.slow_server serve --max-num-seqs 1
"""

from __future__ import annotations

import sys
import time
from typing import Any

from jaxserve.commands.cli import main
from jaxserve.engine.engine import Engine

SECONDS = 0.01


def slow_down(engine: Any, seconds: float) -> None:
    """Let each step of an engine, or of all where it is their class, take `seconds` more."""
    step = engine.step

    def slow_step(*arguments: Any) -> None:
        time.sleep(seconds)
        step(*arguments)

    engine.step = slow_step


if __name__ == "__main__":
    slow_down(Engine, SECONDS)
    sys.exit(main())
