"""Entry of `python -m scripts.live_demo`."""

from __future__ import annotations

import time

STARTED = time.perf_counter()

from jaxserve.settings.environment import prepare_process

prepare_process()  # before anything imports JAX

from scripts.lib.run_main import run_main
from scripts.live_demo.command import main

if __name__ == "__main__":
    run_main(lambda: main(STARTED))
