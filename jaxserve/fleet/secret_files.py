"""Files of secrets that reach a process over Ray, for settings that name a file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def secret_file(secret: bytes) -> Iterator[Path]:
    """Yield a file that holds a secret, its owner's alone, while the context lasts."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:
        path = Path(folder, "secret")
        path.touch(mode=0o600)
        path.write_bytes(secret)
        yield path
