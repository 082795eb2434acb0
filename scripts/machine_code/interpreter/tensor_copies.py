"""Bulk copies: boxes of tensors between global and shared memory, moved by hardware of its own.

A copy into shared memory arrives as late as it can: when no thread can go on without it. One out
of shared memory is made when it is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scripts.machine_code.global_memory import BASE, KNOWN, inside
from scripts.machine_code.interpreter.clocks import Clocks
from scripts.machine_code.interpreter.global_access import GlobalAccess
from scripts.machine_code.interpreter.mbarriers import MBARRIER_BYTES, Mbarriers
from scripts.machine_code.interpreter.shared_memory import SharedMemory
from scripts.machine_code.interpreter.threads import Array, Mask, Threads
from scripts.machine_code.ptx import PARAMETER_BASE, SHARED_BASE

# Swizzling moves pieces of this many bytes.
PIECE = 16
MAP_BYTES = 128
SHARED_ALIGNMENT = 128


@dataclass(frozen=True)
class TensorMap:
    """Tensor map of a launch: a tensor, and the box that an instruction copies.

    Dimensions go from the outermost to the innermost. Sizes, strides and window count elements.
    `swizzle` is the bytes of a swizzled row, 0 for none.
    """

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    window: tuple[int, ...]
    itemsize: int
    swizzle: int = 0


@dataclass
class Load:
    """A copy into shared memory that is in progress."""

    lane: int
    # Places in shared memory, [element], and their bytes, [element, itemsize].
    places: Array
    raw: Array
    mbarrier: int
    clock: Array


@dataclass
class Store:
    """A copy out of shared memory that is in progress. Offsets outside the tensor are -1."""

    lane: int
    places: Array
    offsets: Array
    itemsize: int
    group: int


class TensorCopies:
    """Bulk copies of all CTAs, in flight or done.

    `maps` are the tensor maps in the launch's parameter at `first_map`, one after another.
    """

    def __init__(
        self,
        threads: Threads,
        clocks: Clocks,
        global_access: GlobalAccess,
        shared: SharedMemory,
        mbarriers: Mbarriers,
        maps: tuple[TensorMap, ...],
        first_map: int,
    ) -> None:
        self.threads, self.clocks = threads, clocks
        self.global_access, self.shared, self.mbarriers = global_access, shared, mbarriers
        self.maps, self.first_map = maps, first_map
        self.loads: list[Load] = []
        self.stores: list[Store] = []
        # How many groups of stores each thread has committed.
        self.groups = np.zeros(threads.count, np.int32)

    def box(self, lane: int, start: int, name: int, corner: list[int]) -> tuple[Array, Array, int]:
        """Return places in shared memory, offsets in global memory or -1, and the itemsize.

        `corner` has the innermost coordinate first, as instructions have it.
        """
        number = (name - PARAMETER_BASE - self.first_map) / MAP_BYTES
        if number not in range(len(self.maps)):
            raise self.threads.fault("a tensor map that the launch was not given", lane)
        tensor = self.maps[int(number)]
        if start % SHARED_ALIGNMENT:
            what = f"a tensor copy whose place is no multiple of {SHARED_ALIGNMENT} bytes"
            raise self.threads.fault(what, lane)
        if len(corner) != len(tensor.window):
            raise self.threads.fault(f"{len(corner)} coordinates of {tensor}", lane)
        grid = np.indices(tensor.window).reshape(len(tensor.window), -1)
        index = grid + np.array(corner[::-1])[:, None]
        within = ((index >= 0) & (index < np.array(tensor.sizes)[:, None])).all(0)
        element = (index * np.array(tensor.strides)[:, None]).sum(0)
        offsets = np.where(within, tensor.address - BASE + element * tensor.itemsize, -1)
        places = start + np.arange(grid.shape[1]) * tensor.itemsize
        if tensor.swizzle > PIECE:
            if tensor.window[-1] * tensor.itemsize > tensor.swizzle:
                raise self.threads.fault(f"rows wider than their swizzle: {tensor}", lane)
            # Parts of CTAs begin where the pattern does.
            places = places ^ (((places >> 7) & (tensor.swizzle // PIECE - 1)) << 4)
        end = int(self.threads.cta[lane]) * self.shared.stride + SHARED_BASE + self.shared.size
        if (places + tensor.itemsize > end).any():
            raise self.threads.fault("a tensor copy past the end of shared memory", lane)
        return places, offsets, tensor.itemsize

    def boxes(self, mask: Mask, place: Array, name: Array, corner: list[Array]):
        """Yield each active lane with its `box`."""
        lanes = self.threads.lanes(mask)
        starts = self.shared.offsets(lanes, place, PIECE).tolist()
        names = self.threads.pick(name, lanes).tolist()
        corners = [self.threads.pick(axis, lanes).tolist() for axis in corner]
        for turn, lane in enumerate(lanes.tolist()):
            start = [axis[turn] for axis in corners]
            yield lane, *self.box(lane, starts[turn], names[turn], start)

    def load(
        self, mask: Mask, place: Array, name: Array, corner: list[Array], mbarrier: Array
    ) -> None:
        """Begin copies into shared memory. Elements outside the tensor become zero."""
        memory = self.global_access.memory
        for lane, places, offsets, size in self.boxes(mask, place, name, corner):
            within = offsets >= 0
            read = offsets[within]
            lanes = np.full(len(read), lane)
            access = self.global_access
            bad = ~inside(read, size, memory.readable)
            access.refuse_place(bad, lanes, read, "a tensor copy not allowed")
            unknown = (memory.flags[read[:, None] + np.arange(size)] & KNOWN).min(1) == 0
            access.refuse_place(unknown, lanes, read, "a tensor copy of what was never written")
            raw = np.zeros((len(places), size), np.uint8)
            raw[within] = memory.data[read[:, None] + np.arange(size)]
            cells = self.cells(places)
            self.shared.check_write(np.full(len(cells), lane), cells)
            self.shared.count(self.shared.incoming, cells, 1)
            self.shared.data[places[:, None] + np.arange(size)] = 0xFF
            cta, warp = int(self.threads.cta[lane]), int(self.threads.warp[lane])
            [bar] = self.shared.offsets(np.array([lane]), mbarrier, MBARRIER_BYTES).tolist()
            clock = self.clocks.time[cta, warp].copy()
            self.loads.append(Load(lane, places, raw, bar, clock))
            self.clocks.begin_epoch(cta, warp)

    def cells(self, places: Array) -> Array:
        """Return each cell of the shadow that places lie in once, as [cell, 1]."""
        return np.unique(places // self.shared.grain)[:, None]

    def arrive(self, index: int) -> None:
        """Deliver a copy into shared memory, and tell its mbarrier."""
        load = self.loads.pop(index)
        cells, size = self.cells(load.places), load.raw.shape[1]
        self.shared.count(self.shared.incoming, cells, -1)
        self.shared.data[load.places[:, None] + np.arange(size)] = load.raw
        warp = int(self.threads.warp[load.lane])
        self.shared.known[cells], self.shared.unfenced[cells] = True, False
        self.shared.writer[cells], self.shared.written[cells] = warp, load.clock[warp]
        self.mbarriers.deliver(load.mbarrier, load.lane, load.raw.size, load.clock)

    def store(self, mask: Mask, place: Array, name: Array, corner: list[Array]) -> None:
        """Begin copies out of shared memory. Elements outside the tensor are left out."""
        for lane, places, offsets, size in self.boxes(mask, place, name, corner):
            self.begin_store(lane, places, offsets, size)

    def store_bytes(self, mask: Mask, place: Array, address: Array, count: Array) -> None:
        """Begin copies of bytes in a row out of shared memory."""
        for lane in self.threads.lanes(mask).tolist():
            single = np.array([lane])
            size = int(self.threads.pick(count, single)[0])
            offset = int(self.threads.pick(address, single)[0]) - BASE
            start = int(self.shared.offsets(single, place, PIECE)[0])
            end = int(self.threads.cta[lane]) * self.shared.stride + SHARED_BASE
            if size % PIECE or offset % PIECE or start + size > end + self.shared.size:
                what = "a bulk copy that is misaligned or past the end of shared memory"
                raise self.threads.fault(what, lane)
            steps = np.arange(0, size, 2)
            self.begin_store(lane, start + steps, offset + steps, 2)

    def begin_store(self, lane: int, places: Array, offsets: Array, itemsize: int) -> None:
        cells = self.cells(places)
        self.shared.check_read(np.full(len(cells), lane), cells, asynchronous=True)
        self.shared.count(self.shared.outgoing, cells, 1)
        group = int(self.groups[lane])
        self.stores.append(Store(lane, places, offsets, itemsize, group))

    def commit(self, mask: Mask) -> None:
        self.groups = self.groups + (1 if mask is None else mask.astype(np.int32))

    def wait(self, mask: Mask, allowed: int) -> None:
        """Make the stores of active threads, except the stores of the last `allowed` groups."""
        left = []
        for store in self.stores:
            active = mask is None or mask[store.lane]
            if active and store.group < self.groups[store.lane] - allowed:
                self.make(store)
            else:
                left.append(store)
        self.stores = left

    def make(self, store: Store) -> None:
        memory, size = self.global_access.memory, store.itemsize
        within = store.offsets >= 0
        offsets = store.offsets[within]
        lanes = np.full(len(offsets), store.lane)
        bad = ~inside(offsets, size, memory.writable)
        self.global_access.refuse_place(bad, lanes, offsets, "a tensor store not allowed")
        self.global_access.check_other_ctas(lanes, offsets, size, writes=True)
        raw = self.shared.data[store.places[within][:, None] + np.arange(size)]
        memory.data[offsets[:, None] + np.arange(size)] = raw
        cells = self.cells(store.places)
        self.shared.count(self.shared.outgoing, cells, -1)
        self.shared.note_read(np.full(len(cells), store.lane), cells)
