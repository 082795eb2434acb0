"""Programs that JAX compiled in earlier runs of the tests, for the next one.

JAX writes its cache in place, and a process that a test kills leaves half a file. So a run works on
a folder of its own, in which the kept files are links, and what it adds is kept if it is whole.
JAX's keys hold its version and flags, but not the processor that the code is for: the folder does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from pathlib import Path

MOST_BYTES = 4 * 2**30


def kept_folder() -> Path:
    """Return the folder of this processor's programs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    digest = hashlib.sha256(features.encode()).hexdigest()[:8]
    return Path.home() / ".cache/jaxserve-tests/compiled" / digest


def borrow_programs(folder: Path, kept: Path) -> None:
    """Link what was kept into a new folder; where it has grown too large, forget it."""
    folder.mkdir()
    kept.mkdir(parents=True, exist_ok=True)
    if sum(path.stat().st_size for path in kept.iterdir()) > MOST_BYTES:
        shutil.rmtree(kept)
        kept.mkdir()
    for path in kept.iterdir():
        try:
            os.link(path, folder / path.name)
        except OSError:  # another file system, or another run has just forgotten it
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


def keep_programs(folder: Path, kept: Path) -> None:
    """Move the whole files that are new in a run's folder to those kept."""
    for path in folder.glob("*-cache"):
        if (kept / path.name).exists():
            continue
        try:
            zlib.decompress(path.read_bytes())
        except zlib.error:  # half a file, or compressed by a library that Python lacks
            continue
        part = kept / f"{path.name}.{os.getpid()}"
        shutil.copyfile(path, part)
        part.replace(kept / path.name)
