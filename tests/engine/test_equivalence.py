"""Runs `tests.equivalence` in a process of its own, since it computes in float64 throughout."""

import subprocess
import sys
from pathlib import Path


def test_500_random_schedules_equal_the_oracle() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.equivalence", "--schedules", "500"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "500 schedules equal the oracle" in done.stdout
