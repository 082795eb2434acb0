"""The division of a model over devices."""

from __future__ import annotations

from dataclasses import dataclass

AXIS = "model"
"""Name of the one axis of a mesh of devices."""


@dataclass(frozen=True)
class Split:
    """Division of a model over devices.

    Attributes:
        devices: the number of devices.
        expert_parallel: each device has whole experts, instead of a part of every expert's width.
        placement: for each layer, the expert in each place, in the order of the devices, with the
            same number of places on every device. An expert may have several places. Empty if each
            expert has the one place of its own number.
        context: number of adjacent devices that share the positions of a kv head. Position p is on
            device p % context of the group.
        sum_kernel: sum over devices with our own kernel where it is supported.
    """

    devices: int = 1
    expert_parallel: bool = False
    placement: tuple[tuple[int, ...], ...] = ()
    context: int = 1
    sum_kernel: bool = False

    @property
    def places(self) -> int:
        """Number of places of a layer's experts on all devices, or 0 if `placement` is empty."""
        return max(map(len, self.placement), default=0)

    @property
    def axis(self) -> str | None:
        """Name of the mesh axis for sums over devices; None on one device."""
        return AXIS if self.devices > 1 else None

    @property
    def leaves_sums(self) -> bool:
        """Whether layers leave sums over devices to the kernel that adds and norms results."""
        return self.sum_kernel and self.axis is not None

    @property
    def counts_rows(self) -> bool:
        """Whether each device counts the rows that its experts compute: it has whole experts."""
        return self.expert_parallel and self.devices > 1


ONE_DEVICE = Split()
