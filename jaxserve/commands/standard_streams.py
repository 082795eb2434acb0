"""Standard streams of a command that may be closed, full, or without a reader."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class DroppingFile(io.FileIO):
    """A file that discards bytes if a write fails."""

    def write(self, data: Any, /) -> int:
        """Write `data` and return its size, even if the write fails or a pipe is full."""
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
        except OSError:
            return size
        return size if written is None else written


def settle_streams() -> None:
    """Open closed standard streams, and make standard error discard output that it cannot write.

    Otherwise the next opened file would get the descriptor of a closed stream, and libraries write
    to descriptor 2. Reports of progress must not end a command. Replaced streams are not changed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes this number, the lowest free one
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
    """Point standard output to the null device, so that flushing it cannot fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
