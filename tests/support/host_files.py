"""Files by which a host says how much memory it has, and control groups how much of it is allowed.

The texts are copied from a kernel, and a test chooses their numbers.
"""

from __future__ import annotations

from pathlib import Path

MIB = 2**20
UNLIMITED_V1 = 9223372036854771712  # of version 1, without a limit
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"


def write_host(root: Path, total: int, available: int, group: str = "", mounts: str = "") -> Path:
    """Write /proc of a host with `total` bytes of memory, and return its root.

    Args:
        root: an empty folder.
        total, available: bytes.
        group: text of /proc/self/cgroup.
        mounts: text of /proc/self/mountinfo.
    """
    (root / "proc/self").mkdir(parents=True)
    lines = f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB\n"
    (root / "proc/meminfo").write_text(lines)
    (root / "proc/self/cgroup").write_text(group)
    (root / "proc/self/mountinfo").write_text(mounts)
    return root


def write_v2(folder: Path, limit: int | str, used: int, files: int = 0, high: str = "max") -> None:
    """Write the files of a group of version 2.

    Args:
        folder: of the group.
        limit, used, files: bytes: allowed, in use, and of these pages of files.
        high: text of memory.high.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = f"anon {used - files}\nfile {files}\ninactive_file {files // 2}\n"
    (folder / "memory.stat").write_text(f"{stat}active_file {files - files // 2}\n")


def write_v1(folder: Path, limit: int, used: int, files: int = 0) -> None:
    """Write the files of a group of version 1. See `write_v2`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    stat = f"active_file 0\ninactive_file 0\ntotal_inactive_file {files // 2}\n"
    (folder / "memory.stat").write_text(f"{stat}total_active_file {files - files // 2}\n")


def limited_host(root: Path, limit: int, used: int = 0) -> Path:
    """Write a large host whose control group of version 2 allows `limit` bytes.

    Returns its root.
    """
    write_host(root, 1 << 38, 1 << 37, "0::/pod/box\n", V2_MOUNT)
    write_v2(root / "sys/fs/cgroup/pod/box", limit, used)
    return root
