"""What a results file says of its run: when, where and how it was measured."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
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
