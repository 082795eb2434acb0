"""A run keeps whole programs only for the next run."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from jaxserve.settings.environment import user_cache_dir
from pallas_kernels.cpu import ffi
from tests.support.kept_kernels import keep_machine_code
from tests.support.kept_programs import (
    FOLDER,
    borrow_programs,
    in_users_environment,
    keep_objects,
    keep_programs,
    users_objects,
)


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


def test_what_jaxserve_keeps_lies_where_it_is_taken_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "anywhere")
    before = dict(os.environ)
    with in_users_environment():
        assert user_cache_dir() == users_objects(tmp_path).parent.parent
        assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    assert os.environ == before
    kept, run = tmp_path / "kept", tmp_path / "run"
    borrow_programs(run, kept)
    (run / ("a" * 64)).write_bytes(b"whole")
    (run / f".{'b' * 64}.1.2").write_bytes(b"ha")
    keep_objects(run, kept)
    assert [path.name for path in kept.iterdir()] == ["a" * 64]


def test_machine_code_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def compile_module(module: str, cpu: str, thorough: bool = False) -> bytes:
        asked.append((module, cpu, str(thorough)))
        return f"{module} for {cpu} {thorough}".encode()

    for _ in range(2):  # two processes
        monkeypatch.setattr(ffi, "machine_code", compile_module)
        keep_machine_code(tmp_path)
        code: Any = ffi.machine_code
        assert code("a", "x86") == b"a for x86 False"
        assert code("a", "x86", thorough=True) == b"a for x86 True"
        assert code("a", "arm") == b"a for arm False"
        assert code("b", "x86") == b"b for x86 False"
    assert len(asked) == 4 == len(list(tmp_path.iterdir()))


def test_what_has_grown_too_large_is_forgotten(tmp_path: Path, monkeypatch) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "a-cache").write_bytes(bytes(100))
    monkeypatch.setattr("tests.support.kept_programs.MOST_BYTES", 99)
    borrow_programs(tmp_path / "run", kept)
    assert not list(kept.iterdir())
