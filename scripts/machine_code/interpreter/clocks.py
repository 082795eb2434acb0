"""Vector clocks, which order the actions of the warps of a CTA.

Each warp counts its own epochs. For every other warp of its CTA it has the last epoch that it is
ordered after. Two accesses race if neither is ordered after the other, in whichever order they were
executed (FastTrack, Flanagan and Freund 2009).
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


class Clocks:
    """Clocks of all warps: `time[cta, warp, other]` is the epoch of `other` that `warp` saw."""

    def __init__(self, ctas: int, warps: int) -> None:
        self.own = np.arange(warps)
        self.time = np.zeros((ctas, warps, warps), np.int32)
        self.time[:, self.own, self.own] = 1

    def now(self, ctas: Array, warps: Array) -> Array:
        """Return the current epochs of warps."""
        return self.time[ctas, warps, warps]

    def seen(self, ctas: Array, warps: Array, others: Array) -> Array:
        """Return the epochs of other warps that warps are ordered after."""
        return self.time[ctas, warps, others]

    def begin_epoch(self, ctas: Array | int, warps: Array | int) -> None:
        """Begin an epoch of some warps: other warps are not ordered after their later actions."""
        self.time[ctas, warps, warps] += 1

    def synchronize(self, ctas: Array) -> None:
        """Order all warps of CTAs after all that each of them has done."""
        before = self.time[ctas]
        joined = np.repeat(before.max(1, keepdims=True), before.shape[1], axis=1)
        joined[:, self.own, self.own] += 1
        self.time[ctas] = joined

    def pass_on(self, cta: int, sources: Array, targets: Array) -> None:
        """Order some warps of a CTA after the actions of others."""
        joined = self.time[cta, sources].max(0)
        self.time[cta, targets] = np.maximum(self.time[cta, targets], joined)
        self.begin_epoch(cta, np.union1d(sources, targets))

    def learn(self, cta: int, warp: int, clock: Array) -> None:
        """Order a warp after a clock that was taken earlier."""
        self.time[cta, warp] = np.maximum(self.time[cta, warp], clock)
