"""What a results file says of its run: when, where and how it was measured."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compare.results import machine, plain


def about_run() -> dict[str, Any]:
    """Command, date, machine, Python, and the load before; to be called before the work.

    Folders of one machine, addresses and secrets are left out of the command.
    """
    command = " ".join(["python", *sys.argv])
    command = re.sub(r"(--(?:api-key|header)[= ])\S+", r"\1...", command)
    return {
        "command": plain(command),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def keep(path: Path, results: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write parts beside those of earlier runs; each keeps what is said of its own run."""
    before = json.loads(path.read_text()) if path.exists() else {}
    runs = before.pop("machines", {}) | before.get("runs", {}) | dict.fromkeys(results, about)
    path.write_text(json.dumps(before | dict(results) | {"runs": runs}, indent=2) + "\n")
