"""`jaxserve` with steps of at least `SECONDS`: what a test must see running does not end before.

python -m tests.server.slow serve --max-num-seqs 1
"""

from __future__ import annotations

import sys
import time

from jaxserve.cli import main
from jaxserve.engine.engine import Engine

SECONDS = 0.01


def slow_down() -> None:
    """Let each step of every engine of this process take its time."""
    step = Engine.step

    def slow_step(engine: Engine) -> None:
        time.sleep(SECONDS)
        step(engine)

    Engine.step = slow_step


if __name__ == "__main__":
    slow_down()
    sys.exit(main())
