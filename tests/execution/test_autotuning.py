"""Choices of XLA's that come with the package: laid where it looks for them, over no other."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import pytest

from jaxserve.start.programs import autotuning
from jaxserve.start.programs.autotuning import (
    TUNED,
    Choices,
    keep_choices,
    lay_down,
    read_choices,
    table_path,
    write_choices,
)

H200 = "NVIDIA H200"


def files(cache: Path) -> Choices:
    found = (cache / TUNED).rglob("*")
    return {str(p.relative_to(cache / TUNED)): p.read_bytes() for p in found if p.is_file()}


def test_choices_of_the_card_are_laid_down_once(tmp_path: Path) -> None:
    ours = read_choices(H200)
    assert lay_down(H200, tmp_path) == len(ours) > 600
    assert files(tmp_path) == ours
    assert lay_down(H200, tmp_path) == 0
    device = next((tmp_path / TUNED).iterdir())
    assert device.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in device.iterdir())


def test_what_was_measured_here_stays(tmp_path: Path) -> None:
    name = next(iter(read_choices(H200)))
    own = tmp_path / TUNED / name
    own.parent.mkdir(parents=True)
    own.write_bytes(b"measured here")
    assert lay_down(H200, tmp_path) == len(read_choices(H200)) - 1
    assert own.read_bytes() == b"measured here"


def test_another_card_gets_none(tmp_path: Path) -> None:
    for kind in ("NVIDIA H200 NVL", "Tesla T4", "cpu"):
        assert lay_down(kind, tmp_path) == 0
    assert not any(tmp_path.iterdir())


def test_a_file_holds_its_device_and_its_own_name() -> None:
    """These names, and versions, tell XLA whether a choice belongs to this program."""
    for name, content in read_choices(H200).items():
        device, instruction = name.removesuffix(".pb").split("/")
        assert device.encode() in content and instruction.encode() in content


def test_a_table_comes_back_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotuning, "_TABLES", tmp_path / "tables")
    device, name = "0" * 16, "1" * 32
    choices = {f"{device}/{name}.pb": b"\n\xff" + name.encode() + b"\x00"}
    path = write_choices("NVIDIA L40S", choices, {"measured": "2026-11-26"})
    assert path == table_path("NVIDIA L40S") == tmp_path / "tables/nvidia-l40s.json"
    assert read_choices("NVIDIA L40S") == choices
    for wrong in ({f"{device}/{name}.pb": b"another"}, {"../x.pb": b"x"}):
        with pytest.raises(ValueError, match="is not a file of XLA's choices"):
            write_choices("NVIDIA L40S", wrong, {})


@pytest.mark.usefixtures("no_jax_cache")
def test_a_start_goes_on_without_a_folder_for_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = jax.config.jax_compilation_cache_dir
    try:
        with caplog.at_level(logging.WARNING):
            (tmp_path / "file").touch()
            keep_choices(H200, tmp_path / "file/autotuning")
            assert "are not kept" in caplog.text
            assert jax.config.jax_compilation_cache_dir == before
            caplog.clear()
            cache = tmp_path / "autotuning"
            cache.mkdir(mode=0o700)
            (cache / TUNED).touch()
            keep_choices(H200, cache)
            assert f"choices that were measured on a {H200} are not used" in caplog.text
            assert jax.config.jax_compilation_cache_dir == str(cache)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
