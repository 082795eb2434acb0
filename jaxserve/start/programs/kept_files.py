# pyright: reportUnknownMemberType=false
"""Files that hold native code: only the user's own are read, and only as they were written."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

_MAGIC = b"jaxserve program 1\n"
_MOST_HEADER_BYTES = 1 << 16


class KeptFiles:
    """Reader and writer of files whose content is run as it is.

    A file is the user's own and no link, and holds its digest in a header: one that is not what was
    written is not read. What cannot be read or written is a warning, each only once: one cause
    often concerns every file.

    Args:
        log: for warnings.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def read(self, path: Path) -> bytes | None:
        """Return a file's content, or None, with a warning unless it is simply not there."""
        try:
            content = _read_own(path)
            if not content.startswith(_MAGIC):
                raise ValueError("it is no file of this kind")
            line, found, body = content[len(_MAGIC) :].partition(b"\n")
            if not found or len(line) > _MOST_HEADER_BYTES:
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

    def write(self, path: Path, header: dict[str, Any], content: bytes) -> None:
        """Replace a file as a whole; a full disk or a read-only one is a warning."""
        line = json.dumps(header | {"sha256": digest(content), "bytes": len(content)}).encode()
        new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(new, flags, 0o600), "wb") as file:
                file.write(_MAGIC + line + b"\n" + content)
            os.replace(new, path)
        except OSError as error:
            self.warn("a compiled program is not kept: %s", error)
            new.unlink(missing_ok=True)

    def warn(self, text: str, *values: Any) -> None:
        """Log a warning, unless it was logged before. Thread-safe."""
        message = text % values
        with self._lock:
            if message in self._warned:
                return
            self._warned.add(message)
        self._log.warning("%s", message)


def digest(content: bytes) -> str:
    """Return SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def file_name(name: str) -> str:
    """Return a file name for a program or a kernel: readable, and unique."""
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower())[:60]}-{digest(name.encode())[:8]}"


def make_private(directory: Path) -> None:
    """Make a folder that only its user may enter, or check that one is.

    Raises:
        PermissionError: it belongs to somebody else, is open to others, is a link, or lies where
            everybody can put another one in its place.
        OSError: it cannot be made.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{directory} is not a folder")
    if found.st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to somebody else")
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(f"{directory} is open to others (mode {mode:04o}; it must be 0700)")
    around = directory.parent.stat().st_mode
    if around & stat.S_IWOTH and not around & stat.S_ISVTX:
        raise PermissionError(f"{directory.parent} can be written by everybody")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"{directory} cannot be written")


def _read_own(path: Path) -> bytes:
    """Read a regular file that the user owns.

    Raises:
        OSError: it is not that, or cannot be read.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError("it is not a regular file")
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError("it belongs to, or can be written by, somebody else")
        return file.read()
