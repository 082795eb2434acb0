# pyright: reportUnknownMemberType=false
"""ExpertRows: the host's totals of rows that the experts of each device have computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Int64, UInt32

    from jaxserve.models import ModelConfig


class ExpertRows:
    """Host counters of the rows that the experts of each device have computed.

    A row is one token computed by one expert. The counters of a device are modulo 2**32, start from
    zero after each reset of the device state, and grow by less than 2**32 in a launch. The host's
    totals are int64.
    """

    def __init__(self) -> None:
        self._totals: Int64[np.ndarray, "N ..."] = np.zeros(0, np.int64)
        self._seen: UInt32[np.ndarray, "N ..."] = np.zeros(0, np.uint32)

    @property
    def counts(self) -> Int64[np.ndarray, " N"]:
        """int64[N]: rows that each device of this host computed, empty if they are not counted."""
        return self._totals.sum(axis=tuple(range(1, self._totals.ndim)))

    def by_expert(self, config: ModelConfig) -> list[list[int]]:
        """Return for each transformer layer the rows of each expert, [] without experts.

        Args:
            config: the configuration of a model whose experts are placed explicitly, all of them on
                this host (see `Split`).
        """
        assert config.experts is not None
        layers: list[list[int]] = []
        for experts in config.split.placement:
            rows = np.zeros(config.experts.count if experts else 0, np.int64)
            if experts and len(self._totals):
                layer = sum(map(bool, layers))
                np.add.at(rows, np.array(experts), self._totals[:, layer].reshape(-1))
            layers.append(rows.tolist())
        return layers

    def read(self, counted: UInt32[Array, "N ..."] | None) -> None:
        """Add the rows that the devices counted since the previous call of `read` to the totals.

        Args:
            counted: the devices' counters after a launch, modulo 2**32. None changes no total.
        """
        if counted is None:
            return
        shards = [np.asarray(shard.data) for shard in counted.addressable_shards]
        counts = np.concatenate(shards)
        if not len(self._totals):
            self._totals = np.zeros(counts.shape, np.int64)
        if not len(self._seen):
            self._seen = np.zeros(counts.shape, np.uint32)
        self._totals = self._totals + (counts - self._seen)  # wraps like the device's counters
        self._seen = counts

    def start_anew(self) -> None:
        """Expect the devices' row counters to start from zero in the next launch. Totals stay."""

        self._seen = np.zeros(0, np.uint32)
