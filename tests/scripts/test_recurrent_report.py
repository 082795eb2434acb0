"""Checks of decodes of layers with states in the report of a GPU, in small sizes, interpreted."""

from __future__ import annotations

import pytest

from scripts.gpu.cases import RecurrentCase
from scripts.gpu.recurrent import SMALL, check_step
from scripts.gpu.setting import Setting


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.kind)
def test_a_small_step_equals_the_specification(case: RecurrentCase) -> None:
    setting = Setting(True, {"parts": {}})
    assert check_step(case, setting.kernel)["verdict"] == "ok"
