"""A start's programs, compiled for a card that is not there, and the seconds of their parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts.gpu import compile_offline, start_table

PARTS = {"trace_s": 1.0, "lower_s": 0.5, "compile_s": 9.0}
PROGRAM = {"name": "32 tokens, 4 rows", **PARTS, "python_s": 2.5, "bytes": 2_500_000}
ABOUT = {
    "command": "python -m scripts.gpu.compile_offline --start 8b",
    "date": "2026-11-26",
    "cores": "2 cores",
    "model": "8b",
    "card": "NVIDIA H200",
    "devices": 1,
    "rows": 4,
    "tokens": 32,
    "pages": 7,
    "choices": 632,
}


def test_goals_are_of_the_largest_step_alone() -> None:
    small = PROGRAM | {"name": "load slot", "trace_s": 9.0}
    report = {"about": ABOUT, "programs": [PROGRAM, small], "imports_s": 2.0, "shapes_s": 0.1}
    assert start_table.faults(report) == ["32 tokens, 4 rows: trace_and_lower_s is 1.50; goal: 0.7"]
    text = start_table.table(report)
    assert "| 32 tokens, 4 rows | 1.00 | 0.50 | 9.00 | 2.5 |" in text
    assert "| all 2 | 10.0 | 1.0 | 18.0 | 5 |" in text and "632 choices" in text


@pytest.mark.parametrize(
    ("devices", "sums"), [pytest.param(1, 0, marks=pytest.mark.long), (2, 2 * 2 + 1)]
)
def test_programs_of_a_start_are_compiled_and_kept_without_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline_compiler: Path, devices: int, sums: int
) -> None:
    """Over two cards with the sums that the model needs."""
    command = ["compile_offline", "--env", str(offline_compiler.parents[1]), "--start", "tiny"]
    command += ["--rows", "1", "--tokens", "16", "--first", "2", "--out", str(tmp_path)]
    command += ["--tensor-parallel-size", str(devices)]
    monkeypatch.setattr(sys, "argv", command)
    assert compile_offline.main() == 0
    name = "start_tiny" if devices == 1 else "start_tiny_2"
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert [p["name"] for p in report["programs"]] == [
        *("16 tokens, 1 rows", "greedy decode 1, up to 8 steps")
    ]
    for program in report["programs"]:
        assert min(program["bytes"], *(program[part] for part in PARTS)) > 0
        assert program["python_s"] < program["seconds"] and program["sums"] == sums
    assert report["about"]["choices"] > 600
    assert "greedy decode 1, up to 8 steps" in (tmp_path / f"{name}.md").read_text()
