"""`cp.async`: copies from global to shared memory that arrive when a thread waits for them.

Until then their target holds ones, so that a premature read is noticed even without the shadow of
shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scripts.machine_code.interpreter.global_access import GlobalAccess
from scripts.machine_code.interpreter.shared_memory import SharedMemory
from scripts.machine_code.interpreter.threads import Array, Mask, Threads


@dataclass
class Copy:
    """Copies of one instruction: for each lane, offsets in shared memory, bytes and group."""

    lanes: Array
    offsets: Array
    raw: Array
    group: Array

    def part(self, chosen: Array) -> Copy:
        fields = (self.lanes, self.offsets, self.raw, self.group)
        return Copy(*(values[chosen] for values in fields))


class AsynchronousCopies:
    """Copies that threads have begun. Each thread counts its groups."""

    def __init__(self, threads: Threads, global_access: GlobalAccess, shared: SharedMemory) -> None:
        self.threads, self.global_access, self.shared = threads, global_access, shared
        self.pending: list[Copy] = []
        # How many groups each thread has committed.
        self.groups = np.zeros(threads.count, np.int32)

    def copy(self, mask: Mask, target: Array, source: Array, size: int, given: Array) -> None:
        """Begin copies of `size` bytes, of which `given` are read and the others are zero."""
        lanes = self.threads.lanes(mask)
        if not len(lanes):
            return
        offsets = self.shared.offsets(lanes, target, size)
        given = self.threads.pick(given, lanes)
        self.threads.refuse(given > size, lanes, f"cp.async of {size} bytes from more")
        raw = np.zeros((len(lanes), size), np.uint8)
        for count in np.unique(given[given > 0]).tolist():
            chosen = given == count
            raw[chosen, :count] = self.read(lanes[chosen], source, size, count)
        cells = self.shared.cells(offsets, size)
        self.shared.check_write(lanes, cells)
        self.shared.data[offsets[:, None] + np.arange(size)] = 0xFF
        self.shared.count(self.shared.incoming, cells, 1)
        self.pending.append(Copy(lanes, offsets, raw, self.groups[lanes]))

    def read(self, lanes: Array, source: Array, size: int, count: int) -> Array:
        """Return uint8[lane, count] of global memory, each access aligned to its whole size."""
        threads, access = self.threads, self.global_access
        misaligned = (threads.pick(source, lanes) & np.uint64(size - 1)) != 0
        threads.refuse(misaligned, lanes, f"cp.async of {size} bytes at a misaligned address")
        columns = []
        width = count & -count
        for start in range(0, count, width):
            address = source + np.uint64(start)
            offsets = access.reach(
                lanes, address, width, "cp.async", writes=False, must_be_known=True
            )
            access.check_other_ctas(lanes, offsets, width, writes=False)
            columns.append(access.memory.data[offsets[:, None] + np.arange(width)])
        return np.concatenate(columns, 1)

    def commit(self, mask: Mask) -> None:
        """End a group: the copies that each active thread has begun since its last group."""
        self.groups = self.groups + (1 if mask is None else mask.astype(np.int32))

    def wait(self, mask: Mask, allowed: int) -> None:
        """Deliver all groups of active threads but the last `allowed`."""
        self.deliver(mask, self.groups - allowed)

    def wait_for_all(self, mask: Mask) -> None:
        """Deliver all copies of active threads, including copies outside of any group."""
        self.deliver(mask, self.groups + 1)

    def deliver(self, mask: Mask, before: Array) -> None:
        left = []
        for copy in self.pending:
            due = copy.group < before[copy.lanes]
            if mask is not None:
                due &= mask[copy.lanes]
            if due.any():
                self.arrive(copy.part(due))
            if not due.all():
                left.append(copy.part(~due))
        self.pending = left

    def arrive(self, copy: Copy) -> None:
        size = copy.raw.shape[1]
        cells = self.shared.cells(copy.offsets, size)
        self.shared.count(self.shared.incoming, cells, -1)
        self.shared.data[copy.offsets[:, None] + np.arange(size)] = copy.raw
        self.shared.note_write(copy.lanes, cells)
