"""Standard input, output and error of a command, which may be closed, full, or without a reader."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class DroppingFile(io.FileIO):
    """A file that drops what cannot be written to it."""

    def write(self, data: Any, /) -> int:
        """Return the number of bytes, written or not; a full pipe that does not block drops too."""
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
        except OSError:
            return size
        return size if written is None else written


def settle_streams() -> None:
    """Open what is closed, and let standard error drop what nobody can read.

    A closed descriptor would be that of the next file opened, and libraries write to number 2.
    What a command says of its progress must never end it. Streams that somebody has replaced stay.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
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
    """Let standard output lead nowhere, so that what is left of it is no error at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
