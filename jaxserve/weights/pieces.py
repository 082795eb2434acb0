# pyright: reportUnknownMemberType=false
"""Join the parts of a parameter on several devices into sharded arrays.

Each device's part is converted separately to the form of a single device (panels, or codes with
scales). The arrays of all parts are then joined along their first axis. Inside the step, which is
mapped over the mesh, each device sees its part in the form of a single device.
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
    """Create each device's part of a parameter on that device, and join the parts.

    Args:
        mesh: a mesh with one axis.
        parts: the part of each device.
        form: returns the part of a device, given the index of the device, in its form and with its
            arrays on JAX's default device. It is called only for the devices of this host.

    Returns:
        The parameter, with arrays sharded over the mesh.
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
    """Return the shape and the sharding of an array that is joined from all devices' parts.

    Args:
        mesh: the devices.
        shape: shape of one part.
        is_whole: every device has the whole array, so it is replicated.
    """
    if is_whole:
        return shape, NamedSharding(mesh, PartitionSpec())
    return (mesh.size * shape[0], *shape[1:]), NamedSharding(mesh, PartitionSpec(AXIS))


def joined(mesh: Mesh, forms: Sequence[Any], is_whole: bool = False) -> Any:
    """Return the parameter whose arrays are sharded over the mesh, from the parts of this host.

    The parts are joined along their first axis.

    Args:
        mesh: the devices.
        forms: the part of each of this host's devices, in the order of the mesh.
        is_whole: every device has the whole parameter.

    Raises:
        ValueError: the parts have different forms or sizes.
    """

    def join(*leaves: Array) -> Array:
        shape, sharding = joined_place(mesh, leaves[0].shape, is_whole)
        placed = [
            jax.device_put(leaf, device)
            for leaf, device in zip(leaves, mesh.local_devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)

    return jax.tree.map(join, *forms)
