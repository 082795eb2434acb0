# pyright: reportUnknownMemberType=false
"""ExpertRows: how many rows the experts of each device have computed, as the host adds them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Int64, UInt32


class ExpertRows:
    """Rows, a token for one expert each, that every device's experts have computed.

    The device counts in 32 bits and starts anew with its state; a launch adds less than that.

    Attributes:
        counts: by device of this host, in their order; empty where experts are not divided so.
    """

    def __init__(self) -> None:
        self.counts: Int64[np.ndarray, " N"] = np.zeros(0, np.int64)
        self._seen: UInt32[np.ndarray, " N"] = np.zeros(0, np.uint32)

    def read(self, counted: UInt32[Array, " N"] | None) -> None:
        """Add what the devices have counted until the end of a launch, modulo 2**32."""
        if counted is None:
            return
        shards = [np.asarray(shard.data) for shard in counted.addressable_shards]
        found = np.concatenate(shards)
        if not len(self.counts):
            self.counts = np.zeros(len(found), np.int64)
        if not len(self._seen):
            self._seen = np.zeros(len(found), np.uint32)
        self.counts = self.counts + (found - self._seen)  # which wraps as the device's count does
        self._seen = found

    def start_anew(self) -> None:
        """Expect a device state that has counted nothing."""
        self._seen = np.zeros(0, np.uint32)
