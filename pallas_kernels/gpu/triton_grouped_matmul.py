"""The grouped matrix product in Pallas-Triton.

A program multiplies a tile of rows of one group by a block of columns of the group's matrix
(MegaBlocks, Gale et al. 2022, without its padding: the device cuts tiles from the group sizes, and
the shapes alone bound their number). Rows after the last group form an additional group without a
matrix, whose result is zero.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.arguments import GroupedCase, grouped_case
from pallas_kernels.devices import target_device
from pallas_kernels.gpu.triton_tile import ceil_div, owner, running_sum
from pallas_kernels.gpu.tuning import GroupedConfig, grouped_config


def tile_plan(group_sizes: jax.Array, rows: int, tile: int) -> jax.Array:
    """Divide the rows of a grouped product into tiles of at most `tile` rows of one group.

    Args:
        group_sizes: i32[E] rows of each group.
        rows: number of rows of all groups and of padding after them.
        tile: most rows of a tile.

    Returns:
        i32[tiles, 3]: group (the number of groups for rows after the last group), first row, number
        of rows (0 for unused tiles).
    """
    groups = group_sizes.shape[0]
    sizes = jnp.concatenate([group_sizes, (rows - group_sizes.sum(dtype=jnp.int32))[None]])
    tiles, ends = ceil_div(sizes, tile), running_sum(sizes)
    last = running_sum(tiles)
    count = rows // tile + min(groups + 1, rows)
    group = owner(last, count)
    is_used = group <= groups
    group = jnp.minimum(group, groups)
    within = (jnp.arange(count, dtype=jnp.int32) - (last - tiles)[group]) * tile
    size = jnp.where(is_used, jnp.minimum(sizes[group] - within, tile), 0)
    return jnp.stack([group, (ends - sizes)[group] + within, size], axis=1)


def _kernel(
    x_ref: Any, w_ref: Any, plan_ref: Any, out_ref: Any, *, case: GroupedCase, config: GroupedConfig
) -> None:
    """Body of the kernel: multiply one tile of rows by a column block of its group's matrix.

    The product is written to out [A,F]. `plan_ref` is the result of `tile_plan`.
    """
    rows, columns, inner = config.block_rows, config.block_columns, config.block_inner
    tile, block = pl.program_id(0), pl.program_id(1)
    group, first, size = plan_ref[tile, 0], plan_ref[tile, 1], plan_ref[tile, 2]
    valid = jnp.arange(rows) < size
    row = jnp.broadcast_to((first + jnp.arange(rows))[:, None], (rows, inner))
    matrix = jnp.minimum(group, case.E - 1)
    column = block * columns + jnp.arange(columns)
    whole = case.D % inner == 0 and case.F % columns == 0

    def weights(start: jax.Array, k: jax.Array) -> jax.Array:
        """Load rows [start, start + inner) of this program's columns: [inner, columns].

        The rows and columns belong to the matrix of the tile's group. `k` holds the same row
        numbers, i32[inner]. Elements outside the matrix are zero.
        """
        if whole:
            return w_ref[matrix, pl.ds(start, inner), pl.ds(block * columns, columns)]
        shape = (inner, columns)
        down, across = (
            jnp.broadcast_to(k[:, None], shape),
            jnp.broadcast_to(column[None, :], shape),
        )
        mask = (down < case.D) & (across < case.F)
        return plt.load(w_ref.at[matrix, down, across], mask=mask, other=0.0)

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        """Return the sums acc [rows, columns] plus the products of the inputs of loop step i."""
        k = i * inner + jnp.arange(inner)
        across = jnp.broadcast_to(k[None, :], (rows, inner))
        mask = jnp.broadcast_to(valid[:, None], (rows, inner))
        if case.D % inner:
            mask &= across < case.D
        tile_x = plt.load(x_ref.at[row, across], mask=mask, other=0.0)
        # The default precision of float32 on the GPU is TF32, which is not float32.
        precision = lax.Precision.HIGHEST if tile_x.dtype == jnp.float32 else None
        return acc + plt.dot(tile_x, weights(i * inner, k), precision=precision)

    turns = jnp.where((size > 0) & (group < case.E), jnp.int32(-(-case.D // inner)), 0)
    acc = jnp.zeros((rows, columns), jnp.float32)
    acc = lax.fori_loop(jnp.int32(0), turns, step, acc)
    shape = (rows, columns)
    across = jnp.broadcast_to(column[None, :], shape)
    mask = jnp.broadcast_to(valid[:, None], shape) & (across < case.F)
    address = out_ref.at[jnp.broadcast_to((first + jnp.arange(rows))[:, None], shape), across]
    plt.store(address, acc.astype(out_ref.dtype), mask=mask)


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    config: GroupedConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply rows x [A,D], sorted by group, each by the matrix of its group, with Triton.

    Args:
        x: [A,D] rows.
        w: [E,D,F] matrices of the groups.
        group_sizes: i32[E] rows of each group.
        config: block sizes. None reads the tuning table.
        interpret: run the kernel as plain JAX on any device.

    Returns:
        [A,F] of x's dtype, zero for rows after the last group.
    """
    case = grouped_case(target_device(), x, w, group_sizes)
    config = config or grouped_config(case)
    plan = tile_plan(group_sizes, case.A, config.block_rows)
    return pl.pallas_call(
        functools.partial(_kernel, case=case, config=config),
        # Consecutive programs take the tiles of a group, so its matrix stays in the cache.
        grid=(plan.shape[0], -(-case.F // config.block_columns)),
        out_shape=jax.ShapeDtypeStruct((case.A, case.F), x.dtype),
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(x, w, plan)
