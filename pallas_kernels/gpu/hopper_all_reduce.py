"""Sum over devices, with the addition to the residual stream and the RMSNorm behind it, for Hopper.

A program computes one row. It reads that row's part of every device straight from that device's
memory, in the order of the devices, so that each device gets the same bits (the "one-shot"
all-reduce of TensorRT-LLM and vLLM). A part crosses a link once for each reader, so this is for few
rows: see `pallas_kernels.device_sums`.

XLA launches a barrier over the devices ahead of the kernel (jax 0.11.2), behind which all parts are
written and all semaphores are zero. The kernel itself ends when every device has read its part,
since what comes next may write there. A row waits for the same row of the other devices alone, and
programs begin in the order of their rows, so that no number of rows can wait in a circle.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.norm_arguments import NO_NORM, NormOptions

THREADS = 128
MOST_LOADS = 128
"""Loads of a thread that may be on their way, each of which has a register."""


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Static properties of the kernel.

    Attributes:
        devices: how many there are.
        names: of the arrays that it is given, in order.
        options: of the norms.
        dtype: of the residual stream; of the sum where there is none.
    """

    devices: int
    names: tuple[str, ...]
    options: NormOptions
    dtype: Any


def round_width(width: int, devices: int) -> int:
    """Return how many numbers of a row are summed at once, a divisor of its width.

    They are as many as a thread's registers hold of all devices: each round takes the latency of a
    link.
    """
    blocks = width // THREADS
    most = max(1, MOST_LOADS // devices)
    return THREADS * max(count for count in range(1, most + 1) if blocks % count == 0)


def _kernel(shape: _Shape, *arrays: Any) -> None:
    """Compute one row. ``arrays``: those with names, in order, and a semaphore."""
    *given, have_read = arrays
    refs = dict(zip(shape.names, given, strict=True))
    row, width = lax.axis_index("row"), refs["delta"].shape[1]
    size = round_width(width, shape.devices)
    # Neighbouring threads read neighbouring numbers. Four of them at once would be loads of four
    # bytes apart all the same: nothing says how the address of another device's array is aligned.
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=1)
    zeros = plgpu.layout_cast(jnp.full((size,), 0, jnp.float32), layout)

    def load(ref: Any, *index: Any) -> jax.Array:
        return plgpu.load(ref, index, layout=layout, optimized=False).astype(jnp.float32)

    def rounded(x: jax.Array) -> jax.Array:
        return x.astype(shape.dtype).astype(jnp.float32)

    def each_round(compute: Callable[[Any], jax.Array], output: str) -> jax.Array:
        """Store what is computed of each part of the row; return each thread's squares."""

        def take_round(number: Any, squares: jax.Array) -> jax.Array:
            columns = pl.ds(number * size, size)
            values = compute(columns)
            refs[output][row, columns] = values.astype(refs[output].dtype)
            return squares + values * values

        return lax.fori_loop(0, width // size, take_round, zeros)

    def rms_factor(squares: jax.Array) -> jax.Array:
        return lax.rsqrt(jnp.sum(squares) / width + shape.options.eps)

    def normed(wide: jax.Array, factor: jax.Array, scale: jax.Array) -> jax.Array:
        """Compute a norm: f32 that is to be rounded to the residual's dtype."""
        y, options = wide * factor, shape.options
        return y * (scale + options.offset) if options.rounds_last else scale * rounded(y)

    def with_residual(columns: Any, delta: jax.Array) -> jax.Array:
        if shape.options.factor != 1.0:
            delta = rounded(delta * shape.options.factor)
        return rounded(load(refs["x"], row, columns) + delta)

    devices = [jnp.int32(device) for device in range(shape.devices)]
    adds_at_once = "x" in refs and "delta_scale" not in refs

    def summed(columns: Any) -> jax.Array:
        parts = (load(plgpu.remote_ref(refs["delta"], peer), row, columns) for peer in devices)
        total = rounded(functools.reduce(jnp.add, parts))
        return with_residual(columns, total) if adds_at_once else total

    squares = each_round(summed, "sum")
    for peer in devices:
        pl.semaphore_signal(have_read, device_id=peer)
    if "delta_scale" in refs:
        delta_factor = rms_factor(squares)

        def added(columns: Any) -> jax.Array:
            delta = load(refs["sum"], row, columns)
            delta = rounded(normed(delta, delta_factor, load(refs["delta_scale"], columns)))
            return with_residual(columns, delta)

        squares = each_round(added, "sum")
    if "scale" in refs:
        factor = rms_factor(squares)

        def norm_of_sum(columns: Any) -> jax.Array:
            return normed(load(refs["sum"], row, columns), factor, load(refs["scale"], columns))

        each_round(norm_of_sum, "y")
    pl.semaphore_wait(have_read, shape.devices, decrement=False)


def sum_over_devices(
    delta: jax.Array,
    axis: str,
    x: jax.Array | None = None,
    scale: jax.Array | None = None,
    delta_scale: jax.Array | None = None,
    options: NormOptions = NO_NORM,
) -> tuple[jax.Array, jax.Array]:
    """Compute ``pallas_kernels.sum_over_devices``; with x ``add_norm_over_devices``.

    Args:
        delta: [T,D] float32, D a multiple of 128.
        axis: of the mesh that the caller is mapped over, which has no other.
    """
    rows, width = delta.shape
    given = {"x": x, "delta": delta, "scale": scale, "delta_scale": delta_scale}
    operands = {name: array for name, array in given.items() if array is not None}
    outputs = ["sum"] + ["y"] * (scale is not None)
    dtype = delta.dtype if x is None else x.dtype
    shape = _Shape(lax.axis_size(axis), (*operands, *outputs), options, jnp.dtype(dtype))

    def sum_over_devices_hopper(*refs: Any) -> None:
        _kernel(shape, *refs)

    results = plgpu.kernel(
        sum_over_devices_hopper,
        out_type=[jax.ShapeDtypeStruct((rows, width), dtype)] * len(outputs),
        grid=(rows,),
        grid_names=("row",),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands.values())
    found = dict(zip(outputs, results, strict=True))
    return found["sum"], found.get("y", found["sum"])
