"""Secrets that engines share: read from a file, or written to one for a process."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxserve.errors import InvalidRequest

# Smallest size of a secret.
SECRET_BYTES = 32
_MOST_BYTES = 1 << 16
_FIELD = "prefix_caching_secret"
# A fleet's secret is often mounted for a group: group members may read it, others may not.
_OPEN_BITS = 0o027


def read_secret(path: str | Path | None, name: str = _FIELD) -> bytes | None:
    """Return the bytes of the file of a secret that several engines share, or None without a path.

    Args:
        path: path of the file.
        name: name of the setting, for errors.

    Raises:
        InvalidRequest: the path is missing or not a file, its size is not from 32 to 65,536 bytes,
            its group may write it, or other users may access it.
    """
    if path is None:
        return None
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest(f"{name}: {path} cannot be read ({reason})", name) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise InvalidRequest(f"{name}: {path} is not a file", name)
        if mode & _OPEN_BITS:
            raise InvalidRequest(
                f"{name}: {path} is open to others (mode {stat.S_IMODE(mode):04o}); it must be "
                "the owner's alone, or its group's to read: chmod 600",
                name,
            )
        secret = os.read(descriptor, _MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if not SECRET_BYTES <= len(secret) <= _MOST_BYTES:
        size = f"{len(secret)} bytes" if len(secret) <= _MOST_BYTES else "more"
        raise InvalidRequest(
            f"{name}: {path} must hold from {SECRET_BYTES} to {_MOST_BYTES} random bytes, and "
            f"holds {size}; `openssl rand -hex 32` makes some",
            name,
        )
    return secret


@contextmanager
def secret_file(secret: bytes) -> Iterator[Path]:
    """Return a context with the path of a temporary file that contains `secret`.

    Only its owner can read the file, which is deleted at the end of the context.
    """
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:
        path = Path(folder, "secret")
        path.touch(mode=0o600)
        path.write_bytes(secret)
        yield path
