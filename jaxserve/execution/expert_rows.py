# pyright: reportUnknownMemberType=false
"""ExpertRows: how many rows the experts of each device have computed, as the host adds them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Int64, UInt32

    from jaxserve.models import ModelConfig


class ExpertRows:
    """Rows, a token for one expert each, that every device's experts have computed.

    The device counts in 32 bits and starts anew with its state; a launch adds less than that.
    """

    def __init__(self) -> None:
        self._totals: Int64[np.ndarray, "N ..."] = np.zeros(0, np.int64)
        self._seen: UInt32[np.ndarray, "N ..."] = np.zeros(0, np.uint32)

    @property
    def counts(self) -> Int64[np.ndarray, " N"]:
        """Rows by device of this host, in their order; empty where experts are not divided so."""
        return self._totals.sum(axis=tuple(range(1, self._totals.ndim)))

    def by_expert(self, config: ModelConfig) -> list[list[int]]:
        """Return rows by layer and expert; [] of a layer without experts.

        Args:
            config: of a model whose experts have places, all on this host (see `Split`).
        """
        assert config.experts is not None
        found: list[list[int]] = []
        for own in config.split.placement:
            rows = np.zeros(config.experts.count if own else 0, np.int64)
            if own and len(self._totals):
                layer = sum(map(bool, found))
                np.add.at(rows, np.array(own), self._totals[:, layer].reshape(-1))
            found.append(rows.tolist())
        return found

    def read(self, counted: UInt32[Array, "N ..."] | None) -> None:
        """Add what the devices have counted until the end of a launch, modulo 2**32."""
        if counted is None:
            return
        shards = [np.asarray(shard.data) for shard in counted.addressable_shards]
        found = np.concatenate(shards)
        if not len(self._totals):
            self._totals = np.zeros(found.shape, np.int64)
        if not len(self._seen):
            self._seen = np.zeros(found.shape, np.uint32)
        self._totals = self._totals + (found - self._seen)  # which wraps as the device's count does
        self._seen = found

    def start_anew(self) -> None:
        """Expect a device state that has counted nothing."""
        self._seen = np.zeros(0, np.uint32)
