"""Order between the CTAs of a launch: the stores of other CTAs that a CTA may read or overwrite.

A CTA may read its own stores and the stores that other CTAs published. An atomic operation with
release semantics at the scope of the GPU publishes the stores of its warp, and all stores that the
warp is ordered after. A later atomic operation with acquire semantics at the same address orders
its warp after them, and other warps of its CTA after the next barrier. By this part of PTX's memory
model the last CTA of several may combine the results of all. In the same way a release orders the
loads before it, so that the last CTA may overwrite words that all have read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scripts.machine_code.interpreter.clocks import Clocks
from scripts.machine_code.interpreter.threads import Array, Threads

WORD = 4


@dataclass
class LaunchHistory:
    """History of a launch's stores, over all batches of its CTAs.

    Attributes:
        warp, epoch: of the last store to each word of memory.
        published: the clocks that were released at a place, by its offset: CTA and epochs of its
            warps.
        reads: CTA, warp and epoch of each load of a word that no CTA had written, by the word's
            number.
    """

    warp: Array
    epoch: Array
    published: dict[int, list[tuple[int, Array]]] = field(default_factory=dict)
    reads: dict[int, set[tuple[int, int, int]]] = field(default_factory=dict)


class Publications:
    """Order of a batch of CTAs between loads and the stores of their own launch."""

    def __init__(self, threads: Threads, clocks: Clocks, history: LaunchHistory) -> None:
        self.threads, self.clocks, self.history = threads, clocks, history
        # By CTA of the batch: a warp, the epoch of its acquire, and the clocks that it acquired.
        self.learned: dict[int, list[tuple[int, int, dict[int, Array]]]] = {}

    def record(self, lanes: Array, offsets: Array, size: int) -> None:
        """Remember who stored, and when."""
        warps = self.threads.warp[lanes]
        now = self.clocks.now(self.threads.cta[lanes], warps)
        for part in range(0, max(size, WORD), WORD):
            words = (offsets + part) // WORD
            self.history.warp[words], self.history.epoch[words] = warps, now

    def record_reads(self, lanes: Array, offsets: Array, size: int) -> None:
        """Remember who loaded, and when."""
        ctas, warps = self.threads.cta[lanes], self.threads.warp[lanes]
        columns = self.threads.ctas[ctas], warps, self.clocks.now(ctas, warps)
        kinds = list(zip(*(column.tolist() for column in columns), strict=True))
        for part in range(0, max(size, WORD), WORD):
            for word, kind in zip(((offsets + part) // WORD).tolist(), kinds, strict=True):
                self.history.reads.setdefault(word, set()).add(kind)

    def unordered_stores(self, lanes: Array, offsets: Array) -> Array:
        """Tell which stores are not ordered after all loads of their words by other CTAs."""
        bad = np.zeros(len(lanes), bool)
        ctas, warps = self.threads.cta[lanes].tolist(), self.threads.warp[lanes].tolist()
        for index, word in enumerate((offsets // WORD).tolist()):
            cta, warp = ctas[index], warps[index]
            bad[index] = not all(
                reader == int(self.threads.ctas[cta])
                or self._is_ordered(cta, warp, reader, loader, epoch)
                for reader, loader, epoch in self.history.reads.get(word, ())
            )
        return bad

    def synchronize(self, lane: int, offset: int, releases: bool, acquires: bool) -> None:
        """Apply the release and the acquire of a thread's atomic operation at an offset."""
        cta, warp = int(self.threads.cta[lane]), int(self.threads.warp[lane])
        place = self.history.published.setdefault(offset, [])
        if acquires:
            clocks = dict(place)
            epoch = int(self.clocks.time[cta, warp, warp])
            self.learned.setdefault(cta, []).append((warp, epoch, clocks))
        if releases:
            place.append((int(self.threads.ctas[cta]), self.clocks.time[cta, warp].copy()))
            self.clocks.begin_epoch(cta, warp)

    def unordered(self, lanes: Array, offsets: Array, size: int, owners: Array) -> Array:
        """Tell which loads of words that this launch wrote are not ordered after the stores.

        Args:
            owners: the number of the CTA that wrote each.
        """
        bad = np.zeros(len(lanes), bool)
        for part in range(0, max(size, WORD), WORD):
            words = (offsets + part) // WORD
            keys = np.stack(
                [
                    self.threads.cta[lanes],
                    self.threads.warp[lanes],
                    owners,
                    self.history.warp[words],
                    self.history.epoch[words],
                ]
            )
            kinds, kind_of = np.unique(keys, axis=1, return_inverse=True)
            is_ordered = np.array([self._is_ordered(*map(int, kind)) for kind in kinds.T], bool)
            bad |= ~is_ordered[kind_of.reshape(-1)]
        return bad

    def _is_ordered(self, cta: int, warp: int, owner: int, writer: int, epoch: int) -> bool:
        seen = self.clocks.time[cta, warp]
        if owner == int(self.threads.ctas[cta]):
            return bool(seen[writer] > epoch) if writer == warp else bool(seen[writer] >= epoch)
        return any(
            seen[learner] >= when and owner in clocks and clocks[owner][writer] >= epoch
            for learner, when, clocks in self.learned.get(cta, ())
        )
