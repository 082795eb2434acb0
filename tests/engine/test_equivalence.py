"""Runs `tests.equivalence` in a process of its own, since it computes in float64 throughout."""

import subprocess
import sys
from pathlib import Path

import pytest

RUNS = {
    "500": ["--schedules", "500"],
    "20 with experts": ["--schedules", "20", "--experts", "--pages", "4"],
    "25 with a cache in fp8": ["--schedules", "25", "--kv-cache-dtype", "fp8", "--pages", "4"],
}


@pytest.mark.parametrize("run", RUNS)
def test_random_schedules_equal_the_oracle(run: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.equivalence", *RUNS[run]],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{RUNS[run][1]} schedules equal the oracle" in done.stdout
