"""Standard streams of a command, which may be closed, full, or without a reader."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class DroppingFile(io.FileIO):
    """A file that drops what cannot be written to it."""

    def write(self, data: Any, /) -> int:
        """Return the number of bytes, written or not. A full non-blocking pipe drops them too."""
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
        except OSError:
            return size
        return size if written is None else written


def settle_streams() -> None:
    """Open the streams that are closed, and let standard error drop what no reader takes.

    The next file opened would get a closed stream's descriptor, and libraries write to number 2.
    A report of progress must never end a command. Streams that were replaced stay as they are.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        raw = DroppingFile(2, "w", closefd=False)
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True
        )


def drop_output() -> None:
    """Point standard output to the null device, so that flushing the rest raises nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
