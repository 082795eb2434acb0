"""Calls `tests/real/llamacpp.py` in the Python that has llama.cpp's packages."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "llamacpp.py"


def llamacpp_answer(python: Path, path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Run `tests/real/llamacpp.py` on a question and return its answer."""
    command = [str(python), str(SCRIPT), str(path)]
    ended = subprocess.run(
        command, input=json.dumps(question), capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"llama.cpp ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return json.loads(ended.stdout)
