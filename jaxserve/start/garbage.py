"""A pause of Python's garbage collection, and the return of unused memory to the system."""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from mmap import PAGESIZE
from pathlib import Path

_MADV_DONTNEED = 4
_LEAST_BYTES = 1 << 20
_MAPS = Path("/proc/self/maps")
_SEGMENT = struct.Struct("<IIQQQQQQ")  # of a 64-bit ELF file's program header
_PT_LOAD, _PF_W = 1, 2


@contextmanager
def collection_paused() -> Generator[None]:
    """Return a context in which Python's cyclic garbage collector is disabled.

    Imported modules and large vocabularies stay allocated, and JAX's traces do so until their
    program is compiled. Repeated collections over these objects take about a tenth of a start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def return_memory() -> None:
    """Return the process's free heap memory and the resident pages of its libraries to Linux.

    The code of XLA and LLVM is 170 MB of a process, and runs only while programs are compiled or
    loaded. The system maps a returned page again from its file cache when it is used. On other
    systems than Linux the function has no effect.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    for first, size in _unchanged_mappings():
        library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_DONTNEED)
    with suppress(AttributeError):  # another C library than GNU's
        library.malloc_trim(0)


def _unchanged_mappings() -> list[tuple[int, int]]:
    """Return address and size of each read-only mapping of a library file of at least 1 MiB.

    Only mappings whose pages are identical to the library's file are returned.
    """
    mappings: list[tuple[int, int]] = []
    offsets: dict[str, set[int]] = {}
    with suppress(OSError):
        for line in _MAPS.read_text().splitlines():
            addresses, access, offset, _, _, *path = line.split(maxsplit=5)
            first, end = (int(address, 16) for address in addresses.split("-"))
            if access not in ("r-xp", "r--p") or not path or end - first < _LEAST_BYTES:
                continue
            if path[0] not in offsets:
                offsets[path[0]] = _unchanged_offsets(path[0])
            if int(offset, 16) in offsets[path[0]]:
                mappings.append((first, end - first))
    return mappings


def _unchanged_offsets(path: str) -> set[int]:
    # In whole pages. The loader writes relocated addresses into writable segments and may protect
    # them afterwards, so that their pages differ from the file. Two segments may begin in one
    # page.
    unchanged: set[int] = set()
    written: set[int] = set()
    with suppress(OSError, struct.error):
        for flags, offset in _segments(Path(path)):
            (written if flags & _PF_W else unchanged).add(offset - offset % PAGESIZE)
    return unchanged - written


def _segments(path: Path) -> Iterator[tuple[int, int]]:
    """Yield flags and file offset of each loaded segment of an ELF file.

    Nothing is yielded unless the file is a 64-bit, little-endian ELF file.
    """
    with path.open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01":
            return
        (start,) = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        file.seek(start)
        table = file.read(size * count)
    for index in range(count):
        kind, flags, offset, *_ = _SEGMENT.unpack_from(table, index * size)
        if kind == _PT_LOAD:
            yield flags, offset
