# pyright: reportUnknownMemberType=false
"""Collective operations between the devices of a split model.

Every sum of a step over devices goes through `summed`, so that a kernel can replace it, or is left
to the kernel that `Residual.normed` calls, which then includes the sum (`Split.leaves_sums`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax import lax

from jaxserve.models.config.split import Split
from pallas_kernels import sum_over_devices

if TYPE_CHECKING:
    from jaxtyping import Array, Int32, Shaped


def summed(x: Shaped[Array, "*sizes"], split: Split) -> Shaped[Array, "*sizes"]:
    """Return the sum of x over the devices of a split, on every device (x itself on one device)."""
    if split.axis is None:
        return x
    return sum_over_devices(x, split.axis) if split.sum_kernel else lax.psum(x, split.axis)


def summed_few(x: Shaped[Array, "*sizes"], axis: str) -> Shaped[Array, "*sizes"]:
    """Return the sum of a small array x over the devices of a mesh axis, always by XLA's psum."""
    return lax.psum(x, axis)


def device_index(axis: str) -> Int32[Array, ""]:
    """Return the index of the executing device along the mesh axis `axis`."""
    return lax.axis_index(axis)


def axis_size(axis: str) -> int:
    """Return the number of devices along a mesh axis. It must be called inside shard_map."""
    return lax.axis_size(axis)


def of_all(x: Shaped[Array, "*sizes"], axis: str, tiled: bool = False) -> Shaped[Array, ...]:
    """Gather x from all devices of the mesh axis, and return the result on every device.

    The arrays are stacked along a new axis 0, or concatenated along the existing axis 0 if `tiled`.
    """
    return lax.all_gather(x, axis, axis=0, tiled=tiled)


def heads_of_group(x: Shaped[Array, "T n H"], axis: str, size: int) -> Shaped[Array, "T N H"]:
    """Gather x, [T, n, H], from this device's group, and concatenate it over heads to [T, N, H].

    Args:
        x: array of this device's n heads.
        axis: mesh axis.
        size: number of adjacent devices in a group. N is n * size.
    """
    groups = _groups(axis, size)
    return lax.all_gather(x, axis, axis=1, tiled=True, axis_index_groups=groups)


def parts_of_group(x: Shaped[Array, "T N S"], axis: str, size: int) -> Shaped[Array, "size T n S"]:
    """Exchange partial results within this device's group of `size` adjacent devices (all-to-all).

    x is this device's partial result [T, N, S] for all N heads of the group. Returns [size, T, n,
    S]: the partial results of all devices of the group for this device's n heads.
    """
    parts = x.reshape(x.shape[0], size, -1, x.shape[-1])
    groups = _groups(axis, size)
    return lax.all_to_all(parts, axis, split_axis=1, concat_axis=0, axis_index_groups=groups)


def _groups(axis: str, size: int) -> list[list[int]]:
    return [list(range(i, i + size)) for i in range(0, axis_size(axis), size)]


def rows_for_columns(x: Shaped[Array, "R V"], axis: str) -> Shaped[Array, "r V_of_all"]:
    """Exchange [R, V], this device's columns of all rows, for all columns of this device's rows.

    The all-to-all over the mesh axis returns [R / devices, V * devices].
    """
    return lax.all_to_all(x, axis, split_axis=0, concat_axis=1, tiled=True)
