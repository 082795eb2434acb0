"""Files that hold native code: written and read by one user only, and checked by a digest."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_MAGIC = b"jaxserve program 1\n"
_MOST_HEADER_BYTES = 1 << 16
# Age in seconds from which a partly written file counts as the remains of a killed process.
_ABANDONED = 3600


class PrivateFiles:
    """Reader and writer of files whose content is executed.

    A file must belong to the user, must not be a symbolic link, and must match the SHA-256 digest
    in its header. A file that fails a check is not used. Failures are logged as warnings, each text
    once, because one cause often concerns every file.

    Args:
        log: logger that receives the warnings.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def read(self, path: Path) -> bytes | None:
        """Return the content of a private file, without its header, if it passes all checks.

        The result is None if the file does not exist. If it fails a check, a warning is logged and
        the result is None too.
        """
        try:
            content = _read_own(path)
            if not content.startswith(_MAGIC):
                raise ValueError("it is no file of this kind")
            line, newline, body = content[len(_MAGIC) :].partition(b"\n")
            if not newline or len(line) > _MOST_HEADER_BYTES:
                raise ValueError("it has no header")
            header = json.loads(line)
            if not isinstance(header, dict) or header.get("sha256") != digest(body):
                raise ValueError("it is damaged or was changed")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self.warn("%s cannot be used and is made anew: %s", path, error)
            return None
        return body

    def write(self, path: Path, header: Mapping[str, Any], content: bytes) -> None:
        """Replace a file atomically by a header and the content. Log a warning if that fails.

        Args:
            path: path of the file.
            header: JSON values for the header, to which digest and size are added.
            content: bytes of the content.
        """
        line = json.dumps({**header, "sha256": digest(content), "bytes": len(content)}).encode()
        try:
            replace_file(path, _MAGIC + line + b"\n" + content)
        except OSError as error:
            self.warn("a compiled program is not kept: %s", error)

    def warn(self, text: str, *values: Any) -> None:
        """Log `text % values` as a warning, unless the same text was logged before. Thread-safe."""
        message = text % values
        with self._lock:
            if message in self._warned:
                return
            self._warned.add(message)
        self._log.warning("%s", message)


class KernelFiles:
    """Stored machine code of CPU kernels by name, so that LLVM compiles a kernel once per machine.

    The file of a program contains the code of its kernels too. Files of kernels serve programs that
    must be compiled: programs of other settings, and programs that a background process compiles
    for an engine which has compiled most of the same kernels.

    Args:
        files: reads and writes the files.
        folder: existing private folder of the kernels.
        machine: versions and processor that the code is for. Another value has other files.
    """

    def __init__(self, files: PrivateFiles, folder: Path, machine: Mapping[str, Any]) -> None:
        self._files, self._folder = files, folder
        self._machine = digest(json.dumps(machine, sort_keys=True).encode())

    def get(self, name: str) -> bytes | None:
        """Return the stored machine code of a kernel, or None. Delete a file that fails a check."""
        path = self._path(name)
        code = self._files.read(path)
        if code is None:
            with suppress(OSError):
                path.unlink()
        return code

    def keep(self, name: str, code: bytes) -> None:
        """Write the machine code of a kernel to its file, unless the file exists."""
        path = self._path(name)
        with suppress(OSError):  # writing logs the cause
            if path.exists():
                return
        self._files.write(path, {"kernel": name, "where": self._machine}, code)

    def _path(self, name: str) -> Path:
        return self._folder / file_name(f"{name} {self._machine}")


def digest(content: bytes) -> str:
    """Return the SHA-256 digest of bytes in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def file_name(name: str) -> str:
    """Return a readable file name for the name of a program or kernel, unique by a hash."""
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower())[:60]}-{digest(name.encode())[:8]}"


def make_private(directory: Path) -> None:
    """Create a folder with mode 0700, or check that an existing one is private.

    Raises:
        PermissionError: the folder belongs to another user, is open to others, is a symbolic link,
            or its parent lets everybody replace it.
        OSError: the folder cannot be created.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{directory} is not a folder")
    if status.st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to somebody else")
    if mode & 0o077:
        raise PermissionError(f"{directory} is open to others (mode {mode:04o}; it must be 0700)")
    parent_mode = directory.parent.stat().st_mode
    if parent_mode & stat.S_IWOTH and not parent_mode & stat.S_ISVTX:
        raise PermissionError(f"{directory.parent} can be written by everybody")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"{directory} cannot be written")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file of mode 0600 atomically, so that a killed process leaves no partial file.

    Raises:
        OSError: the file cannot be written.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(new, flags, 0o600), "wb") as file:
            file.write(content)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def prune(folders: Iterable[Path], most_bytes: int, small_folder: Path) -> None:
    """Delete files in `folders`, oldest use first, until all take at most `most_bytes`.

    The age of a file is its time of modification. Partial files of killed processes are deleted
    too, there and in `small_folder`. Other processes may prune at the same time.
    """
    large = [path for folder in folders for path in _files_in(folder)]
    for path in [*large, *_files_in(small_folder)]:
        with suppress(OSError):
            if path.name.startswith(".") and time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink()
    files: list[tuple[float, int, Path]] = []
    for path in large:
        with suppress(OSError):
            files.append((path.stat().st_mtime, path.stat().st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= most_bytes:
            break
        path.unlink(missing_ok=True)
        total -= size


def _files_in(directory: Path) -> list[Path]:
    with suppress(OSError):  # the folder was removed
        return [path for path in directory.iterdir() if path.is_file()]
    return []


def _read_own(path: Path) -> bytes:
    # Raises an OSError if the file is of another kind or another user's.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError("it is not a regular file")
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError("it belongs to, or can be written by, somebody else")
        return file.read()
