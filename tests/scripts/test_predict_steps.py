"""Launches of decode steps: their budget, and what is predicted from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu import predict_steps
from scripts.gpu.compile_offline import compile_cases
from scripts.gpu.families import FAMILIES
from scripts.gpu.models import MODELS
from scripts.gpu.predict_steps import MOST, OURS, Step, budget_fault, count_launches, predict
from scripts.lib.paths import RESULTS

KEPT: dict[str, Any] = json.loads((RESULTS / "predicted_steps.json").read_text())
STEPS, SMALLER = (
    {
        name: {int(rows): Step(**step) for rows, step in found.items()}
        for name, found in KEPT[card].items()
    }
    for card in ("launches", "on_h100")
)
# Milliseconds that a step may be predicted to take.
GATES = {("8b", 1): 4.1, ("8b", 32): 5.1, ("8b", 256): 15.0, ("1b", 1): 0.855, ("0.6b", 1): 0.75}


def test_every_family_keeps_its_budget() -> None:
    assert set(STEPS) == {*OURS, *FAMILIES} and KEPT["about"]["faults"] == []
    for name, found in STEPS.items():
        assert set(found) == {1, 32, 256}
        assert [budget_fault(name, rows, step) for rows, step in found.items()] == [None] * 3
    assert {step.layer for name in OURS for step in STEPS[name].values()} == {MOST["layer"]}


@pytest.mark.parametrize(("name", "rows"), GATES)
def test_predictions_are_below_what_steps_may_take(name: str, rows: int) -> None:
    now = predict(MODELS[name], rows, STEPS[name][rows]) * 1e3
    before = predict_steps.BEFORE[name, rows]
    assert predict_steps.floor(MODELS[name], rows) * 1e3 < now <= GATES[name, rows] < before


def test_an_h100_takes_the_launches_of_an_h200() -> None:
    assert set(SMALLER) == set(OURS)
    for name, found in SMALLER.items():
        assert found == STEPS[name]


def test_parts_add_up_and_bytes_follow_the_card() -> None:
    model, step = MODELS["8b"], STEPS["8b"][1]
    parts = predict_steps.predict_parts(model, 1, step)
    assert sum(parts.values()) == predict(model, 1, step)
    assert parts["small launches"] == pytest.approx((32 * 4 + step.once - 1) * 2.2e-6)
    slow = predict_steps.predict_parts(model, 1, step, predict_steps.COPY / 2)
    assert slow["head"] == pytest.approx(2 * parts["head"] - predict_steps.RAMP)


def test_the_floor_adds_what_is_read_one_after_the_other() -> None:
    assert predict_steps.floor(MODELS["8b"], 256) * 1e3 == pytest.approx(12.9, abs=0.1)


@pytest.mark.parametrize("tokens", predict_steps.PROMPTS)
def test_a_prompt_takes_longer_than_its_floor(tokens: int) -> None:
    parts = predict_steps.predict_prompt(MODELS["8b"], tokens)
    model = MODELS["8b"]
    least = model.floor(1, tokens, tokens, predict_steps.COPY, predict_steps.BEST_MATMUL)
    assert least < sum(parts.values()) < 2 * least


def test_the_page_is_that_of_the_numbers() -> None:
    text = (RESULTS / "predicted_steps.md").read_text()
    assert text == predict_steps.table(KEPT["about"], STEPS, SMALLER)


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
