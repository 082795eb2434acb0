"""Shared memory of all CTAs, with a shadow that finds races between warps.

A cell of the shadow covers as many bytes as the kernel's smallest access. It records the last
warp that wrote it and when, the last read of each warp, and asynchronous reads and writes.
"""

from __future__ import annotations

import numpy as np

from scripts.machine_code.interpreter.clocks import Clocks
from scripts.machine_code.interpreter.global_access import apply_atomics, turns_of
from scripts.machine_code.interpreter.lane_shadow import LaneShadow
from scripts.machine_code.interpreter.ptx_types import UNSIGNED
from scripts.machine_code.interpreter.threads import WARP, Array, Mask, Threads
from scripts.machine_code.ptx import SHARED_BASE

# Swizzled layouts repeat with this many bytes, so each CTA's part begins at a multiple of it.
PATTERN = 1024


class SharedMemory:
    """Shared memory, one CTA's part after another's, `size` bytes of each used.

    `grain` is the size of a cell: every access is a multiple of it.
    """

    def __init__(
        self,
        threads: Threads,
        clocks: Clocks,
        size: int,
        grain: int,
        order: np.random.Generator | None,
        checks_races: bool,
    ) -> None:
        self.threads, self.clocks, self.size, self.grain = threads, clocks, size, grain
        self.order, self.checks_races = order, checks_races
        # Distance from one CTA's part to the next. The bytes in between belong to no CTA.
        self.stride = -(-(size + SHARED_BASE) // PATTERN) * PATTERN + PATTERN
        self.data = np.full(len(threads.ctas) * self.stride, 0xFF, np.uint8)
        cells = len(self.data) // grain
        self.known = np.zeros(cells, bool)
        self.writer, self.written = np.zeros(cells, np.int16), np.zeros(cells, np.int32)
        self.read = np.zeros((cells, threads.warps_per_cta), np.int32)
        self.by_lane = LaneShadow(threads, clocks, self.writer, self.written, self.read)
        # How many asynchronous copies will write a cell, and how many operations are reading it.
        self.incoming, self.outgoing = np.zeros(cells, np.int16), np.zeros(cells, np.int16)
        # Written by ordinary stores, and no fence since then for the asynchronous proxy.
        self.unfenced = np.zeros(cells, bool)

    def offsets(self, lanes: Array, address: Array, size: int) -> Array:
        """Return indices into `data` of accesses that lie in their CTA's part and are aligned."""
        own = self.threads.pick(address, lanes).astype(np.int64)
        outside = (own < SHARED_BASE) | (own + size > SHARED_BASE + self.size)
        if outside.any():
            place = int(own[int(np.argmax(outside))]) - SHARED_BASE
            what = f"shared memory outside its {self.size} bytes: {place}"
            self.threads.refuse(outside, lanes, what)
        misaligned = (own & (size - 1)) != 0
        what = f"a misaligned access of {size} bytes of shared memory"
        self.threads.refuse(misaligned, lanes, what)
        return own + self.threads.cta[lanes] * self.stride

    def cells(self, offsets: Array, size: int) -> Array:
        """Return the cells of accesses, [access, cell]."""
        return (offsets // self.grain)[:, None] + np.arange(max(1, size // self.grain))

    def check_read(
        self, lanes: Array, cells: Array, asynchronous: bool = False, by_warp: bool = False
    ) -> None:
        """Refuse reads of bytes that have not arrived, and reads that race with a write.

        Args:
            asynchronous: the asynchronous proxy reads, which sees stores only after a fence.
            by_warp: each lane gets bytes at the addresses of other lanes.
        """
        if not self.checks_races:
            return
        threads = self.threads
        coming = (self.incoming[cells] > 0).any(1)
        threads.refuse(coming, lanes, "a read of shared memory while a copy writes it")
        threads.refuse(~self.known[cells].all(1), lanes, "a read of shared memory never written")
        ctas, warps = threads.cta[lanes, None], threads.warp[lanes, None]
        seen = self.clocks.seen(ctas, warps, self.writer[cells])
        what = "race: a read of shared memory that another warp wrote, no barrier between"
        threads.refuse((seen < self.written[cells]).any(1), lanes, what)
        what = "race: a read of shared memory that another lane wrote, no bar.warp.sync between"
        threads.refuse(self.by_lane.written_by_others(lanes, cells, by_warp), lanes, what)
        if asynchronous:
            self.check_fenced(lanes, cells)

    def check_fenced(self, lanes: Array, cells: Array) -> None:
        what = "an asynchronous read of shared memory written without fence.proxy.async"
        self.threads.refuse(self.unfenced[cells].any(1), lanes, what)

    def note_read(self, lanes: Array, cells: Array, by_warp: bool = False) -> None:
        if self.checks_races:
            self.by_lane.note_read(lanes, cells, by_warp)
            ctas, warps = self.threads.cta[lanes], self.threads.warp[lanes]
            self.read[cells, warps[:, None]] = self.clocks.now(ctas, warps)[:, None]

    def check_write(
        self,
        lanes: Array,
        cells: Array,
        changes: Array | None = None,
        by_warp: bool = False,
    ) -> None:
        """Refuse writes that race.

        A write of the value that a byte already has is allowed: its `changes` is False. `by_warp`:
        the written bytes come from all lanes.
        """
        if not self.checks_races:
            return
        threads = self.threads
        ctas, warps = threads.cta[lanes], threads.warp[lanes]
        seen = self.clocks.seen(ctas[:, None], warps[:, None], self.writer[cells])
        unordered = (seen < self.written[cells]).any(1)
        overwritten = self.by_lane.written_by_others(lanes, cells, by_warp)
        if changes is not None:
            unordered, overwritten = unordered & changes, overwritten & changes
        unread = self.clocks.time[ctas, warps][:, None] < self.read[cells]
        for what, bad in (
            ("a copy writes it", (self.incoming[cells] > 0).any(1)),
            ("an asynchronous operation reads it", (self.outgoing[cells] > 0).any(1)),
            ("another warp wrote it, no barrier between", unordered),
            ("another warp reads it, no barrier between", unread.any((1, 2))),
            ("another lane wrote it, no bar.warp.sync between", overwritten),
            (
                "another lane reads it, no bar.warp.sync between",
                self.by_lane.read_by_others(lanes, cells, by_warp),
            ),
        ):
            threads.refuse(bad, lanes, f"race: a write of shared memory while {what}")

    def note_write(self, lanes: Array, cells: Array, by_warp: bool = False) -> None:
        self.by_lane.note_write(lanes, cells, by_warp)
        ctas, warps = self.threads.cta[lanes], self.threads.warp[lanes]
        self.known[cells] = self.unfenced[cells] = True
        self.writer[cells] = warps[:, None]
        self.written[cells] = self.clocks.now(ctas, warps)[:, None]

    @staticmethod
    def count(counters: Array, cells: Array, change: int) -> None:
        """Add to the counters of cells, of which some may be named more than once."""
        # numpy is fast with a flat index and a number of the same type.
        np.add.at(counters, cells.reshape(-1), counters.dtype.type(change))

    def read_rows(self, lanes: Array, address: Array, size: int) -> Array:
        """Return uint8[lane, size] of checked reads, which go to all lanes of a warp."""
        offsets = self.offsets(lanes, address, size)
        cells = self.cells(offsets, size)
        self.check_read(lanes, cells, by_warp=True)
        self.note_read(lanes, cells, by_warp=True)
        return self.data[offsets[:, None] + np.arange(size)]

    def write_bytes(self, lanes: Array, address: Array, raw: Array, by_warp: bool = False) -> None:
        """Write uint8[lane, size], checked. `by_warp`: each row comes from all lanes."""
        size = raw.shape[1]
        offsets = self.offsets(lanes, address, size)
        cells, places = self.cells(offsets, size), offsets[:, None] + np.arange(size)
        self.check_write(lanes, cells, (self.data[places] != raw).any(1), by_warp)
        self.data[places] = raw
        lost = (self.data[places] != raw).any(1)
        what = "threads store different values to one place of shared memory"
        self.threads.refuse(lost, lanes, what)
        self.note_write(lanes, cells, by_warp)

    def load(self, mask: Mask, address: Array, width: int, count: int) -> list[Array]:
        lanes, size = self.threads.lanes(mask), width * count
        offsets = self.offsets(lanes, address, size)
        cells = self.cells(offsets, size)
        self.check_read(lanes, cells)
        self.note_read(lanes, cells)
        words = self.data.view(UNSIGNED[width])
        loaded = [words[offsets // width + index] for index in range(count)]
        return [self.threads.spread(values, lanes) for values in loaded]

    def store(self, mask: Mask, address: Array, width: int, values: list[Array]) -> None:
        lanes = self.threads.lanes(mask)
        if len(lanes):
            words = np.stack([self.threads.pick(value, lanes) for value in values], 1)
            raw = np.ascontiguousarray(words).view(np.uint8).reshape(len(lanes), -1)
            self.write_bytes(lanes, address, raw)

    def atomic(
        self, mask: Mask, address: Array, operation: str, kind: type, values: list[Array]
    ) -> list[Array]:
        """Apply atomic operations. The bytes must have a value and no other access in progress."""
        lanes = self.threads.lanes(mask)
        width = np.dtype(kind).itemsize
        offsets = self.offsets(lanes, address, width)
        cells = self.cells(offsets, width)
        if self.checks_races:
            unknown = ~self.known[cells].all(1)
            self.threads.refuse(unknown, lanes, "an atomic on shared memory never written")
            ctas, warps = self.threads.cta[lanes, None], self.threads.warp[lanes, None]
            unseen = self.clocks.seen(ctas, warps, self.writer[cells]) < self.written[cells]
            what = "race: an atomic on what another warp wrote, no barrier between"
            self.threads.refuse(unseen.any(1), lanes, what)
            busy = ((self.incoming[cells] > 0) | (self.outgoing[cells] > 0)).any(1)
            self.threads.refuse(busy, lanes, "race: an atomic while a copy is at its place")
        sequence, words = turns_of(len(lanes), self.order), self.data.view(kind)
        return apply_atomics(self.threads, sequence, words, lanes, offsets, operation, values)

    def fence(self, mask: Mask) -> None:
        """Make stores that active warps wrote or saw visible to the asynchronous proxy."""
        if mask is None:
            self.unfenced[:] = False
            return
        warps = np.flatnonzero(mask.reshape(-1, WARP).any(1))
        per_cta, cells = self.threads.warps_per_cta, self.stride // self.grain
        for cta in np.unique(warps // per_cta).tolist():
            part = slice(cta * cells, (cta + 1) * cells)
            own = warps[warps // per_cta == cta] % per_cta
            seen = self.clocks.time[cta][own][:, self.writer[part]] >= self.written[part]
            self.unfenced[part] &= ~seen.any(0)
