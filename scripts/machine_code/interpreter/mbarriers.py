"""mbarriers: barriers in shared memory that count arrivals of threads and bytes of copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scripts.machine_code.interpreter.clocks import Clocks
from scripts.machine_code.interpreter.shared_memory import SharedMemory
from scripts.machine_code.interpreter.threads import Array, Mask, Progress, Threads

MBARRIER_BYTES = 8


@dataclass
class Mbarrier:
    """Barrier whose phase ends when `left` arrivals and `bytes` of copies have come."""

    cta: int
    count: int
    left: int
    # Clocks of the warps that arrived at the current phase, and at the phase before.
    coming: Array
    passed: Array
    # Which warp initialized it, and when.
    maker: int
    made: int
    bytes: int = 0
    phase: int = 0


class Mbarriers:
    """The mbarriers of all CTAs, by their place in shared memory."""

    def __init__(
        self, threads: Threads, progress: Progress, clocks: Clocks, shared: SharedMemory
    ) -> None:
        self.threads, self.progress = threads, progress
        self.clocks, self.shared = clocks, shared
        self.by_place: dict[int, Mbarrier] = {}
        # Threads whose last wait ended too early.
        self.refused = np.zeros(threads.count, bool)

    def initialize(self, mask: Mask, address: Array, count: Array) -> None:
        lanes = self.threads.lanes(mask)
        places = self.shared.offsets(lanes, address, MBARRIER_BYTES)
        counts = self.threads.pick(count, lanes).astype(np.int64)
        for lane, place, number in np.stack([lanes, places, counts], 1).tolist():
            cta, warp = int(self.threads.cta[lane]), int(self.threads.warp[lane])
            nothing = np.zeros(self.threads.warps_per_cta, np.int32)
            made = int(self.clocks.time[cta, warp, warp])
            self.by_place[place] = Mbarrier(cta, number, number, nothing, nothing, warp, made)

    def invalidate(self, mask: Mask, address: Array) -> None:
        lanes = self.threads.lanes(mask)
        places = self.shared.offsets(lanes, address, MBARRIER_BYTES)
        for lane, place in np.stack([lanes, places], 1).tolist():
            self.find(place, np.array([lane]))
            del self.by_place[place]

    def find(self, place: int, lanes: Array) -> Mbarrier:
        """Return the mbarrier at a place, of whose initialization all these threads must know."""
        if place not in self.by_place:
            raise self.threads.fault("an mbarrier that was not initialized", int(lanes[0]))
        barrier = self.by_place[place]
        seen = self.clocks.time[barrier.cta, self.threads.warp[lanes], barrier.maker]
        what = "an mbarrier that another warp initialized, no barrier between"
        self.threads.refuse(seen < barrier.made, lanes, what)
        return barrier

    def arrive(self, mask: Mask, address: Array, count: Array, expects_bytes: bool) -> list[Array]:
        """Count arrivals: `count` of each thread, or one that announces `count` bytes.

        Returns:
            The phase's state. Its bits have no meaning to the kernel, so all of them are ones.
        """
        lanes = self.threads.lanes(mask)
        places = self.shared.offsets(lanes, address, MBARRIER_BYTES)
        counts = self.threads.pick(count, lanes).astype(np.int64)
        for place in np.unique(places).tolist():
            here = places == place
            barrier = self.find(place, lanes[here])
            for warp in np.unique(self.threads.warp[lanes[here]]).tolist():
                clock = self.clocks.time[barrier.cta, warp]
                barrier.coming = np.maximum(barrier.coming, clock)
                self.clocks.begin_epoch(barrier.cta, warp)
            arrivals = int(here.sum()) if expects_bytes else int(counts[here].sum())
            if expects_bytes:
                barrier.bytes += int(counts[here].sum())
            if arrivals > barrier.left:
                lane = int(lanes[here][0])
                raise self.threads.fault("more arrivals than an mbarrier takes", lane)
            barrier.left -= arrivals
            self.complete(barrier)
        return [np.full(self.threads.count, np.iinfo(np.uint64).max, np.uint64)]

    def deliver(self, place: int, lane: int, size: int, clock: Array) -> None:
        """Count the bytes of a copy that has arrived."""
        barrier = self.find(place, np.array([lane]))
        barrier.coming = np.maximum(barrier.coming, clock)
        barrier.bytes -= size
        self.complete(barrier)

    def complete(self, barrier: Mbarrier) -> None:
        """Begin the next phase if all that this one waits for has come."""
        if barrier.left == 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.left, barrier.passed = barrier.count, barrier.coming
            self.progress.asleep[:] = False

    def wait(self, mask: Mask, address: Array, parity: Array) -> list[Array]:
        """Tell each thread whether the phase of a parity has ended.

        Hardware may give up at any time, so a thread learns that it has not, once, and sleeps until
        a phase ends when it asks again.
        """
        lanes = self.threads.lanes(mask)
        places = self.shared.offsets(lanes, address, MBARRIER_BYTES)
        parities = self.threads.pick(parity, lanes)
        done = np.zeros(self.threads.count, bool)
        for place in np.unique(places).tolist():
            same = places == place
            barrier = self.find(place, lanes[same])
            here = lanes[same & (barrier.phase % 2 != parities)]
            done[here] = True
            for warp in np.unique(self.threads.warp[here]).tolist():
                self.clocks.learn(barrier.cta, warp, barrier.passed)
        self.progress.asleep[lanes] = self.refused[lanes] & ~done[lanes]
        self.refused[lanes] = ~done[lanes]
        return [done]
