"""Launches of decode steps: their budget, and the times that are predicted from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu import predict_steps
from scripts.gpu.compile_offline import compile_cases
from scripts.gpu.families import FAMILIES
from scripts.gpu.predict_steps import MOST, OURS, Step, budget_fault, count_launches
from scripts.lib.paths import RESULTS

KEPT: dict[str, Any] = json.loads((RESULTS / "predicted_steps.json").read_text())
STEPS = {
    name: {int(rows): Step(**step) for rows, step in found.items()}
    for name, found in KEPT["launches"].items()
}


def test_every_family_keeps_its_budget() -> None:
    assert set(STEPS) == {*OURS, *FAMILIES} and KEPT["about"]["faults"] == []
    for name, found in STEPS.items():
        assert set(found) == {1, 32, 256}
        assert [budget_fault(name, rows, step) for rows, step in found.items()] == [None] * 3
    assert {step.layer for name in OURS for step in STEPS[name].values()} == {MOST["layer"]}


def test_the_page_is_that_of_the_numbers() -> None:
    """A step of an 8B model has 266 launches.

    An H200 takes longer than the prediction of any step.
    """
    text = (RESULTS / "predicted_steps.md").read_text()
    assert text == predict_steps.table(KEPT["about"], STEPS)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| 8b")]
    assert rows[0][:5] == ["8b", "1", "8", "10", "266"]
    for row in rows[:3]:
        least, predicted, taken = map(float, row[5:])
        assert predicted == pytest.approx(least + 266 * 2.2e-3, abs=0.011) and predicted < taken


def test_steps_that_take_too_much_are_refused() -> None:
    assert "9 launches a layer and 9 once; allowed: 8 and 12" in str(
        budget_fault("8b", 1, Step(9, 9))
    )
    assert budget_fault("Gemma 3 1B", 1, Step(11, 12)) is None
    assert "allowed: 11 and 12" in str(budget_fault("Gemma 3 1B", 1, Step(12, 12)))
    assert "and 13 once" in str(budget_fault("8b", 1, Step(8, 13)))
    assert budget_fault("Qwen3 30B-A3B", 1, Step(99, 9)) is None


def test_what_does_not_compile_has_no_launches() -> None:
    few, more = (predict_steps.launch_case("8b", 1, layers).name for layers in (2, 3))
    rows: list[dict[str, Any]] = [{"name": few, "launches": 27, "kv_copies": 0}]
    rows += [{"name": more, "launches": 35, "kv_copies": 0}]
    assert count_launches(rows, "8b", 1) == Step(8, 11)
    rows[1]["kv_copies"] = 3
    assert count_launches(rows, "8b", 1) == f"{more}: 3 copies of KV"
    assert count_launches([{"name": few, "error": "no"}, rows[1]], "8b", 1) == f"{few}: no"


def test_a_small_step_keeps_the_budget(offline_compiler: Path) -> None:
    rows = compile_cases(offline_compiler, predict_steps.CARD, "launches: tiny", "decode 32 rows")
    step = count_launches(rows, "tiny", 32)
    assert isinstance(step, Step) and step.layer == MOST["layer"] and step.once <= MOST["once"]
