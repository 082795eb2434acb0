"""Runs `tests.equivalence` in a process of its own, since it computes in float64 throughout."""

import subprocess
import sys
from pathlib import Path


def schedules_equal_the_oracle(count: int, *options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.equivalence", "--schedules", str(count), *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} schedules equal the oracle" in done.stdout


def test_500_random_schedules_equal_the_oracle() -> None:
    schedules_equal_the_oracle(500)


def test_random_schedules_of_experts_equal_the_oracle() -> None:
    schedules_equal_the_oracle(20, "--experts")


def test_random_schedules_with_a_cache_in_fp8_equal_the_oracle() -> None:
    schedules_equal_the_oracle(25, "--kv-cache-dtype", "fp8")
