"""KeptKernels: the machine code of kernels for CPU, in files, for programs that are traced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxserve.start.programs.kept_files import KeptFiles, digest, file_name


class KeptKernels:
    """Kernels by name, so that LLVM compiles each once for all engines of a machine.

    A kept program brings its kernels along. These files serve programs that no file has: those of
    other settings, and those that a process compiles beside an engine, which has compiled most of
    their kernels itself.

    Args:
        files: reads and writes.
        folder: of the kernels; there already, and private.
        where: what machine code was compiled on and from; code with another is another file.
    """

    def __init__(self, files: KeptFiles, folder: Path, where: Mapping[str, Any]) -> None:
        self._files, self._folder = files, folder
        self._where = digest(json.dumps(where, sort_keys=True).encode())

    def get(self, name: str) -> bytes | None:
        """Return the machine code of a kernel, if a file has it; remove a file that is no good."""
        path = self._path(name)
        code = self._files.read(path)
        if code is None:
            with suppress(OSError):
                path.unlink()
        return code

    def keep(self, name: str, code: bytes) -> None:
        """Write the machine code of a kernel, unless a file has it."""
        path = self._path(name)
        with suppress(OSError):  # of which writing warns
            if path.exists():
                return
        self._files.write(path, {"kernel": name, "where": self._where}, code)

    def _path(self, name: str) -> Path:
        return self._folder / file_name(f"{name} {self._where}")
