"""Entry point of `jaxserve` and `python -m jaxserve`: it handles interrupts of the imports too."""

import sys
from importlib import import_module

from jaxserve.interrupts import Interrupts


def main() -> int:
    """Run the command line, and return its exit status."""
    interrupts = Interrupts()
    interrupts.listen()
    return interrupts.run(_command)


def _command() -> int:
    # The imports of the commands take most of a second.
    return import_module("jaxserve.commands.cli").main()


if __name__ == "__main__":
    sys.exit(main())
