"""Results of modules that run in processes of their own, with devices or settings of theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.support.live_server import ROOT


def found_by(module: str, *options: str, **environment: str) -> dict[str, Any]:
    """Run a module on the CPU, and return the JSON object of its last line.

    Args:
        options: of its command line.
        environment: variables, in addition to this process's environment.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
