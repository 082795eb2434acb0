"""A start with real weights, whose programs come one by one, answers the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_programs_behind import run


@pytest.mark.long
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_answers_are_the_same_before_and_after_programs_come(
    real_models: dict[str, Path], name: str, tmp_path: Path
) -> None:
    first, before, last, after, _, from_files, all_waited_for = run(
        "held_back", real_models[name], tmp_path
    )[0]
    assert first == last == from_files == all_waited_for
    assert before["buckets"] == 1 and after["missing"] == 0
