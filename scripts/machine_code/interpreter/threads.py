"""The threads of a batch of CTAs, one array element each, and where each of them stands."""

from __future__ import annotations

import numpy as np

from scripts.machine_code.faults import Fault

Array = np.ndarray
# Active threads of an instruction. None means every thread.
Mask = Array | None

WARP = 32
# The block that threads reach when they end.
DONE = 1 << 30


class Threads:
    """Threads of some CTAs of a launch, as whole warps. Threads past a CTA's last do not exist."""

    def __init__(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        ctas: Array,
    ) -> None:
        self.kernel, self.grid, self.block, self.ctas = kernel, grid, block, ctas
        size = int(np.prod(block))
        # Threads of a CTA, padded to whole warps, and its warps.
        self.per_cta = -(-size // WARP) * WARP
        self.warps_per_cta = self.per_cta // WARP
        self.count = len(ctas) * self.per_cta
        self.warp_count = self.count // WARP
        self.thread = np.tile(np.arange(self.per_cta), len(ctas))
        # Index of a thread's CTA in the batch. `ctas` has its number in the grid.
        self.cta = np.repeat(np.arange(len(ctas)), self.per_cta)
        self.warp = self.thread // WARP
        self.exists = self.thread < size
        self.all = np.arange(self.count)
        # The line that is being executed, for messages.
        self.line = 0

    def special_registers(self) -> dict[str, Array]:
        cta = self.ctas[self.cta]
        found = {"%laneid": self.thread % WARP, "%warpid": self.warp}
        for axis, letter in enumerate("xyz"):
            below, grid_below = int(np.prod(self.block[:axis])), int(np.prod(self.grid[:axis]))
            found[f"%tid.{letter}"] = self.thread // below % self.block[axis]
            found[f"%ctaid.{letter}"] = cta // grid_below % self.grid[axis]
            found[f"%ntid.{letter}"] = np.full(self.count, self.block[axis])
            found[f"%nctaid.{letter}"] = np.full(self.count, self.grid[axis])
        return {name: values.astype(np.uint32) for name, values in found.items()}

    def fault(self, what: str, lane: int | None = None) -> Fault:
        """Return a fault with the line, and the CTA and thread of a lane."""
        where = f"{self.kernel} line {self.line}"
        if lane is not None:
            number = int(self.ctas[self.cta[lane]])
            x, y = number % self.grid[0], number // self.grid[0] % self.grid[1]
            z = number // self.grid[0] // self.grid[1]
            where += f", CTA ({x}, {y}, {z}) thread {self.thread[lane]}"
        return Fault(f"{where}: {what}")

    def refuse(self, bad: Array, lanes: Array, what: str) -> None:
        """Raise a fault if any lane is bad. The fault names the first bad lane."""
        if bad.any():
            raise self.fault(what, int(lanes[int(np.argmax(bad))]))

    def lanes(self, mask: Mask) -> Array:
        """Return the indices of active threads."""
        return self.all if mask is None else np.flatnonzero(mask)

    def pick(self, values: Array, lanes: Array) -> Array:
        """Return the values of some lanes. A scalar is the value of every lane."""
        if np.ndim(values) == 0:
            return np.full(len(lanes), values)
        return values if lanes is self.all else values[lanes]

    def spread(self, values: Array, lanes: Array) -> Array:
        """Spread values of some lanes over all threads. The other threads get all ones."""
        if lanes is self.all:
            return values
        everywhere = np.full(self.count, np.iinfo(values.dtype).max, values.dtype)
        everywhere[lanes] = values
        return everywhere

    def by_warp(self, values: Array) -> Array:
        """Return values as [warp, lane]."""
        if np.ndim(values) == 0:
            values = np.full(self.count, values)
        return values.reshape(-1, WARP)

    def check_whole_warps(self, mask: Mask) -> None:
        """Refuse an instruction that needs all threads of a warp and has some of them."""
        if mask is None:
            return
        active = mask.reshape(-1, WARP)
        partial = active.any(1) & ~(active | ~self.exists.reshape(-1, WARP)).all(1)
        if partial.any():
            lane = int(np.argmax(partial)) * WARP
            raise self.fault("an aligned instruction without its whole warp", lane)

    def whole_warps(self, mask: Mask) -> Array:
        """Return the indices of the active warps, all of whose threads are active."""
        self.check_whole_warps(mask)
        if mask is None:
            return np.arange(self.warp_count)
        return np.flatnonzero(mask.reshape(-1, WARP).any(1))


class Progress:
    """Progress of each thread: the block that it executes next, and whether it has to wait."""

    def __init__(self, threads: Threads) -> None:
        self.block = np.where(threads.exists, 0, DONE)
        self.at_barrier = np.zeros(threads.count, bool)
        # Waiting for an mbarrier to complete a phase.
        self.asleep = np.zeros(threads.count, bool)

    def ready(self) -> Array:
        return (self.block < DONE) & ~self.at_barrier & ~self.asleep

    def waiting(self) -> Array:
        return self.at_barrier | self.asleep

    def alive(self) -> Array:
        return self.block < DONE

    def jump(self, mask: Mask, block: int) -> None:
        if mask is None:
            self.block = np.full_like(self.block, block)
        else:
            self.block = np.where(mask, block, self.block)

    def branch(self, mask: Mask, taken: Array, block: int, other: int) -> None:
        target = np.where(taken, block, other)
        self.block = target if mask is None else np.where(mask, target, self.block)
