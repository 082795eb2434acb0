"""The machine's memory, and settings of XLA and of the allocator that it needs."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the total and the available bytes of host memory for this process, zeros if unknown.

    The numbers are those of the machine, reduced by the limits of the process's control groups.

    Args:
        root: root of the file system with /proc and the mounts of control groups.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes = {name: text.split() for name, _, text in (line.partition(":") for line in lines)}
        total, available = (int(sizes[name][0]) << 10 for name in ("MemTotal", "MemAvailable"))
    except (OSError, LookupError, ValueError):
        return 0, 0
    for limit, free in _group_limits(root):
        total, available = min(total, limit), min(available, free)
    return total, max(0, available)


@dataclass(frozen=True)
class _GroupFiles:
    """Names of the files and counters of a control group's memory, in one version of the interface.

    Counters in `droppable` count as free: cached files, which the kernel drops before a group runs
    out of memory.
    """

    limits: tuple[str, ...]
    used: str
    droppable: tuple[str, ...]


_VERSION_1 = _GroupFiles(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
# Above memory.high a group is not killed, but slowed down until it makes no progress.
_VERSION_2 = _GroupFiles(
    ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")
)


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, free) bytes of each control group of this process that has a memory limit."""
    for mount, group, files in _memory_groups(root):
        levels = [group, *group.parents]
        for folder in levels[: levels.index(mount) + 1]:
            with suppress(OSError, LookupError, ValueError):
                texts = [(folder / name).read_text().strip() for name in files.limits]
                limits = [int(text) for text in texts if text != "max"]
                if not limits:
                    continue
                lines = (folder / "memory.stat").read_text().splitlines()
                pages = dict(line.split() for line in lines)
                used = int((folder / files.used).read_text())
                used -= sum(int(pages[name]) for name in files.droppable)
                yield min(limits), min(limits) - used


def _memory_groups(root: Path) -> Iterator[tuple[Path, Path, _GroupFiles]]:
    """Yield (mount, group, files) for each mounted control group hierarchy with memory limits.

    `mount` is the folder of the mount, `group` the folder of this process's group in it, and
    `files` has the names of its files.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    groups: dict[str, str] = {}  # by controller, "" in version 2
    for line in lines:
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    for line in mounts:
        place, _, kind = line.partition(" - ")
        top, folder = place.split()[3:5]
        system, _, options = kind.split()[:3]
        if system == "cgroup2":
            group, files = groups.get(""), _VERSION_2
        elif system == "cgroup" and "memory" in options.split(","):
            group, files = groups.get("memory"), _VERSION_1
        else:
            continue
        mount = root / folder.lstrip("/")
        if group is not None:
            yield mount, mount / _below(group, top), files


def _below(group: str, top: str) -> str:
    # In a container the mount often is the group itself, under any name outside.
    top = top.rstrip("/")
    if ".." in group.split("/") or (group != top and not group.startswith(top + "/")):
        return ""
    return group[len(top) :].strip("/")


def gpu_flags(jaxlib: str = "") -> tuple[str, ...]:
    """Return the XLA flags that jaxserve sets for a GPU, if a version of jaxlib supports them.

    Loops become nodes of CUDA graphs, so that a launch of several steps is one graph. A kernel does
    not start before the results of the previous one are written, because ptxas may move a read-only
    load ahead of its wait (`python -m scripts.gpu.compile_offline --order`).

    Args:
        jaxlib: the version of jaxlib, "" for the installed one.
    """
    loops = "--xla_gpu_enable_command_buffer=+WHILE"
    numbers = re.findall(r"\d+", jaxlib or metadata.version("jaxlib"))
    knows = tuple(map(int, numbers[:3])) >= (0, 11, 2)
    return (loops, "--xla_gpu_enable_pdl_launch=false") if knows else (loops,)


def with_gpu_flags(flags: str, jaxlib: str = "") -> str:
    """Return the user's XLA_FLAGS with the flags of `gpu_flags` that the user has not set.

    Args:
        flags: the user's value of XLA_FLAGS.
        jaxlib: the version of jaxlib, "" for the installed one.
    """
    named = {flag.partition("=")[0] for flag in flags.split()}
    added = [flag for flag in gpu_flags(jaxlib) if flag.partition("=")[0] not in named]
    return " ".join([*flags.split(), *added])


def allocate_from_heap() -> None:
    """Configure glibc's allocator to keep large freed buffers in the process.

    By default each temporary over 32 MB is mapped and unmapped anew, and its page faults cost more
    than the work (measured: attention over gathered pages 100 ms, then 31 ms). Without glibc the
    function has no effect.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8
    # With one arena, compiling threads wait for each other: a cold start takes a third longer.
    mallopt(arena_max, 4)
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 << 20)
