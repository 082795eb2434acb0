"""Sum over devices, followed by the addition to the residual stream and its RMSNorm, for Hopper.

A program computes one row. It reads the row's part of every device directly from the memory of that
device, in the order of the devices, so every device gets the same bits (the "one-shot" all-reduce
of TensorRT-LLM and vLLM). A part crosses a link once per reader, so the kernel is for few rows: see
`pallas_kernels.device_sums`.

XLA launches a barrier over the devices before the kernel (jax 0.11.2). After the barrier all parts
are written and all semaphores are zero. The kernel ends only when every device has read its part,
because the next operation may overwrite it. A row waits only for the same row of the other devices,
and programs begin in the order of their rows, so there is no deadlock for any number of rows.
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

from pallas_kernels.row_arguments import NO_NORM, NormOptions

THREADS = 128
MOST_LOADS = 128
"""Most loads of a thread in flight, each of which has a register."""


@dataclasses.dataclass(frozen=True)
class _SumShape:
    """Compile-time properties of the Hopper kernel that sums over devices and normalizes."""

    devices: int  # number of devices
    names: tuple[str, ...]  # names of the operands and outputs, in order
    options: NormOptions  # of the norms
    dtype: Any  # dtype of the residual stream, or of the sum if there is no residual stream


def round_width(width: int, devices: int) -> int:
    """Return how many numbers of a row of `width` numbers are summed at once: a divisor of `width`.

    A thread holds the loaded numbers of all devices in registers. Fewer rounds are faster, since
    each takes the latency of a link.
    """
    blocks = width // THREADS
    most = max(1, MOST_LOADS // devices)
    return THREADS * max(count for count in range(1, most + 1) if blocks % count == 0)


def _kernel(shape: _SumShape, *arrays: Any) -> None:
    """Body of the kernel: sum one row of "delta" over the devices, as the program of that row.

    With a residual stream "x" it adds the row of x. With "scale" it also writes the RMSNorm "y".

    Args:
        shape: static properties, with the names of the arrays.
        arrays: refs of the operands and outputs, in the order of `shape.names`, then a semaphore.
    """
    *inputs, have_read = arrays
    refs = dict(zip(shape.names, inputs, strict=True))
    row, width = lax.axis_index("row"), refs["delta"].shape[1]
    size = round_width(width, shape.devices)
    # Neighbouring threads read neighbouring numbers. Reading four numbers at once would still be
    # loads of four bytes, because the alignment of another device's array is unknown.
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=1)
    zeros = plgpu.layout_cast(jnp.full((size,), 0, jnp.float32), layout)

    def load(ref: Any, *index: Any) -> jax.Array:
        return plgpu.load(ref, index, layout=layout, optimized=False).astype(jnp.float32)

    def rounded(x: jax.Array) -> jax.Array:
        return x.astype(shape.dtype).astype(jnp.float32)

    def each_round(compute: Callable[[Any], jax.Array], output: str) -> jax.Array:
        # Stores the result of `compute` for each part of the row. The sum of squares is per thread.

        def take_round(number: Any, squares: jax.Array) -> jax.Array:
            columns = pl.ds(number * size, size)
            values = compute(columns)
            refs[output][row, columns] = values.astype(refs[output].dtype)
            return squares + values * values

        return lax.fori_loop(0, width // size, take_round, zeros)

    def rms_factor(squares: jax.Array) -> jax.Array:
        return lax.rsqrt(jnp.sum(squares) / width + shape.options.eps)

    def normed(wide: jax.Array, factor: jax.Array, scale: jax.Array) -> jax.Array:
        # The result is float32. The caller rounds it.
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
    """Sum `delta` over devices on Hopper. With x, also compute ``add_norm`` of x and the sum.

    This is the kernel of ``pallas_kernels.sum_over_devices`` and, with x, of
    ``add_norm_over_devices``.

    Args:
        delta: [T,D] float32, D a multiple of 128, the array of this device.
        axis: name of the only mesh axis that the caller is mapped over.
        x: [T,D] residual stream to which the sum is added, or None.
        scale, delta_scale, options: as in ``add_norm``.

    Returns:
        Two [T,D] of x's dtype (float32 without x): the sum, with x added to it, and its norm. The
        sum twice if `scale` is None.
    """
    rows, width = delta.shape
    inputs = {"x": x, "delta": delta, "scale": scale, "delta_scale": delta_scale}
    operands = {name: array for name, array in inputs.items() if array is not None}
    outputs = ["sum"] + ["y"] * (scale is not None)
    dtype = delta.dtype if x is None else x.dtype
    shape = _SumShape(lax.axis_size(axis), (*operands, *outputs), options, jnp.dtype(dtype))

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
    by_name = dict(zip(outputs, results, strict=True))
    return by_name["sum"], by_name.get("y", by_name["sum"])
