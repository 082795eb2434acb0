"""Products with quantized weights in Pallas-Triton, which dequantizes them only in registers.

A program computes a tile of tokens and outputs in a loop over the inputs. Only codes are read from
memory, so a step of few tokens costs about as much as reading the codes (as in Frantar et al. 2024,
"MARLIN", without its layouts).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.quantized_codes import decode, halves, scaled


class Tile(NamedTuple):
    """Sizes of a program's tile: tokens, outputs, rows of codes per turn of its loop, warps."""

    tokens: int
    outputs: int
    rows: int
    warps: int = 4


def default_tile(tokens: int, dtype: jnp.dtype) -> Tile:
    """Return the `Tile` for `tokens` tokens of a dtype.

    Tiles are small for few tokens, so that there are programs for every SM. They are large for many
    tokens, because each tile of tokens dequantizes the weight again. The tiles for 16 bits compile
    for an H200 without spills. They were not timed.
    """
    if tokens <= 16:
        return Tile(16, 32, 64)
    if tokens <= 64 or dtype.itemsize > 2:  # float32 has no tensor cores and spills a little
        return Tile(64, 64, 32)
    return Tile(128, 128, 32, warps=8)


def load_by_group(
    ref: Any, before: tuple, turn: Any, column: Any, column_mask: Any, tile: Tile, size: int
) -> Any:
    """Load scales, zero points or minima for the rows of codes of one turn: [rows or 1, outputs].

    The rows of a group share one number. A turn within a group loads one row of numbers, and a turn
    of whole groups one row per group. Numbers for every row of codes would take as much shared
    memory as the codes.

    Args:
        ref: scales, zero points or minima [*before, groups, O].
        before: indices of the leading dimensions.
        turn: turn of the loop over ``tile.rows`` rows.
        column: i32[outputs] columns to load.
        column_mask: bool[1, outputs], the columns that exist.
        tile: sizes of the tile.
        size: rows of a group.
    """
    groups, start = ref.shape[-2], turn * tile.rows
    count = tile.rows
    if size % tile.rows == 0:
        count = 1
    elif tile.rows % size == 0:
        count = tile.rows // size
    index = start + jnp.arange(count) * (tile.rows // count)
    group = lax.div(index, jnp.full_like(index, size))
    shape = (count, tile.outputs)
    where = [jnp.broadcast_to(i, shape) for i in (group[:, None], column[None, :])]
    mask = jnp.broadcast_to((group < groups)[:, None], shape) & column_mask
    loaded = plt.load(ref.at[*before, *where], mask=mask, other=0)
    if count in (1, tile.rows):
        return loaded
    loaded = jnp.broadcast_to(loaded[:, None, :], (count, size, tile.outputs))
    return loaded.reshape(tile.rows, tile.outputs)


def _kernel(
    x_ref: Any, values_ref: Any, scales_ref: Any, *rest: Any, form: str, tile: Tile
) -> None:
    """Compute one tile of tokens and outputs and write it to the output [T,O].

    ``x_ref``: [parts*T,R], the ``halves`` of x stacked, for R rows of codes. ``rest``: zero points
    or minima if the weight has them, and the output.
    """
    zeros_ref, out_ref = rest if len(rest) == 2 else (None, *rest)
    tokens, columns = out_ref.shape
    rows, groups = values_ref.shape[0], scales_ref.shape[0]
    token = pl.program_id(0) * tile.tokens + jnp.arange(tile.tokens)
    column = pl.program_id(1) * tile.outputs + jnp.arange(tile.outputs)
    token_mask, column_mask = (token < tokens)[:, None], (column < columns)[None, :]
    grouped = groups > 1 or zeros_ref is not None

    def grid(index: Any, other: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
        return jnp.broadcast_to(index[:, None], shape), jnp.broadcast_to(other[None, :], shape)

    def body(turn: Any, acc: Any) -> Any:
        """Return acc [tokens, outputs] plus the product with the weight rows of loop turn `turn`.

        The rows of codes are dequantized first, by group if the scales are by group.
        """
        row = turn * tile.rows + jnp.arange(tile.rows)
        shape = (tile.rows, tile.outputs)
        mask = (row < rows)[:, None] & column_mask
        values = plt.load(values_ref.at[*grid(row, column, shape)], mask=mask, other=0)
        weights = decode(values, form, jnp.float32)
        if grouped:
            by_group = (turn, column, column_mask, tile, rows // groups)
            scale = load_by_group(scales_ref, (), *by_group)
            zero = None if zeros_ref is None else load_by_group(zeros_ref, (), *by_group)
            weights = [scaled(weight, scale, zero, form) for weight in weights]
        for part, weight in enumerate(weights):
            shape = (tile.tokens, tile.rows)
            where = grid(token + part * tokens, row, shape)
            x = plt.load(x_ref.at[*where], mask=token_mask & (row < rows)[None, :], other=0)
            weight = jnp.where(mask, weight, 0).astype(x.dtype)
            exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            acc += jnp.dot(x, weight, precision=exact, preferred_element_type=jnp.float32)
        return acc

    acc = jnp.zeros((tile.tokens, tile.outputs), jnp.float32)
    acc = lax.fori_loop(0, -(-rows // tile.rows), body, acc)
    if not grouped:
        first = jnp.zeros((1,), jnp.int32)
        where = grid(first, column, (1, tile.outputs))
        acc = acc * plt.load(scales_ref.at[*where], mask=column_mask, other=0).astype(jnp.float32)
    where = grid(token, column, (tile.tokens, tile.outputs))
    plt.store(out_ref.at[*where], acc, mask=token_mask & column_mask)


def quantized_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    *,
    form: str,
    tile: Tile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply x by a quantized weight with Triton: f32[T,O].

    ``tile`` None selects the `default_tile`.
    """
    tokens, columns = x.shape[0], values.shape[1]
    tile = tile or default_tile(tokens, x.dtype)
    operands = [
        jnp.concatenate(halves(x, form)),
        values,
        scales,
        *(() if zeros is None else (zeros,)),
    ]
    return pl.pallas_call(
        functools.partial(_kernel, form=form, tile=tile),
        grid=(pl.cdiv(tokens, tile.tokens), pl.cdiv(columns, tile.outputs)),
        out_shape=jax.ShapeDtypeStruct((tokens, columns), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=3),
        interpret=interpret,
        name="quantized_matmul",
    )(*operands)
