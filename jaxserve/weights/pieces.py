# pyright: reportUnknownMemberType=false
"""Parameters on several devices: each device's part in its own form, joined leaf by leaf.

A form that one device multiplies (panels, codes with scales) is made of each part, and the arrays
of all forms are joined along their first axis. Inside the step, which is mapped over the mesh, each
device then sees a form as it is on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.models.shards import AXIS, Part

if TYPE_CHECKING:
    from jaxtyping import Array


def placed_parts(mesh: Mesh, parts: Sequence[Part], form: Callable[[int], Any]) -> Any:
    """Make each device's form of a parameter there, and join them.

    Args:
        mesh: of one axis.
        parts: of the parameter, one a device.
        form: returns the form of a device's part, by the number of the device; its arrays must be
            placed on JAX's default device. Called for this host's devices alone.
    """
    forms: list[Any] = []
    for index, device in enumerate(mesh.devices.flat):
        if device.process_index != jax.process_index():
            continue
        with jax.default_device(device):
            forms.append(form(index))
    return joined(mesh, forms, is_whole=all(part.is_whole for part in parts))


def joined_place(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], is_whole: bool
) -> tuple[tuple[int, ...], NamedSharding]:
    """Return the shape of an array joined of each device's part, and how it lies.

    Args:
        shape: of one part.
        is_whole: every device has the whole array.
    """
    if is_whole:
        return shape, NamedSharding(mesh, PartitionSpec())
    return (mesh.size * shape[0], *shape[1:]), NamedSharding(mesh, PartitionSpec(AXIS))


def joined(mesh: Mesh, forms: Sequence[Any], is_whole: bool = False) -> Any:
    """Join the forms of a parameter that lie on a host's devices of a mesh, in their order.

    Args:
        is_whole: every device has the whole parameter.

    Raises:
        ValueError: forms of different kinds or sizes.
    """

    def join(*leaves: Array) -> Array:
        shape, sharding = joined_place(mesh, leaves[0].shape, is_whole)
        placed = [
            jax.device_put(leaf, device)
            for leaf, device in zip(leaves, mesh.local_devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)

    return jax.tree.map(join, *forms)
