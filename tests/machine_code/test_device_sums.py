"""Hopper's sum over devices, as compiled for 2, 4 and 8 of them, executed on all at once."""

from __future__ import annotations

import numpy as np
import pytest

from tests.machine_code.comparison import differences
from tests.machine_code.device_sum_cases import CASES, DeviceSumCase, kept_launch
from tests.machine_code.over_devices import same_bits


@pytest.mark.parametrize("drawn", [False, True], ids=["in order", "in a drawn order"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_device_gets_the_sum_in_the_order_of_the_devices(
    case: DeviceSumCase, drawn: bool
) -> None:
    expected = case.expected()
    launch = kept_launch(case)
    given = [case.given(device) for device in range(case.devices)]
    dtype = given[0][0].dtype
    blank = [(array.shape, np.empty(0, dtype)) for array in expected]
    order = np.random.default_rng(7) if drawn else None
    results = launch.run(given, blank, order)
    same_bits(results)
    assert differences(results[0], expected, case.tolerances) == []
