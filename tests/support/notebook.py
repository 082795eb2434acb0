"""Notebooks without a kernel: their cells, and a run of them in one namespace.

python -m tests.support.notebook NOTEBOOK FIGURE MODELS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.real import fetch


def code_cells(path: Path) -> dict[str, str]:
    """Return the code of a notebook by the ids of its cells, in their order."""
    cells = json.loads(path.read_text())["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}


def run(path: Path, figure: Path, models: Path) -> None:
    """Execute every cell, as a kernel does, and keep the last figure.

    Args:
        models: the folder where models are kept.
    """
    fetch.default_folder = lambda: models
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for name, source in code_cells(path).items():
        exec(compile(source, f"{path.name}, cell {name}", "exec"), namespace)
    namespace["figure"].savefig(figure)


if __name__ == "__main__":
    run(*map(Path, sys.argv[1:]))
