"""Entry of `python -m scripts.compare`."""

from __future__ import annotations

from scripts.compare.command import main
from scripts.lib.run_main import end_at_sigterm, run_main

if __name__ == "__main__":
    end_at_sigterm()
    run_main(main)
