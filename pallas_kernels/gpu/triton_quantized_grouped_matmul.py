"""Grouped products with quantized weights in Pallas-Triton.

Tiles of rows are cut as in ``triton_grouped_matmul``. Each program dequantizes a block of columns
of its group's matrix in registers, as in ``triton_quantized_matmul``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu.triton_grouped_matmul import tile_plan
from pallas_kernels.gpu.triton_quantized_matmul import Tile, default_tile, load_by_group
from pallas_kernels.quantized_codes import decode, halves, scaled


def grouped_tile(rows: int, groups: int, dtype: jnp.dtype) -> Tile:
    """Return the `Tile` for `rows` rows of all groups, chosen by the mean rows of a group."""
    if dtype.itemsize > 2:  # without tensor cores: small tiles, many threads
        return Tile(16, 64, 32, warps=8)
    return default_tile(-(-rows // groups), dtype)


def _kernel(
    x_ref: Any, values_ref: Any, scales_ref: Any, *rest: Any, form: str, tile: Tile
) -> None:
    """Compute one tile of rows and columns and write it to the output [A,O].

    ``x_ref``: [parts*A,R], the ``halves`` of x stacked, for R rows of codes. ``rest``: zero points
    or minima if the weights have them, the plan of tiles, and the output.
    """
    *zeros_refs, plan_ref, out_ref = rest
    total, columns = out_ref.shape
    matrices, rows, _ = values_ref.shape
    groups, grouped = scales_ref.shape[1], scales_ref.shape[1] > 1 or bool(zeros_refs)
    turn = pl.program_id(0)
    owner, first, size = plan_ref[turn, 0], plan_ref[turn, 1], plan_ref[turn, 2]
    token = first + jnp.arange(tile.tokens)
    token_mask = (jnp.arange(tile.tokens) < size)[:, None]
    matrix = jnp.minimum(owner, matrices - 1)
    column = pl.program_id(1) * tile.outputs + jnp.arange(tile.outputs)
    column_mask = (column < columns)[None, :]

    def grid(index: Any, other: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
        return jnp.broadcast_to(index[:, None], shape), jnp.broadcast_to(other[None, :], shape)

    def body(step: Any, acc: Any) -> Any:
        """Return acc [tokens, outputs] plus the product with the weight rows of loop step `step`.

        The rows of codes are dequantized first, by group if the scales are by group.
        """
        row = step * tile.rows + jnp.arange(tile.rows)
        mask = (row < rows)[:, None] & column_mask
        where = grid(row, column, (tile.rows, tile.outputs))
        values = plt.load(values_ref.at[matrix, *where], mask=mask, other=0)
        weights = decode(values, form, jnp.float32)
        if grouped:
            by_group = ((matrix,), step, column, column_mask, tile, rows // groups)
            scale = load_by_group(scales_ref, *by_group)
            zero = load_by_group(zeros_refs[0], *by_group) if zeros_refs else None
            weights = [scaled(weight, scale, zero, form) for weight in weights]
        for part, weight in enumerate(weights):
            where = grid(token + part * total, row, (tile.tokens, tile.rows))
            x = plt.load(x_ref.at[*where], mask=token_mask & (row < rows)[None, :], other=0)
            weight = jnp.where(mask, weight, 0).astype(x.dtype)
            exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            acc += jnp.dot(x, weight, precision=exact, preferred_element_type=jnp.float32)
        return acc

    live = (size > 0) & (owner < matrices)
    turns = jnp.where(live, jnp.int32(-(-rows // tile.rows)), 0)
    acc = jnp.zeros((tile.tokens, tile.outputs), jnp.float32)
    acc = lax.fori_loop(jnp.int32(0), turns, body, acc)
    if not grouped:
        where = grid(jnp.zeros((1,), jnp.int32), column, (1, tile.outputs))
        scale = plt.load(scales_ref.at[matrix, *where], mask=column_mask & live, other=0)
        acc = acc * scale.astype(jnp.float32)
    where = grid(token, column, (tile.tokens, tile.outputs))
    plt.store(out_ref.at[*where], acc.astype(out_ref.dtype), mask=token_mask & column_mask)


def quantized_grouped_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
    *,
    form: str,
    tile: Tile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply rows, sorted by group, by the quantized matrix of their group, with Triton: [A,O].

    ``tile`` None selects the `grouped_tile`.
    """
    total, columns = x.shape[0], values.shape[2]
    tile = tile or grouped_tile(total, values.shape[0], x.dtype)
    plan = tile_plan(group_sizes, total, tile.tokens)
    zero_points = () if zeros is None else (zeros,)
    return pl.pallas_call(
        functools.partial(_kernel, form=form, tile=tile),
        # Consecutive programs take the tiles of a group, so its matrix stays in the cache.
        grid=(plan.shape[0], pl.cdiv(columns, tile.outputs)),
        out_shape=jax.ShapeDtypeStruct((total, columns), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=3),
        interpret=interpret,
        name="quantized_grouped_matmul",
    )(jnp.concatenate(halves(x, form)), values, scales, *zero_points, plan)
