# pyright: reportUnknownMemberType=false
"""Operations between the devices that a model is divided over; on one device none is left.

Every sum of a step over devices goes through `summed`, so that a kernel may take its place, or is
left to `layers.add`, where it is a part of that kernel (`Split.leaves_sums`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax import lax

from jaxserve.models.config.split import Split
from pallas_kernels import sum_over_devices

if TYPE_CHECKING:
    from jaxtyping import Array, Int32, Shaped


def summed(x: Shaped[Array, "*sizes"], split: Split) -> Shaped[Array, "*sizes"]:
    """Return the sum over the devices of a split, the same on each; x on one device."""
    if split.axis is None:
        return x
    return sum_over_devices(x, split.axis) if split.sum_kernel else lax.psum(x, split.axis)


def summed_few(x: Shaped[Array, "*sizes"], axis: str) -> Shaped[Array, "*sizes"]:
    """Return the sum over devices of a few numbers, for which there is no kernel."""
    return lax.psum(x, axis)


def device_index(axis: str) -> Int32[Array, ""]:
    """Return the number of the device that computes."""
    return lax.axis_index(axis)


def axis_size(axis: str) -> int:
    """Return how many devices an axis has."""
    return lax.axis_size(axis)


def of_all(x: Shaped[Array, "*sizes"], axis: str, tiled: bool = False) -> Shaped[Array, ...]:
    """Return the arrays of all devices, stacked, or one behind the other along the first axis."""
    return lax.all_gather(x, axis, axis=0, tiled=tiled)


def heads_of_group(x: Shaped[Array, "T n H"], axis: str, size: int) -> Shaped[Array, "T N H"]:
    """Return the heads of `size` devices next to one another, which compute together."""
    groups = _groups(axis, size)
    return lax.all_gather(x, axis, axis=1, tiled=True, axis_index_groups=groups)


def parts_of_group(x: Shaped[Array, "T N S"], axis: str, size: int) -> Shaped[Array, "size T n S"]:
    """Return what each device of a group has of this one's heads, given its part of all heads."""
    parts = x.reshape(x.shape[0], size, -1, x.shape[-1])
    groups = _groups(axis, size)
    return lax.all_to_all(parts, axis, split_axis=1, concat_axis=0, axis_index_groups=groups)


def _groups(axis: str, size: int) -> list[list[int]]:
    return [list(range(i, i + size)) for i in range(0, axis_size(axis), size)]


def rows_for_columns(x: Shaped[Array, "R V"], axis: str) -> Shaped[Array, "r V_of_all"]:
    """Return all columns of a part of the rows, given a part of the columns of all rows."""
    return lax.all_to_all(x, axis, split_axis=0, concat_axis=1, tiled=True)
