"""Entry of `python -m scripts.simulate`."""

from __future__ import annotations

from scripts.lib.run_main import run_main
from scripts.simulate.command import main

if __name__ == "__main__":
    run_main(main)
