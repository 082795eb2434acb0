"""Archives from elsewhere, on every Python that is supported."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from scripts.lib.unpack import unpack


def archive_of(path: Path, members: list[tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 3 if kind == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize("is_old", [False, True])
def test_what_would_lie_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    """Python checks the paths of members since 3.11.4, and Debian 12 has 3.11.2."""
    if is_old:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    folder = tmp_path / "into"
    folder.mkdir()
    good = archive_of(tmp_path / "good.tar", [member("a", tarfile.DIRTYPE), member("a/b.txt")])
    with tarfile.open(good) as archive:
        unpack(archive, folder)
    assert (folder / "a/b.txt").read_bytes() == b"xxx"
    for bad in (member("../c.txt"), member("a/link", tarfile.SYMTYPE, "../../elsewhere")):
        path = archive_of(tmp_path / "bad.tar", [bad])
        with tarfile.open(path) as archive, pytest.raises(tarfile.TarError):
            unpack(archive, folder)
    assert not (tmp_path / "c.txt").exists() and not (folder / "a/link").exists()
