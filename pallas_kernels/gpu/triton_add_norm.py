"""Addition to the residual stream and the RMSNorm that follows, in Pallas-Triton, in one launch.

A program computes one row. XLA makes two launches of it, three at one row, and reads the sum again
to norm it.
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
from pallas_kernels.norm_arguments import NormOptions


def _norm_kernel(*refs: Any, has_delta: bool, options: NormOptions) -> None:
    """Compute one row. ``refs``: x, delta if there is one, scale; then the sum if there is, y."""
    x_ref, scale_ref = refs[0], refs[1 + has_delta]
    _, width = x_ref.shape
    row = pl.program_id(0)
    column = jnp.arange(power_of_two(width))
    mask = column < width
    rows = jnp.broadcast_to(row, column.shape)

    def load(ref: Any, *index: Any) -> jax.Array:
        return plt.load(ref.at[(*index, rows, column)], mask=mask, other=0.0)

    x = load(x_ref)
    if has_delta:
        delta_ref, sum_ref = refs[1], refs[3]
        if delta_ref.ndim == 2:
            delta = load(delta_ref)
        else:
            parts = [
                load(delta_ref, jnp.full_like(column, part)) for part in range(delta_ref.shape[0])
            ]
            delta = functools.reduce(jnp.add, parts).astype(x.dtype)
        x = (x.astype(jnp.float32) + delta.astype(jnp.float32)).astype(x.dtype)
        plt.store(sum_ref.at[rows, column], x, mask=mask)
    wide = x.astype(jnp.float32)
    scale = plt.load(scale_ref.at[column], mask=mask, other=0.0)
    y = wide * lax.rsqrt(jnp.sum(wide * wide) / width + options.eps)
    if options.rounds_last:
        y = y * (scale.astype(jnp.float32) + options.offset)
    else:
        y = scale.astype(jnp.float32) * y.astype(x.dtype).astype(jnp.float32)
    plt.store(refs[-1].at[rows, column], y.astype(x.dtype), mask=mask)


def add_norm(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array,
    options: NormOptions,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute ``pallas_kernels.add_norm``: the sum and its norm.

    Args:
        interpret: run on any device, slowly, as plain JAX operations.
    """
    tokens, width = x.shape
    row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    operands = [x, scale] if delta is None else [x, delta, scale]
    # From 8 to 32 numbers a thread.
    num_warps = min(max(power_of_two(width) // 512, 1), 16)
    results = pl.pallas_call(
        functools.partial(_norm_kernel, has_delta=delta is not None, options=options),
        grid=(tokens,),
        out_shape=(row,) if delta is None else (row, row),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(*operands)
    return (x if delta is None else results[0]), results[-1]
