"""`python -m jaxserve` is the `jaxserve` command."""

import sys

from jaxserve.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
