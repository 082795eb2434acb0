# pyright: reportUnknownMemberType=false
"""The mesh of an engine's devices, and what programs over it are made of.

A whole step is mapped over the mesh with one `jax.shard_map`: kernels, panels and quantized
products run on each device's part as on one device, and every exchange between devices stands in
the code that is mapped (see `models.collectives`).
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
"""Specs of arrays: whole on each device, or divided along their first or second axis."""


def make_mesh(devices: int) -> Mesh | None:
    """Return the mesh of JAX's first devices, in the order of their hosts; None for one device.

    Raises:
        InvalidRequest: there are fewer.
    """
    return None if devices == 1 else mesh_of(mesh_devices(devices))


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """Return the mesh of some devices, in their order."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def mesh_devices(count: int) -> list[HostDevice]:
    """Return JAX's first devices, as many of each host's as of any other's.

    Raises:
        InvalidRequest: there are fewer.
    """
    hosts = jax.process_count()
    found: list[HostDevice] = []
    for host in range(hosts):
        visible = [device for device in all_devices() if device.process_index == host]
        if len(visible) * hosts < count:
            raise too_few(count // hosts, len(visible), visible[0].platform)
        found += visible[: count // hosts]
    return found


def spec_of(array: Any) -> PartitionSpec:
    """Return how an array, or its shape, lies on the mesh; whole where it does not say."""
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else WHOLE


def local_bytes(array: Any) -> int:
    """Return the bytes of an array, or of its shape, on one device."""
    shape, sharding = array.shape, getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding):
        shape = sharding.shard_shape(shape)
    return prod(shape) * array.dtype.itemsize


def placed_shapes(mesh: Mesh, shapes: Any, specs: Any) -> Any:
    """Return shapes that say how their arrays lie on the mesh.

    Args:
        specs: of all of them, or of each in a tree that theirs begins with.
    """

    def place(spec: PartitionSpec, tree: Any) -> Any:
        return jax.tree.map(partial(_placed, NamedSharding(mesh, spec)), tree)

    return jax.tree.map(place, specs, shapes, is_leaf=_is_spec)


def placed_arguments(mesh: Mesh, arguments: Any) -> Any:
    """Return shapes of arguments, or of their shapes, each of which says how it lies."""

    def place(leaf: Any) -> Any:
        return _placed(NamedSharding(mesh, spec_of(leaf)), leaf)

    return jax.tree.map(place, arguments)


def _placed(sharding: NamedSharding, leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _is_spec(tree: Any) -> bool:
    return isinstance(tree, PartitionSpec)


def mapped(mesh: Mesh, function: Callable[..., Any], arguments: Any, results: Any) -> Any:
    """Return a function of whole arrays that runs on each device's parts of them.

    Args:
        arguments: arrays or shapes, which say how they lie.
        results: specs of the results.
    """
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=jax.tree.map(spec_of, arguments),
        out_specs=results,
        check_vma=False,
    )
