# pyright: reportUnknownMemberType=false
"""The mesh of an engine's devices, and sharded shapes of programs over it.

One `jax.shard_map` maps a whole step over the mesh. Kernels, panels and quantized products run on
each device's shard as on one device. Every exchange between devices is explicit in the mapped code
(see `models.collectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.execution.typed_jax import HostDevice, all_devices
from jaxserve.models.shards import AXIS
from jaxserve.settings.hosts import too_few

WHOLE, PARTS = PartitionSpec(), PartitionSpec(AXIS)
SECOND = PartitionSpec(None, AXIS)
"""Partition specs of arrays: replicated, or sharded along the first or second axis."""


def make_mesh(devices: int) -> Mesh | None:
    """Return a mesh of JAX's first `devices` devices, grouped by host, or None for one device.

    Raises:
        InvalidRequest: JAX has fewer devices.
    """
    return None if devices == 1 else mesh_of(mesh_devices(devices))


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """Return a one-dimensional JAX mesh, with axis `AXIS`, of the given devices in their order."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def mesh_devices(count: int) -> list[HostDevice]:
    """Return `count` devices of JAX, host by host, with the same number from each host.

    Raises:
        InvalidRequest: a host has too few devices.
    """
    hosts = jax.process_count()
    devices: list[HostDevice] = []
    for host in range(hosts):
        visible = [device for device in all_devices() if device.process_index == host]
        if len(visible) * hosts < count:
            raise too_few(count // hosts, len(visible), visible[0].platform)
        devices += visible[: count // hosts]
    return devices


def spec_of(array: Any) -> PartitionSpec:
    """Return the partition spec of an array or ShapeDtypeStruct.

    It is the spec of a replicated array (`WHOLE`) if the sharding is not a NamedSharding.
    """
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else WHOLE


def local_bytes(array: Any) -> int:
    """Return the bytes that an array or ShapeDtypeStruct takes on one device.

    If it is sharded, they are the bytes of one shard.
    """
    shape, sharding = array.shape, getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding):
        shape = sharding.shard_shape(shape)
    return prod(shape) * array.dtype.itemsize


def placed_shapes(mesh: Mesh, shapes: Any, specs: Any) -> Any:
    """Return a tree of ShapeDtypeStructs with named shardings on the mesh.

    Args:
        mesh: the mesh.
        shapes: a tree of arrays or shapes.
        specs: one partition spec, or a tree of specs that is a prefix of `shapes`.
    """

    def place(spec: PartitionSpec, tree: Any) -> Any:
        return jax.tree.map(partial(_placed, NamedSharding(mesh, spec)), tree)

    return jax.tree.map(place, specs, shapes, is_leaf=_is_spec)


def placed_arguments(mesh: Mesh, arguments: Any) -> Any:
    """Return the ShapeDtypeStructs of a tree of arguments, with named shardings on the mesh.

    An array or shape keeps its partition spec. One without a NamedSharding is replicated.
    """

    def place(leaf: Any) -> Any:
        return _placed(NamedSharding(mesh, spec_of(leaf)), leaf)

    return jax.tree.map(place, arguments)


def _placed(sharding: NamedSharding, leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _is_spec(tree: Any) -> bool:
    return isinstance(tree, PartitionSpec)


def mapped(mesh: Mesh, function: Callable[..., Any], arguments: Any, results: Any) -> Any:
    """Return `jax.shard_map` of a function, which takes global arrays.

    The function runs on each device's shards.

    Args:
        mesh: the mesh.
        function: a function of shards.
        arguments: arrays or shapes with the shardings of the function's arguments.
        results: partition specs of the results.
    """

    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=jax.tree.map(spec_of, arguments),
        out_specs=results,
        check_vma=False,
    )
