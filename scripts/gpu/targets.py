"""Cards to compile for: one of each compute capability, and the cards of `fits.md`."""

from __future__ import annotations

import dataclasses

from jaxserve.start.programs.described_card import DescribedCard
from pallas_kernels.devices import find_card

ONE_OF_EACH = (
    "Tesla T4",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA H200",
    "NVIDIA B200",
    "NVIDIA B300",
    "NVIDIA Thor",
    "NVIDIA GeForce RTX 5090",
    "NVIDIA GB10",
)
"""A card of each compute capability that XLA's plugin for CUDA 13 compiles for."""
CLAIMED = (
    *("T4", "RTX 3060", "RTX 3090", "RTX 4090", "RTX 5090", "L4"),
    *("A100", "H100", "H200", "B200", "DGX Spark"),
)
"""Cards whose plans `fits.md` has."""


@dataclasses.dataclass(frozen=True)
class Target(DescribedCard):
    """A card to compile for."""

    @classmethod
    def of(cls, name: str) -> Target:
        """Build the target of a card by any name of `find_card`.

        Raises:
            ValueError: the table has no such card, or the compiler does not know its class.
        """
        return cls(DescribedCard.of(name).card)

    @property
    def is_claimed(self) -> bool:
        """Return whether one of `CLAIMED` has its capability."""
        return self.card.capability in {find_card(name).capability for name in CLAIMED}
