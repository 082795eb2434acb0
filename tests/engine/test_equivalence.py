"""Random schedules of `tests.equivalence`, each property in one form, and with `--long` in all.

A process compiles for half a minute, and a schedule takes less than a second. Float64 is set for a
whole process, as is the number of devices: a test that needs either runs in a separate process, all
of float64 in one.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.equivalence import main

# The first sets the number of devices, which no later one can.
IN_FLOAT64 = {
    # Over two devices, each of which has the scales of its heads.
    "int8": "--schedules 6 --kv-cache-dtype int8_per_token_head --tensor-parallel-size 2",
    # The others have pages of 4.
    "plain": "--schedules 40 --page-sizes 1 16",
    "experts": "--schedules 8 --experts",
    "fp8": "--schedules 8 --kv-cache-dtype fp8",
    "latents": "--schedules 8 --case deepseek_v3_groups",
}
RUNS = """
import sys
from tests.equivalence import main

for words in sys.argv[1:]:
    main(words.split())
"""


def long(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.long)


def lines_of(*runs: str) -> list[str]:
    """Return the last line of each run's output; the runs follow one another in one process."""
    done = subprocess.run(
        [sys.executable, "-c", RUNS, *runs],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def equal_the_oracle(line: str, run: str) -> None:
    count = run.split()[1]
    assert line.startswith(f"{count} schedules equal the oracle: ")


@pytest.fixture(scope="module")
def in_float64() -> dict[str, str]:
    """Return the last line of each run of `IN_FLOAT64`."""
    return dict(zip(IN_FLOAT64, lines_of(*IN_FLOAT64.values()), strict=True))


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_random_schedules_equal_the_oracle(in_float64: dict[str, str], name: str) -> None:
    equal_the_oracle(in_float64[name], IN_FLOAT64[name])


@pytest.mark.long
@pytest.mark.parametrize(
    "run",
    ["--schedules 2000", "--schedules 200 --experts", "--schedules 200 --kv-cache-dtype fp8"],
)
def test_very_many_random_schedules_equal_the_oracle(run: str) -> None:
    [line] = lines_of(run)
    equal_the_oracle(line, run)


Capture = pytest.CaptureFixture[str]


def equal_each_alone(capsys: Capture, count: int, options: str) -> None:
    """Run schedules in this process, whose programs are compiled as users have them."""
    assert main(["--schedules", str(count), *options.split()]) == 0
    assert f"{count} schedules equal each request alone" in capsys.readouterr().out


def test_random_schedules_of_latents_in_int8_equal_each_request_alone_to_the_bit(
    capsys: Capture,
) -> None:
    options = "--dtype float32 --case deepseek_v3_groups --kv-cache-dtype int8_per_token_head"
    equal_each_alone(capsys, 5, options)


def test_random_schedules_over_pages_equal_each_request_alone_to_the_bit(capsys: Capture) -> None:
    """All other forms have pages of 4 tokens."""
    equal_each_alone(capsys, 16, "--dtype float32 --case gemma2_caps --page-sizes 1 16")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_random_schedules_equal_each_request_alone_to_the_bit(
    capsys: Capture, dtype: str
) -> None:
    equal_each_alone(capsys, 50, f"--dtype {dtype}")


@pytest.mark.long  # the usual run has latents in float32 and, below, bfloat16
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_schedules_of_experts_equal_each_request_alone_to_the_bit(
    capsys: Capture, dtype: str
) -> None:
    equal_each_alone(capsys, 16, f"--experts --dtype {dtype}")


@pytest.mark.parametrize(
    "options",
    [
        "--case gpt_oss_alternate --dtype bfloat16",
        long("--case gpt_oss_alternate --dtype float32"),
        long("--case deepseek_v3_groups --dtype float32"),
    ],
)
def test_random_schedules_of_other_families_equal_each_request_alone_to_the_bit(
    capsys: Capture, options: str
) -> None:
    equal_each_alone(capsys, 8, options)


@pytest.mark.parametrize(
    "options",
    ["--dtype bfloat16", long("--experts --dtype bfloat16"), long("--dtype float32")],
)
def test_over_two_devices_schedules_equal_each_request_alone_to_the_bit(options: str) -> None:
    [line] = lines_of(f"--schedules 6 {options} --tensor-parallel-size 2")
    assert line.startswith("6 schedules equal each request alone")
