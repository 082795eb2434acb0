"""Wheels that a test makes, and a pip that has no others."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest


def make_wheel(folder: Path, name: str, version: str, member: str, data: bytes) -> None:
    """Write a wheel with one file, as pip wants it."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/{member}", data)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def only_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip take packages from this folder and from nowhere else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
