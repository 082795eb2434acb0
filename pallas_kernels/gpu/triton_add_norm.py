"""Addition to the residual stream and the RMSNorm of the sum, in Pallas-Triton, in one launch.

A program computes one row. XLA uses two launches, or three for one row, and reads the sum again to
normalize it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu.triton_tile import power_of_two
from pallas_kernels.row_arguments import NormOptions


def _norm_kernel(*arrays: Any, names: tuple[str, ...], options: NormOptions) -> None:
    """Body of the kernel: compute one row of ``add_norm``, the sum "sum" and its norm "y".

    `arrays` are refs of the operands and outputs named by `names`, in that order.
    """
    refs = dict(zip(names, arrays, strict=True))
    _, width = refs["x"].shape
    row = pl.program_id(0)
    column = jnp.arange(power_of_two(width))
    mask = column < width
    rows = jnp.broadcast_to(row, column.shape)

    def load(ref: Any, *index: Any) -> jax.Array:
        return plt.load(ref.at[(*index, rows, column)], mask=mask, other=0.0)

    def normed(numbers: jax.Array, name: str) -> jax.Array:
        # The result is float32. The caller rounds it.
        dtype = refs["x"].dtype
        scale = plt.load(refs[name].at[column], mask=mask, other=0.0).astype(jnp.float32)
        wide = numbers.astype(jnp.float32)
        y = wide * lax.rsqrt(jnp.sum(wide * wide) / width + options.eps)
        if options.rounds_last:
            return y * (scale + options.offset)
        return scale * y.astype(dtype).astype(jnp.float32)

    x = load(refs["x"])
    if "delta" in refs:
        delta_ref = refs["delta"]
        if delta_ref.ndim == 2:
            delta = load(delta_ref)
        else:
            parts = [
                load(delta_ref, jnp.full_like(column, part)) for part in range(delta_ref.shape[0])
            ]
            delta = functools.reduce(jnp.add, parts).astype(x.dtype)
        if "delta_scale" in refs:
            delta = normed(delta, "delta_scale").astype(x.dtype)
        if options.factor != 1.0:
            delta = (delta.astype(jnp.float32) * options.factor).astype(x.dtype)
        x = (x.astype(jnp.float32) + delta.astype(jnp.float32)).astype(x.dtype)
        plt.store(refs["sum"].at[rows, column], x, mask=mask)
    if "scale" in refs:
        plt.store(refs["y"].at[rows, column], normed(x, "scale").astype(x.dtype), mask=mask)


def add_norm(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array | None,
    delta_scale: jax.Array | None,
    options: NormOptions,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Add delta to the residual stream x [T,D] and normalize the sum, in one Triton launch.

    Arguments are as in ``pallas_kernels.add_norm``. `interpret` runs the kernel as plain JAX.

    Returns:
        The sum (x if delta is None) and its RMSNorm (the sum if scale is None), [T,D] of x's dtype.
    """
    tokens, width = x.shape
    inputs = {"x": x, "delta": delta, "scale": scale, "delta_scale": delta_scale}
    operands = {name: array for name, array in inputs.items() if array is not None}
    outputs = ["sum"] * (delta is not None) + ["y"] * (scale is not None)
    # Four numbers per thread, up to the most threads: the fastest choice at most sizes on an H200.
    num_warps = min(max(power_of_two(width) // 128, 1), 32)
    results = pl.pallas_call(
        functools.partial(_norm_kernel, names=(*operands, *outputs), options=options),
        grid=(tokens,),
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype),) * len(outputs),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(*operands.values())
    by_name = dict(zip(outputs, results, strict=True))
    total = by_name.get("sum", x)
    return total, by_name.get("y", total)
