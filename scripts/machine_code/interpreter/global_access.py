"""Accesses of a launch to global memory, each checked before it is made."""

from __future__ import annotations

import numpy as np

from scripts.machine_code.global_memory import (
    BASE,
    KNOWN,
    READ,
    WRITTEN,
    GlobalMemory,
    inside,
    repeated,
)
from scripts.machine_code.interpreter.ptx_types import UNSIGNED
from scripts.machine_code.interpreter.publications import Publications
from scripts.machine_code.interpreter.threads import Array, Mask, Threads

# The owner of bytes that several CTAs have read.
SEVERAL = 0xFFFF

ATOMIC = {
    "add": lambda old, new: old + new,
    "min": min,
    "max": max,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "exch": lambda old, new: new,
}


class GlobalAccess:
    """Global memory as the threads of a launch see it.

    Args:
        must_wait: no byte may be accessed before `griddepcontrol.wait`.
        any_store_wins: threads of one instruction may store different values in one place.
        publications: order between CTAs, for a kernel whose CTAs publish their stores by atomic
            operations.
    """

    def __init__(
        self,
        threads: Threads,
        memory: GlobalMemory,
        order: np.random.Generator | None,
        must_wait: bool,
        any_store_wins: bool,
        publications: Publications | None,
    ) -> None:
        self.threads, self.memory, self.order = threads, memory, order
        self.publications = publications
        self.any_store_wins = any_store_wins
        self.waited = np.full(threads.count, not must_wait)
        self.all_waited = not must_wait

    def wait_for_launch(self, mask: Mask) -> None:
        self.waited[self.threads.lanes(mask)] = True
        self.all_waited = bool(self.waited[self.threads.exists].all())

    def reach(
        self, lanes: Array, address: Array, size: int, verb: str, writes: bool, must_be_known: bool
    ) -> Array:
        """Return the offsets of accesses, all of which are allowed.

        `must_be_known`: the bytes must have a value.
        """
        threads, memory = self.threads, self.memory
        offsets = threads.pick(address, lanes).view(np.int64) - np.int64(BASE)
        if not self.all_waited:
            early = ~self.waited[lanes]
            threads.refuse(early, lanes, f"{verb} of global memory before griddepcontrol.wait")
        misaligned = (offsets & (size - 1)) != 0
        threads.refuse(misaligned, lanes, f"{verb} of {size} bytes at a misaligned address")
        bad = ~inside(offsets, size, memory.writable if writes else memory.readable)
        if self.publications is not None and bad.any() and not writes:
            bad[bad] = ~self.has_written(offsets[bad], size)
        self.refuse_place(bad, lanes, offsets, f"{verb} not allowed")
        if must_be_known:
            width = min(size, 8)
            flags, wanted = memory.flags.view(UNSIGNED[width]), repeated(KNOWN, width)
            for part in range(size // width):
                unknown = (flags[offsets // width + part] & wanted) != wanted
                self.refuse_place(unknown, lanes, offsets, f"{verb} of what was never written")
        return offsets

    def has_written(self, offsets: Array, size: int) -> Array:
        """Tell which places this launch may write, and has written all of."""
        found = inside(offsets, size, self.memory.writable)
        for byte in range(size):
            found[found] = (self.memory.flags[offsets[found] + byte] & WRITTEN) != 0
        return found

    def refuse_place(self, bad: Array, lanes: Array, offsets: Array, what: str) -> None:
        if bad.any():
            offset = int(offsets[int(np.argmax(bad))])
            place = self.memory.place_of(offset)
            self.threads.refuse(bad, lanes, f"{what}: {place} (offset {offset})")

    def check_other_ctas(self, lanes: Array, offsets: Array, size: int, writes: bool) -> None:
        """Refuse accesses that race with accesses of another CTA, and record them.

        Two CTAs race if both access a byte and one of them writes it, unless atomic operations
        order the two accesses. Readers of bytes that the
        launch may not write are not recorded.
        """
        if not writes:
            tracked = inside(offsets, size, self.memory.writable)
            if not tracked.any():
                return
            lanes, offsets = lanes[tracked], offsets[tracked]
        mine = (self.threads.ctas[self.threads.cta[lanes]] % SEVERAL).astype(np.uint16)
        width = min(size, 4)
        for part in range(0, size, width):
            self.check_words(lanes, offsets + part, mine, width, writes)

    def check_words(
        self, lanes: Array, offsets: Array, mine: Array, width: int, writes: bool
    ) -> None:
        """Refuse accesses to words that race, and mark the words as this launch's."""
        memory, index = self.memory, offsets // width
        owners = memory.owner.view(UNSIGNED[2 * width])
        own = mine.astype(owners.dtype) * owners.dtype.type(sum(1 << 16 * b for b in range(width)))
        flags = memory.flags.view(UNSIGNED[width])[index]
        touched = (flags & repeated(WRITTEN | READ if writes else WRITTEN, width)) != 0
        if touched.any():
            # A word may be partly another CTA's, so its bytes are looked at.
            self.refuse_others(lanes[touched], offsets[touched], mine[touched], width, writes)
        if writes:
            memory.mark(index, width, WRITTEN | KNOWN)
            owners[index] = own
            if not self.any_store_wins:
                what = "two CTAs write at once"
                self.refuse_place(owners[index] != own, lanes, offsets, what)
            return
        if self.publications is not None:  # who wrote a word stays known
            self.publications.record_reads(lanes[~touched], offsets[~touched], width)
            index, own, flags = index[~touched], own[~touched], flags[~touched]
        shared = ((flags & repeated(READ, width)) != 0) & (owners[index] != own)
        memory.mark(index, width, READ)
        owners[index] = own
        shared |= owners[index] != own
        owners[index[shared]] = np.iinfo(owners.dtype).max

    def refuse_others(
        self, lanes: Array, starts: Array, mine: Array, width: int, writes: bool
    ) -> None:
        watched = WRITTEN | READ if writes else WRITTEN
        for byte in range(width):
            marked = (self.memory.flags[starts + byte] & watched) != 0
            owners = self.memory.owner[starts + byte]
            if self.publications is not None and not writes and marked.any():
                places, readers = starts[marked] + byte, lanes[marked]
                bad = self.publications.unordered(readers, places, 1, owners[marked])
                self.refuse_place(bad, readers, places, "not ordered after the store, a load of")
                continue
            if self.publications is not None and marked.any():
                others = marked & (owners != mine)
                others &= (self.memory.flags[starts + byte] & WRITTEN) == 0
                ordered = ~self.publications.unordered_stores(lanes[others], starts[others] + byte)
                marked[np.flatnonzero(others)[ordered]] = False
            self.refuse_place(marked & (owners != mine), lanes, starts + byte, "two CTAs touch")

    def load(
        self,
        mask: Mask,
        address: Array,
        width: int,
        count: int,
        used: int | None = None,
        read_only: bool = False,
    ) -> list[Array]:
        """Load `count` words of each active thread. The other threads get all ones.

        Args:
            used: bits of the bytes that the thread uses. The other bytes may belong to any CTA.
            read_only: the launch must not write these bytes.
        """
        lanes, size = self.threads.lanes(mask), width * count
        if used is not None:
            return self.load_part(mask, lanes, address, width, count, used)
        if len(self.memory.padding):
            lanes = lanes[~self.reaches_padding(lanes, address, size)]
        offsets = self.reach(lanes, address, size, "load", writes=False, must_be_known=True)
        if read_only:
            written = (self.memory.flags[offsets] & WRITTEN) != 0
            self.refuse_place(written, lanes, offsets, "ld.global.nc of what this launch wrote")
        self.check_other_ctas(lanes, offsets, size, writes=False)
        words = self.memory.data.view(UNSIGNED[width])
        loaded = [words[offsets // width + index] for index in range(count)]
        return [self.threads.spread(values, lanes) for values in loaded]

    def reaches_padding(self, lanes: Array, address: Array, size: int) -> Array:
        """Return which loads lie in padding, and outside the readable slices."""
        memory = self.memory
        offsets = self.threads.pick(address, lanes).view(np.int64) - np.int64(BASE)
        return inside(offsets, size, memory.padding) & ~inside(offsets, size, memory.readable)

    def load_part(
        self, mask: Mask, lanes: Array, address: Array, width: int, count: int, used: int
    ) -> list[Array]:
        size = width * count
        misaligned = (self.threads.pick(address, lanes) & np.uint64(size - 1)) != 0
        self.threads.refuse(misaligned, lanes, f"load of {size} bytes at a misaligned address")
        poison = np.full(self.threads.count, np.iinfo(UNSIGNED[width]).max, UNSIGNED[width])
        loaded = []
        for index in range(count):
            if used >> width * index & (1 << width) - 1:
                loaded += self.load(mask, address + np.uint64(width * index), width, 1)
            else:
                loaded.append(poison)
        return loaded

    def store(self, mask: Mask, address: Array, width: int, values: list[Array]) -> None:
        lanes, size = self.threads.lanes(mask), width * len(values)
        offsets = self.reach(lanes, address, size, "store", writes=True, must_be_known=False)
        self.check_other_ctas(lanes, offsets, size, writes=True)
        if self.publications is not None:
            self.publications.record(lanes, offsets, size)
        words = self.memory.data.view(UNSIGNED[width])
        for index, value in enumerate(values):
            stored = self.threads.pick(value, lanes)
            words[offsets // width + index] = stored
            if not self.any_store_wins:
                lost = words[offsets // width + index] != stored
                self.refuse_place(lost, lanes, offsets, "threads store different values to")

    def atomic(
        self,
        mask: Mask,
        address: Array,
        operation: str,
        kind: type,
        values: list[Array],
        order: str = "",
    ) -> list[Array]:
        """Apply an atomic operation. `order` is its effect on the order of other accesses."""
        lanes = self.threads.lanes(mask)
        width = np.dtype(kind).itemsize
        offsets = self.reach(lanes, address, width, "atomic", writes=True, must_be_known=True)
        sequence = turns_of(len(lanes), self.order)
        if self.publications is not None:
            releases, acquires = (order in (kind, "acq_rel") for kind in ("release", "acquire"))
            for turn in sequence:
                lane, offset = int(lanes[turn]), int(offsets[turn])
                self.publications.synchronize(lane, offset, releases, acquires)
        words = self.memory.data.view(kind)
        return apply_atomics(self.threads, sequence, words, lanes, offsets, operation, values)


def turns_of(count: int, order: np.random.Generator | None) -> list[int]:
    """Return the order in which threads of an instruction take their turns."""
    return (np.arange(count) if order is None else order.permutation(count)).tolist()


def apply_atomics(
    threads: Threads,
    sequence: list[int],
    words: Array,
    lanes: Array,
    offsets: Array,
    operation: str,
    values: list[Array],
) -> list[Array]:
    """Apply atomic operations thread by thread. Return the words before each, as bits."""
    width = words.dtype.itemsize
    operands = [threads.pick(value, lanes) for value in values]
    old = np.zeros(len(lanes), words.dtype)
    for turn in sequence:
        index = offsets[turn] // width
        old[turn] = words[index]
        if operation == "cas":
            if words[index] == operands[0][turn]:
                words[index] = operands[1][turn]
        else:
            words[index] = ATOMIC[operation](words[index], operands[0][turn])
    return [threads.spread(old.view(UNSIGNED[width]), lanes)]
