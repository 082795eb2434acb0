# pyright: reportUnknownMemberType=false
"""ExpertRows: the host's totals of rows that the experts of each device have computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Int64, UInt32

    from jaxserve.models import ModelConfig


class ExpertRows:
    """Totals of the rows that each device's experts have computed. A row is a token of one expert.

    The device counts modulo 2**32 and from zero after each reset. A launch adds less than 2**32.
    """

    def __init__(self) -> None:
        self._totals: Int64[np.ndarray, "N ..."] = np.zeros(0, np.int64)
        self._seen: UInt32[np.ndarray, "N ..."] = np.zeros(0, np.uint32)

    @property
    def counts(self) -> Int64[np.ndarray, " N"]:
        """Rows by device of this host, or an empty array if rows are not counted."""
        return self._totals.sum(axis=tuple(range(1, self._totals.ndim)))

    def by_expert(self, config: ModelConfig) -> list[list[int]]:
        """Return the rows of each layer and expert, [] for a layer without experts.

        Args:
            config: the configuration of a model whose experts are placed explicitly, all of them
                on this host (see `Split`).
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
        """Add the rows that were counted since the last call.

        Args:
            counted: the devices' counters after a launch, modulo 2**32, or None.
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
        """Expect the counters of the next launch to start from zero, and keep the totals."""

        self._seen = np.zeros(0, np.uint32)
