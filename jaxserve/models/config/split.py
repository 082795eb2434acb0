"""Split: the division of a model over devices, as a configuration has it."""

from __future__ import annotations

from dataclasses import dataclass

AXIS = "model"
"""Name of the one axis of a mesh of devices."""


@dataclass(frozen=True)
class Split:
    """Division of a model over devices.

    Attributes:
        devices: how many there are.
        expert_parallel: each device has whole experts, and not a part of every expert's width.
        placement: by layer, the expert in each place of the devices, in their order, as many on
            each; experts may have several places. Empty where each has the one of its own number.
        context: devices, next to one another, that have the positions of a kv head divided among
            them; position p lies on that of number p % context.
        sum_kernel: sums over the devices are a kernel's of our own where it can.
    """

    devices: int = 1
    expert_parallel: bool = False
    placement: tuple[tuple[int, ...], ...] = ()
    context: int = 1
    sum_kernel: bool = False

    @property
    def places(self) -> int:
        """Places of a layer's experts on all devices; 0 where `placement` is empty."""
        return max(map(len, self.placement), default=0)

    @property
    def axis(self) -> str | None:
        """Name of the axis that sums run over; None on one device."""
        return AXIS if self.devices > 1 else None

    @property
    def leaves_sums(self) -> bool:
        """Return whether products in parts leave their sum to what adds and norms it."""
        return self.sum_kernel and self.axis is not None

    @property
    def counts_rows(self) -> bool:
        """Return whether each device counts the rows that its experts compute."""
        return self.expert_parallel and self.devices > 1


ONE_DEVICE = Split()
