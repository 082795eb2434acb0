"""Sums over the devices of a mesh, by XLA or by a kernel for Hopper.

The functions are called inside `jax.shard_map`, over the only axis of the mesh.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.devices import DeviceLimits, target_device
from pallas_kernels.implementation import deferred
from pallas_kernels.ops import add_norm
from pallas_kernels.row_arguments import NormOptions

OLDEST_JAX = (0, 11, 2)
"""From this version on, XLA launches a barrier over the devices before the kernel."""
MOST_DEVICES = 8
MOST_LINK_BYTES = 8 << 20
"""Most bytes that a device reads of the others: 19 us at 450 GB/s, the time of a small NCCL sum by
published figures. Predicted, not timed. For more rows, a ring moves less."""
WIDTHS = 128

_kernel = deferred("pallas_kernels.gpu.hopper_all_reduce", "sum_over_devices")


def device_sum_limit(device: DeviceLimits, rows: int, width: int, devices: int) -> str | None:
    """Return why the Hopper kernel cannot sum arrays [rows, width] over a number of devices.

    Returns:
        The reason, as the text of an error message, or None if the kernel can compute the sum.
    """
    if not device.has_wgmma:
        return f"it needs capability 9.0 and the device is {device}"
    if jax.__version_info__ < OLDEST_JAX:
        return f"it needs jax 0.11.2 or newer and this is {jax.__version__}"
    if not 2 <= devices <= MOST_DEVICES:
        return f"there are {devices} devices; allowed: 2 to {MOST_DEVICES}"
    if width % WIDTHS:
        return f"rows have {width} numbers; allowed: multiples of {WIDTHS}"
    read = (devices - 1) * rows * width * 4
    if read > MOST_LINK_BYTES:
        return f"a device would read {read} bytes of others; allowed: up to {MOST_LINK_BYTES}"
    return None


def sum_in_order(parts: jax.Array) -> jax.Array:
    """Add the arrays of all devices, `parts` [devices, ...], from the first to the last: [...].

    This order of the additions is the specification of the Hopper kernel.
    """
    first, *others = parts
    return functools.reduce(jnp.add, others, first)


def _has_kernel(rows: int, width: int, axis: str) -> bool:
    return device_sum_limit(target_device(), rows, width, lax.axis_size(axis)) is None


def sum_over_devices(x: jax.Array, axis: str) -> jax.Array:
    """Sum the arrays x of all devices of a mesh axis, element by element (an all-reduce).

    Every device gets the same bits. The Hopper kernel adds in the order of the devices. If it
    cannot run, XLA adds in its own order.

    Args:
        x: [..., D], the array of this device. Bfloat16, float16, float32 or float64.
        axis: name of the mesh axis.

    Returns:
        [..., D] of x's dtype. The kernel sums in float32.
    """
    rows, width = x.size // x.shape[-1], x.shape[-1]
    if x.dtype.itemsize > 4 or not _has_kernel(rows, width, axis):
        return lax.psum(x, axis)
    total, _ = _kernel(x.reshape(rows, width).astype(jnp.float32), axis)
    return total.astype(x.dtype).reshape(x.shape)


def add_norm_over_devices(
    x: jax.Array,
    delta: jax.Array,
    scale: jax.Array | None,
    delta_scale: jax.Array | None = None,
    *,
    axis: str,
    options: NormOptions,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Sum `delta` over the devices, add the sum to the residual stream x, and normalize.

    This is ``add_norm`` after a layer's attention or MLP that is sharded over devices. On Hopper
    one kernel launch does all of it.

    Args:
        x: [T,D] the residual stream, equal on all devices. Bfloat16, float16 or float32.
        delta: [parts,T,D] float32. Its sum over parts and devices is added to x. It may have more
            rows than x.
        scale, delta_scale, options: as in ``add_norm``.
        axis: name of the mesh axis.
        implementation: of ``add_norm``, if the Hopper kernel cannot run.

    Returns:
        The new residual stream and its norm, [T,D] of x's dtype each.

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """
    part = delta.sum(axis=0)[: len(x)]
    if _has_kernel(x.shape[0], x.shape[1], axis):
        return _kernel(part, axis, x, scale, delta_scale, options)
    total = lax.psum(part, axis)[None]
    return add_norm(x, total, scale, delta_scale, options=options, implementation=implementation)
