"""Global memory, which survives launches: arrays between red zones, and flags of each byte."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scripts.machine_code.faults import Fault
from scripts.machine_code.interpreter.ptx_types import UNSIGNED
from scripts.machine_code.interpreter.publications import WORD, LaunchHistory

Array = np.ndarray
# Addresses and sizes of pieces of memory.
Slices = Sequence[tuple[int, int]]

# Where global memory begins: an address that was cut to 32 bits cannot go unnoticed.
BASE = 0x7F3A_4000_0000
RED_ZONE = 4096
ALIGNMENT = 256
# Larger arrays are not filled with NaN, so that their unused pages take no memory.
FILLED = 1 << 26
# Bytes beyond the requested size: for red zones, and for arrays of modules.
ROOM = 1 << 26
# Linux's flag for mappings that take no memory until they are written, however large.
MAP_NORESERVE = 0x4000

# Flags of a byte: it has a value, a CTA of this launch wrote it, a CTA of this launch read it.
KNOWN, WRITTEN, READ = 1, 2, 4


class Allocation(NamedTuple):
    """Allocation by its offset in global memory."""

    offset: int
    size: int
    name: str


def untouched_zeros(size: int) -> Array:
    """Return zeros whose pages take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


class GlobalMemory:
    """Global memory of a device, at least `size` bytes of which can be allocated."""

    def __init__(self, size: int = 1 << 34) -> None:
        self.size = size = size + ROOM
        self.data = untouched_zeros(size)
        self.flags = untouched_zeros(size)
        # Which CTA a flag of this launch is due to, as the lowest bits of its number.
        self.owner = untouched_zeros(2 * size).view(np.uint16)
        self.top = RED_ZONE
        self.allocations: list[Allocation] = []
        # Arrays that modules bring along: their addresses by name and bytes.
        self.constants: dict[tuple[str, bytes], int] = {}
        self.readable = self.writable = self.padding = np.zeros((0, 2), np.int64)
        self.launch_history: LaunchHistory | None = None
        # Words of `flags` with flags of this launch, by their size.
        self.marked: list[tuple[Array, int]] = []

    def allocate(self, size: int, name: str, skew: int = 0) -> int:
        """Return the address of new bytes, a multiple of 256 and `skew` more."""
        offset = -(-self.top // ALIGNMENT) * ALIGNMENT + skew
        if offset + size + RED_ZONE > self.size:
            raise Fault(f"{name} of {size} bytes does not fit into {self.size} bytes of memory")
        self.top = offset + size + RED_ZONE
        if size < FILLED:
            # Not a number, in any type.
            self.data[offset : offset + size] = 0xFF
        self.allocations.append(Allocation(offset, size, name))
        return BASE + offset

    def write(self, address: int, values: Array) -> None:
        """Write an array's bytes from outside of any launch."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        offset = address - BASE
        self.data[offset : offset + raw.size] = raw
        self.flags[offset : offset + raw.size] |= KNOWN

    def read(self, address: int, size: int) -> Array:
        """Return a copy of bytes, whether or not they were written."""
        return self.data[address - BASE : address - BASE + size].copy()

    def is_written(self, address: int, size: int) -> bool:
        """Tell whether all of these bytes have a value."""
        flags = self.flags[address - BASE : address - BASE + size]
        return bool((flags & KNOWN).all())

    def permit(self, reads: Slices, writes: Slices, padding: Slices = ()) -> None:
        """Begin a launch that may read and write these slices, and no other byte.

        Loads from `padding` are let pass, and get ones whatever is there.
        """
        for index, width in self.marked:
            words = self.flags.view(UNSIGNED[width])
            words[index] &= repeated(KNOWN, width)
        self.marked = []
        if self.launch_history is not None:
            self.launch_history.published.clear()
        constants = [(place, len(raw)) for (_, raw), place in self.constants.items()]
        self.readable = spans([*reads, *constants])
        self.writable = spans(writes)
        self.padding = spans(padding)

    def history(self) -> LaunchHistory:
        """Return the record of this launch's stores, by words of memory."""
        if self.launch_history is None:
            words = self.size // WORD
            warps = untouched_zeros(words)
            epochs = untouched_zeros(words * 4).view(np.int32)
            self.launch_history = LaunchHistory(warps, epochs)
        return self.launch_history

    def place_constant(self, name: str, raw: Array) -> int:
        """Return the address of a module's array, which every kernel may read."""
        key = name, raw.tobytes()
        if key not in self.constants:
            self.constants[key] = self.allocate(raw.size, name)
            self.write(self.constants[key], raw)
            offset = self.constants[key] - BASE
            # It was allocated last, so the spans stay sorted.
            self.readable = np.append(self.readable, [[offset, offset + raw.size]], axis=0)
        return self.constants[key]

    def mark(self, index: Array, width: int, flags: int) -> None:
        """Set flags of words of `width` bytes until the next launch. KNOWN is kept."""
        self.flags.view(UNSIGNED[width])[index] |= repeated(flags, width)
        self.marked.append((index, width))

    def place_of(self, offset: int) -> str:
        """Return the array that an offset is in or near to, for messages."""
        for start, size, name in self.allocations:
            if start - RED_ZONE // 2 <= offset < start + size + RED_ZONE // 2:
                return f"{name}[{offset - start}] of {size} bytes"
        return "no array"


def repeated(flags: int, width: int) -> np.unsignedinteger:
    """Return a word of `width` bytes with the same flags in each."""
    return UNSIGNED[width](int.from_bytes(bytes([flags]) * width, "little"))


def spans(slices: Slices) -> Array:
    """Return the sorted [start, end] offsets of slices. Adjacent slices become one span."""
    found: list[list[int]] = []
    for start, end in sorted((address - BASE, address - BASE + size) for address, size in slices):
        if found and start <= found[-1][1]:
            found[-1][1] = max(end, found[-1][1])
        else:
            found.append([start, end])
    return np.array(found, np.int64).reshape(-1, 2)


def inside(offsets: Array, size: int, allowed: Array) -> Array:
    """Tell which accesses of `size` bytes lie in one of the allowed spans."""
    if not len(allowed):
        return np.zeros(len(offsets), bool)
    index = np.searchsorted(allowed[:, 0], offsets, "right") - 1
    return (index >= 0) & (offsets + size <= allowed[np.maximum(index, 0), 1])
