"""Hopper's sum over devices, as compiled for 2, 4 and 8 of them, executed on all at once."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from scripts.machine_code.faults import Fault
from scripts.machine_code.over_devices import DeviceLaunch, same_bits
from scripts.machine_code.ptx import read_module
from tests.machine_code.comparison import differences
from tests.machine_code.device_sum_cases import CASES, DeviceSumCase, kept_launch, kept_text

BY_NAME = {case.name: case for case in CASES}
SMALL = BY_NAME["sum-over-2-bf16"]
WAIT = re.compile(r"(ld\.relaxed\.sys\.global\.b32 (%r\d+).*?setp\.lt\.u32\s+%p\d+, \2, )2;", re.S)


def execute(
    case: DeviceSumCase,
    launch: DeviceLaunch,
    order: np.random.Generator | None = None,
    **options: int,
) -> list[str]:
    """Run a case. Return sentences about wrong results of its devices."""
    expected = case.expected()
    given = [case.given(device) for device in range(case.devices)]
    blank = [(array.shape, np.empty(0, given[0][0].dtype)) for array in expected]
    results = launch.run(given, blank, order, **options)
    same_bits(results)
    return differences(results[0], expected, case.tolerances)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_device_gets_the_sum_in_the_order_of_the_devices(case: DeviceSumCase) -> None:
    assert execute(case, kept_launch(case)) == []


def test_no_order_of_warps_changes_a_bit() -> None:
    assert execute(SMALL, kept_launch(SMALL), np.random.default_rng(7)) == []


@pytest.mark.parametrize("ahead", range(4))
def test_a_device_that_runs_ahead_waits_until_it_is_read(ahead: int) -> None:
    case = BY_NAME["sum-over-4-bf16-offset"]
    assert execute(case, kept_launch(case), ahead=ahead) == []


def changed(pattern: re.Pattern[str], replacement: str) -> DeviceLaunch:
    """Return the launch of the small case with its machine code changed."""
    text, count = pattern.subn(replacement, kept_text(SMALL))
    assert count == 1
    [kernel] = read_module(text).values()
    return dataclasses.replace(kept_launch(SMALL), kernel=kernel)


@pytest.mark.parametrize("ahead", range(2))
def test_a_device_that_does_not_wait_is_found(ahead: int) -> None:
    with pytest.raises(Fault, match="other bits"):
        execute(SMALL, changed(WAIT, r"\g<1>0;"), ahead=ahead)


def test_a_device_that_waits_for_more_than_come_is_found() -> None:
    with pytest.raises(Fault, match="no end within 3000 blocks"):
        execute(SMALL, changed(WAIT, r"\g<1>3;"), fuel=3000)


def test_parts_in_another_order_are_found() -> None:
    case = BY_NAME["sum-over-8-alone"]
    expected, given = case.expected(), [case.given(device) for device in range(8)]
    blank = [(array.shape, given[0][0]) for array in expected]
    for parts, is_right in ((given, True), (given[::-1], False)):
        [result] = kept_launch(case).run(parts, blank)[0]
        assert np.array_equal(result, expected[0]) == is_right
        assert np.allclose(result, expected[0], rtol=1e-4, atol=1e-3)
