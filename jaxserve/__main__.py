"""Entry point of `jaxserve` and `python -m jaxserve`, with interrupts handled during imports."""

import sys
from importlib import import_module

from jaxserve.start.interrupts import run_interruptible


def main() -> int:
    """Run the `jaxserve` command line with interrupts handled, and return its exit status."""
    return run_interruptible(_command)


def _command() -> int:
    # The imports of the commands take most of a second.
    return import_module("jaxserve.commands.cli").main()


if __name__ == "__main__":
    sys.exit(main())
