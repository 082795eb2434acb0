"""Choices that a command on a GPU left, merged into the file that comes with the package."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from jaxserve.start.programs import autotuning
from jaxserve.start.programs.autotuning import TUNED, read_choices
from scripts.gpu import merge_autotuned

KIND, DEVICE = "NVIDIA H100 PCIe", "ab" * 8
ABOUT = {"device": KIND, "jax": "0.11.2", "date": "2026-11-26", "dry_run": False}


def leave(folder: Path, files: dict[str, bytes], **changes: object) -> Path:
    """Write the results of a command on a GPU: a report, and an archive of files."""
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(json.dumps({"about": ABOUT | changes, "parts": {}}))
    with tarfile.open(folder / "autotuned.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return folder


def entry(number: int, says: bytes) -> tuple[str, bytes]:
    name = f"{number:032x}"
    return f"{TUNED}/{DEVICE}/{name}.pb", b"key " + name.encode() + says


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(autotuning, "_TABLES", tmp_path / "tables")
    return tmp_path / "tables"


def test_newer_choices_replace_older_and_others_stay(tmp_path: Path) -> None:
    first = leave(tmp_path / "a", dict([entry(1, b"old"), entry(2, b"kept")]))
    assert "2 choices, 2 of them new" in merge_autotuned.merge(first)
    second = leave(tmp_path / "b", dict([entry(1, b"new"), entry(3, b"more")]))
    assert "3 choices, 2 of them new" in merge_autotuned.merge(second)
    said = {content.rpartition(b"0")[2][1:] for content in read_choices(KIND).values()}
    assert said == {b"new", b"kept", b"more"}


def test_what_is_no_choice_is_passed_over(tmp_path: Path) -> None:
    files = dict([entry(1, b"x")]) | {f"{TUNED}/../../evil.pb": b"x", f"{TUNED}/tmp": b""}
    assert "1 choices" in merge_autotuned.merge(leave(tmp_path / "a", files))


def test_folders_of_something_else_are_refused(
    tmp_path: Path, tables: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    dry = leave(tmp_path / "dry", dict([entry(1, b"x")]), dry_run=True)
    empty = leave(tmp_path / "empty", {})
    for folder, why in ((dry, "dry run"), (empty, "has no choices"), (tmp_path, "is no report")):
        monkeypatch.setattr(sys, "argv", ["merge_autotuned", str(folder)])
        with pytest.raises(SystemExit, match="2"):
            merge_autotuned.main()
        assert why in capsys.readouterr().err
    assert not tables.exists()
