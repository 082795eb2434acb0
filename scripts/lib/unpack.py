"""Unpacking of archives that come from elsewhere."""

from __future__ import annotations

import tarfile
from pathlib import Path


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack files and folders, all of them below a folder.

    Raises:
        tarfile.TarError: the archive has a member that would lie elsewhere.
    """
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
        return
    # Python before 3.11.4, Debian 12's for one, does not look where members would lie.
    root = folder.resolve()
    members = archive.getmembers()
    for member in members:
        is_inside = (root / member.name).resolve().is_relative_to(root)
        if not is_inside or not (member.isreg() or member.isdir()):
            raise tarfile.ExtractError(f"{member.name} is no file or folder below {folder}")
    archive.extractall(root, members)
