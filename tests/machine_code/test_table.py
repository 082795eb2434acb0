"""The table of kernels by capability."""

from __future__ import annotations

import json
from pathlib import Path

from tests.machine_code.__main__ import whole_kernels
from tests.machine_code.cases import all_cases
from tests.machine_code.table import PART, PLANTED, Row, summarize, write_table

ADD, SUB, MUL = {"add"}, {"sub"}, {"mul"}
ROWS = [
    Row("9.0", "decode", True, ADD | SUB, ADD),
    Row("9.0", "decode", False, ADD | SUB, SUB),
    Row("9.0", "ragged", True, ADD | MUL, ADD),
]


def test_rows_are_summed_by_kernel_and_capability() -> None:
    """An instruction counts once, and is executed if one of the cases executes it."""
    sums = summarize([*ROWS, Row("8.0", "decode", True, ADD, ADD)])
    assert sums["9.0"]["decode"] == {
        "cases": 2,
        "right": 1,
        "instructions": 2,
        "executed": 2,
        "not_executed": [],
    }
    assert sums["9.0"]["ragged"]["not_executed"] == ["mul"]
    assert sums["8.0"].keys() == {"decode"}


def test_the_table_has_earlier_kernels_capabilities_and_faults_too(tmp_path: Path) -> None:
    path = tmp_path / "machine_code.json"
    planted = {"9.0": {"decode": {"planted": 90, "caught": 88, "equivalent": 4}}}
    path.write_text(json.dumps({PLANTED: planted}))
    write_table(ROWS, tmp_path)
    write_table([Row("8.0", "decode", True, ADD, ADD)], tmp_path)
    write_table([ROWS[2]], tmp_path)
    results = json.loads(path.read_text())
    assert results[PLANTED] == planted and results[PART].keys() == {"8.0", "9.0"}
    text = (tmp_path / "machine_code.md").read_text()
    first, second = "1 of 1 cases, 1 of 1 instructions", "1 of 2 cases, 2 of 2 instructions"
    assert f"| decode | {first} | - | {second}, 88 of 90 faults | - |" in text
    assert "In all 3 of 4 cases. 88 of 90 faults were caught; 4 more change nothing." in text
    assert "Not executed: mul." in text


def test_the_table_has_no_kernel_of_which_a_case_was_left_out() -> None:
    cases = [case for case in all_cases() if case.family in ("greatest", "grouped")]
    rows = [Row("9.0", case.family, True, ADD, ADD) for case in cases]
    assert {row.family for row in whole_kernels(rows)} == {"greatest", "grouped"}
    assert {row.family for row in whole_kernels(rows[1:])} == {"grouped"}
