"""Entry point of `jaxserve` and `python -m jaxserve`: it handles interrupts of the imports too."""

import sys

from jaxserve.interrupts import Interrupts


def main() -> int:
    """Run the command line, and return its exit status."""
    interrupts = Interrupts()
    interrupts.listen()
    return interrupts.run(_command)


def _command() -> int:
    from jaxserve.commands.cli import main as run_command  # takes most of a second

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
