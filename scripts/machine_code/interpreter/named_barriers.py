"""The barriers of `bar.sync` and `bar.arrive`, named by numbers."""

from __future__ import annotations

import numpy as np

from scripts.machine_code.interpreter.clocks import Clocks
from scripts.machine_code.interpreter.threads import WARP, Array, Mask, Progress, Threads


class NamedBarriers:
    """Barriers of all CTAs, each opened by the arrival of as many threads as it is given."""

    def __init__(self, threads: Threads, progress: Progress, clocks: Clocks) -> None:
        self.threads, self.progress, self.clocks = threads, progress, clocks
        # By a barrier's number: who has arrived, and who of them waits.
        self.arrived: dict[int, Array] = {}
        self.waits: dict[int, Array] = {}
        # Number of threads that open it. None means all threads of the CTA.
        self.needs: dict[int, int | None] = {}

    def arrive(
        self, mask: Mask, number: Array, count: Array | None, waits: bool, aligned: bool
    ) -> None:
        """Let threads arrive at barriers, which a register may name, and wait or go on."""
        threads = self.threads
        if aligned:
            threads.check_whole_warps(mask)
        lanes = threads.lanes(mask)
        numbers = threads.pick(number, lanes)
        counts = None if count is None else threads.pick(count, lanes)
        for name in np.unique(numbers).tolist():
            same = numbers == name
            here = lanes[same]
            arrived = self.arrived.setdefault(name, np.zeros(threads.count, bool))
            waiting = self.waits.setdefault(name, np.zeros(threads.count, bool))
            threads.refuse(arrived[here], here, "a thread arrives twice at a barrier")
            arrived[here] = True
            waiting[here] = waits
            needed = None if counts is None else int(counts[same][0])
            if needed is not None:
                wrong = (counts[same] != needed) | (needed % WARP != 0)
                threads.refuse(wrong, here, "a barrier opens by whole warps, the same for all")
            self.needs[name] = needed
        if waits:
            self.progress.at_barrier[lanes] = True
        self.release()

    def release(self) -> None:
        """Open the barriers at which enough threads have arrived."""
        for name, arrived in self.arrived.items():
            if arrived.any():
                self.release_barrier(arrived, self.waits[name], self.needs[name])

    def release_barrier(self, arrived: Array, waits: Array, needed: int | None) -> None:
        per_cta = self.threads.per_cta
        by_cta = arrived.reshape(-1, per_cta)
        if needed is None:
            # Threads that have ended are not waited for.
            gone = ~self.progress.alive().reshape(-1, per_cta)
            opened = (by_cta | gone).all(1) & by_cta.any(1)
        else:
            counts = by_cta.sum(1)
            if (counts > needed).any():
                lane = int(np.argmax(counts > needed)) * per_cta
                raise self.threads.fault(f"more than {needed} threads at a barrier", lane)
            opened = counts == needed
        if not opened.any():
            return
        self.synchronize(np.flatnonzero(opened), by_cta, waits.reshape(-1, per_cta))
        open_lanes = np.repeat(opened, per_cta)
        self.progress.at_barrier &= ~(waits & open_lanes)
        arrived &= ~open_lanes
        waits &= ~open_lanes

    def synchronize(self, ctas: Array, arrived: Array, waits: Array) -> None:
        shape = (len(ctas), self.threads.warps_per_cta, WARP)
        came, waited = (who[ctas].reshape(shape).any(2) for who in (arrived, waits))
        if waited.all():
            self.clocks.synchronize(ctas)
            return
        for index, cta in enumerate(ctas.tolist()):
            sources, targets = np.flatnonzero(came[index]), np.flatnonzero(waited[index])
            self.clocks.pass_on(cta, sources, targets)
