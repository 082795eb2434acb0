"""Processes of this machine: descendants, CPU time and memory (Linux only)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.lib.paths import IN_CHECKOUT

TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def tree(root: int) -> list[int]:
    """List a process and its descendants."""
    found = [root]
    for pid in found:
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:  # it has ended
            continue
    return found


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_seconds(pid: int, with_ended: bool = False) -> float:
    """Return the CPU time of a process so far, `with_ended` also that of its ended children.

    Raises:
        OSError: there is no such process.
    """
    return sum(map(int, _stat(pid)[11 : 15 if with_ended else 13])) / TICKS


def memory_bytes(pids: Iterable[int]) -> int:
    """Sum the resident bytes of living processes. A shared page counts once for each process."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(_stat(pid)[21]) * PAGE
    return total


def peak_bytes(pid: int | str = "self") -> int:
    """Return the largest resident memory that a process has had, or 0 if it has ended."""
    peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(peak[1]) * 1024 if peak else 0


def words_of(pid: int) -> str:
    """Return the command line of a process, which is empty once it has ended.

    Raises:
        OSError: there is no such process.
    """
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


def run_apart(module: str, *words: str, variables: Mapping[str, str] | None = None) -> Any:
    """Run `python -m MODULE WORDS` to its end. Return the JSON in the last line of its output.

    Args:
        variables: of its environment, besides those of this process.

    Raises:
        SystemExit: it failed. Its messages went to standard error.
    """
    ended = subprocess.run(
        [sys.executable, "-m", module, *words],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | IN_CHECKOUT | dict(variables or {}),
    )
    if ended.returncode:
        raise SystemExit(f"{module} ended with {ended.returncode}; what it said is above")
    return json.loads(ended.stdout.splitlines()[-1])
