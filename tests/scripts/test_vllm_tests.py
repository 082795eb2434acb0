"""The table of vLLM's own tests: the counted results, and the options that our server gets."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.vllm_tests.cases import WITHOUT
from scripts.vllm_tests.plugin import translate
from scripts.vllm_tests.report import read_outcomes, table


def test_arguments_without_meaning_are_left_out() -> None:
    given = "--dtype bfloat16 --enforce-eager --lora-modules a=b c=d --max-lora-rank=64 --port 1"
    left = ["--dtype", "bfloat16", "--port", "1"]
    assert translate(given.split(), WITHOUT, 10) == left
    assert translate(["--max-model-len", "12"], [], 10) == ["--max-model-len", "10"]
    assert translate(["--max-model-len", "8"], [], 10) == ["--max-model-len", "8"]


def test_the_table_gives_each_failure_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    outcomes = [
        ("t.py::test_a", "passed", ""),
        ("t.py::test_long_seed", "failed", "seed must be from 0"),
        ("t.py::test_b[x]", "failed", "The model `y-lora` does not exist"),
        ("t.py::test_c", "failed", "AssertionError"),
        # It failed and its server could not be stopped: it counts once.
        ("t.py::test_c", "failed", "RuntimeError"),
        # It passed, and its teardown failed.
        ("t.py::test_a", "failed", "RuntimeError"),
        ("t.py::test_d", "passed", ""),
    ]
    lines = [
        json.dumps(dict(zip(("test", "outcome", "why"), row, strict=True))) for row in outcomes
    ]
    path.write_text("\n".join(lines) + "\n")
    page, unexplained = table({"t.py": read_outcomes(path)}, "1.2.3", ["--flag"])
    assert unexplained == 2
    failed = "2: **no reason yet**; 1: the refusal is worded otherwise"
    assert f"| t.py | 1 | {failed} | 1: LoRA |\n" in page and "`--flag`" in page


def test_a_file_without_outcomes_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    path.write_text("")
    assert read_outcomes(path).failed == {"": 1}
