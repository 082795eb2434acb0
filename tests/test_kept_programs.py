"""What a run keeps for the next: whole programs only."""

from __future__ import annotations

import zlib
from pathlib import Path

from tests.support.kept_programs import borrow_programs, keep_programs


def test_halves_of_programs_are_not_kept(tmp_path: Path) -> None:
    kept, first, second = (tmp_path / name for name in ("kept", "first", "second"))
    borrow_programs(first, kept)
    whole = zlib.compress(bytes(range(256)) * 100)
    (first / "whole-cache").write_bytes(whole)
    (first / "half-cache").write_bytes(whole[: len(whole) // 2])
    keep_programs(first, kept)
    borrow_programs(second, kept)
    assert [path.name for path in second.iterdir()] == ["whole-cache"]
    assert (second / "whole-cache").read_bytes() == whole


def test_what_has_grown_too_large_is_forgotten(tmp_path: Path, monkeypatch) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "a-cache").write_bytes(bytes(100))
    monkeypatch.setattr("tests.support.kept_programs.MOST_BYTES", 99)
    borrow_programs(tmp_path / "run", kept)
    assert not list(kept.iterdir())
