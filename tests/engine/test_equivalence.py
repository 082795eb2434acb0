"""Runs `tests.equivalence` in processes of their own, since float64 is set for a whole process.

A process compiles for half a minute, and a schedule takes less than a second: each property is
shown in one form, and with `--long` in all.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def long(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.long)


def schedules_equal(count: int, what: str, *options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.equivalence", "--schedules", str(count), *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} schedules equal {what}" in done.stdout


@pytest.mark.parametrize("count", [150, long(2000)])
def test_random_schedules_equal_the_oracle(count: int) -> None:
    schedules_equal(count, "the oracle")


def test_random_schedules_of_experts_equal_the_oracle() -> None:
    schedules_equal(20, "the oracle", "--experts")


def test_random_schedules_with_a_cache_in_fp8_equal_the_oracle() -> None:
    schedules_equal(25, "the oracle", "--kv-cache-dtype", "fp8")


def test_random_schedules_with_a_cache_in_int8_equal_the_oracle() -> None:
    """Over two devices, each of which has the scales of its heads."""
    cache = "--kv-cache-dtype", "int8_per_token_head"
    schedules_equal(6, "the oracle", *cache, "--tensor-parallel-size", "2")


def test_random_schedules_of_latents_in_int8_equal_each_request_alone_to_the_bit() -> None:
    case = "--dtype", "float32", "--case", "deepseek_v3_groups"
    cache = "--kv-cache-dtype", "int8_per_token_head"
    schedules_equal(5, "each request alone", *case, *cache)


@pytest.mark.parametrize("dtype", ["float32", long("bfloat16")])
def test_random_schedules_equal_each_request_alone_to_the_bit(dtype: str) -> None:
    schedules_equal(25, "each request alone", "--dtype", dtype)


@pytest.mark.parametrize("dtype", [long("float32"), "bfloat16"])
def test_random_schedules_of_experts_equal_each_request_alone_to_the_bit(dtype: str) -> None:
    schedules_equal(25, "each request alone", "--experts", "--dtype", dtype)


@pytest.mark.parametrize(
    "case", [long("gemma2_caps"), "gpt_oss_alternate", long("deepseek_v3_groups")]
)
def test_random_schedules_of_other_families_equal_each_request_alone_to_the_bit(case: str) -> None:
    schedules_equal(8, "each request alone", "--dtype", "float32", "--case", case)


@pytest.mark.parametrize("dtype", [long("float32"), "bfloat16"])
def test_over_two_devices_schedules_equal_each_request_alone_to_the_bit(dtype: str) -> None:
    options = ("--dtype", dtype, "--tensor-parallel-size", "2")
    schedules_equal(6, "each request alone", *options)
