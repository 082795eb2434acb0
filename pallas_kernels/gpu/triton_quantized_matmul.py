"""Products with quantized weights in Pallas-Triton, which dequantizes them only in registers.

A program computes a tile of tokens and outputs in a loop over the inputs. Only codes are read from
memory, so a step of few tokens costs about as much as reading the codes (as in Frantar et al. 2024,
"MARLIN", without its layouts). In a grouped product, tiles of rows are cut as in
``triton_grouped_matmul``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu.triton_grouped_matmul import tile_plan
from pallas_kernels.quantized_codes import codes_a_row, decode, halves, scaled


class Tile(NamedTuple):
    """Sizes of a tile that a program of a quantized product computes.

    The fields are tokens, outputs, rows of codes per turn of the loop over the inputs, and warps.
    """

    tokens: int
    outputs: int
    rows: int
    warps: int = 4


def default_tile(tokens: int, dtype: jnp.dtype) -> Tile:
    """Return the `Tile` of a quantized product of `tokens` rows of activations of `dtype`.

    Tiles are small for few tokens, so that there are programs for every SM. They are large for many
    tokens, because each tile of tokens dequantizes the weight again. The tiles for 16 bits compile
    for an H200 without spills. They were not timed.
    """
    if tokens <= 16:
        return Tile(16, 32, 64)
    if tokens <= 64 or dtype.itemsize > 2:  # float32 has no tensor cores and spills a little
        return Tile(64, 64, 32)
    return Tile(128, 128, 32, warps=8)


def grouped_tile(rows: int, groups: int, dtype: jnp.dtype) -> Tile:
    """Return the `Tile` of a quantized grouped product, chosen by the mean rows of a group.

    `rows` is the number of rows of all groups, and `dtype` the dtype of the activations.
    """
    if dtype.itemsize > 2:  # without tensor cores: small tiles, many threads
        return Tile(16, 64, 32, warps=8)
    return default_tile(-(-rows // groups), dtype)


def _load_by_group(
    ref: Any, before: tuple, turn: Any, column: Any, column_mask: Any, tile: Tile, size: int
) -> Any:
    """Load the scales, zero points or minima of the rows of codes of one turn of the loop.

    A group of rows shares a number per output. A turn within a group loads one row of numbers, and
    a turn of whole groups one row per group. Numbers for every row of codes would take as much
    shared memory as the codes.

    Args:
        ref: scales, zero points or minima [*before, groups, O].
        before: indices of the leading dimensions.
        turn: turn of the loop over ``tile.rows`` rows.
        column: i32[outputs] columns to load.
        column_mask: bool[1, outputs], the columns that exist.
        tile: sizes of the tile.
        size: rows of a group.

    Returns:
        [tile.rows, outputs], or [1, outputs] if all rows of the turn are in one group.
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


class _Refs(NamedTuple):
    """Refs of the operands of a kernel for a product with a quantized weight."""

    x: Any  # [parts*T,R], the ``halves`` of x stacked, for R rows of codes
    values: Any  # [*before,R,O]
    scales: Any  # [*before,groups,O]
    zeros: Any  # zero points or minima, of the shape of scales, or None
    before: tuple[Any, ...]  # the number of the matrix, or () for a single one

    @property
    def grouped(self) -> bool:
        """Whether a column of the weight has several scales (one per group of inputs) or zeros."""
        return self.scales.shape[-2] > 1 or self.zeros is not None


def _grid(index: Any, other: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    return jnp.broadcast_to(index[:, None], shape), jnp.broadcast_to(other[None, :], shape)


def _adder(
    refs: _Refs, form: str, tile: Tile, token: Any, token_mask: Any, column: Any, column_mask: Any
) -> Callable[[Any, Any], Any]:
    """Return the body of the loop over the rows of codes of a quantized weight.

    The body takes the turn and the sums `acc` f32[tokens, outputs] of a tile. It dequantizes the
    turn's rows of codes, and returns `acc` plus their products with x. If a column has a single
    scale, the codes are not scaled.

    Args:
        refs: operands.
        form: form of the codes.
        tile: sizes of the tile.
        token, token_mask: i32[tokens] rows of x, and bool[tokens, 1], the rows that exist.
        column, column_mask: i32[outputs] columns, and bool[1, outputs], the columns that exist.
    """
    rows, groups = refs.values.shape[-2], refs.scales.shape[-2]
    tokens = refs.x.shape[0] // codes_a_row(form)

    def body(turn: Any, acc: Any) -> Any:
        row = turn * tile.rows + jnp.arange(tile.rows)
        mask = (row < rows)[:, None] & column_mask
        where = _grid(row, column, (tile.rows, tile.outputs))
        values = plt.load(refs.values.at[*refs.before, *where], mask=mask, other=0)
        weights = decode(values, form, jnp.float32)
        if refs.grouped:
            by_group = (refs.before, turn, column, column_mask, tile, rows // groups)
            scale = _load_by_group(refs.scales, *by_group)
            zero = None if refs.zeros is None else _load_by_group(refs.zeros, *by_group)
            weights = [scaled(weight, scale, zero, form) for weight in weights]
        for part, weight in enumerate(weights):
            where = _grid(token + part * tokens, row, (tile.tokens, tile.rows))
            x = plt.load(refs.x.at[*where], mask=token_mask & (row < rows)[None, :], other=0)
            weight = jnp.where(mask, weight, 0).astype(x.dtype)
            exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            acc += jnp.dot(x, weight, precision=exact, preferred_element_type=jnp.float32)
        return acc

    return body


def _kernel(
    x_ref: Any, values_ref: Any, scales_ref: Any, *rest: Any, form: str, tile: Tile
) -> None:
    """Body of the kernel: multiply a tile of tokens by a tile of columns of a quantized weight.

    The product is written to the output [T,O]. ``rest`` are the refs of zero points or minima, if
    the weight has them, and of the output.
    """
    *zeros_refs, out_ref = rest
    refs = _Refs(x_ref, values_ref, scales_ref, zeros_refs[0] if zeros_refs else None, ())
    tokens, columns = out_ref.shape
    token = pl.program_id(0) * tile.tokens + jnp.arange(tile.tokens)
    column = pl.program_id(1) * tile.outputs + jnp.arange(tile.outputs)
    token_mask, column_mask = (token < tokens)[:, None], (column < columns)[None, :]
    body = _adder(refs, form, tile, token, token_mask, column, column_mask)
    acc = jnp.zeros((tile.tokens, tile.outputs), jnp.float32)
    acc = lax.fori_loop(0, -(-values_ref.shape[0] // tile.rows), body, acc)
    if not refs.grouped:
        where = _grid(jnp.zeros((1,), jnp.int32), column, (1, tile.outputs))
        acc = acc * plt.load(scales_ref.at[*where], mask=column_mask, other=0).astype(jnp.float32)
    where = _grid(token, column, (tile.tokens, tile.outputs))
    plt.store(out_ref.at[*where], acc, mask=token_mask & column_mask)


def _grouped_kernel(
    x_ref: Any, values_ref: Any, scales_ref: Any, *rest: Any, form: str, tile: Tile
) -> None:
    """Body of the kernel: multiply a tile of rows of one group by columns of the group's weight.

    The product is written to the output [A,O]. ``rest`` are the refs of zero points or minima, if
    the weights have them, of the plan of tiles, and of the output.
    """
    *zeros_refs, plan_ref, out_ref = rest
    columns = out_ref.shape[1]
    matrices, rows, _ = values_ref.shape
    turn = pl.program_id(0)
    owner, first, size = plan_ref[turn, 0], plan_ref[turn, 1], plan_ref[turn, 2]
    token = first + jnp.arange(tile.tokens)
    token_mask = (jnp.arange(tile.tokens) < size)[:, None]
    matrix = jnp.minimum(owner, matrices - 1)
    refs = _Refs(x_ref, values_ref, scales_ref, zeros_refs[0] if zeros_refs else None, (matrix,))
    column = pl.program_id(1) * tile.outputs + jnp.arange(tile.outputs)
    column_mask = (column < columns)[None, :]
    live = (size > 0) & (owner < matrices)
    turns = jnp.where(live, jnp.int32(-(-rows // tile.rows)), 0)
    body = _adder(refs, form, tile, token, token_mask, column, column_mask)
    acc = jnp.zeros((tile.tokens, tile.outputs), jnp.float32)
    acc = lax.fori_loop(jnp.int32(0), turns, body, acc)
    if not refs.grouped:
        where = _grid(jnp.zeros((1,), jnp.int32), column, (1, tile.outputs))
        scale = plt.load(scales_ref.at[matrix, *where], mask=column_mask & live, other=0)
        acc = acc * scale.astype(jnp.float32)
    where = _grid(token, column, (tile.tokens, tile.outputs))
    plt.store(out_ref.at[*where], acc.astype(out_ref.dtype), mask=token_mask & column_mask)


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
    """Multiply x [T,I] by a quantized weight with Triton: f32[T,O].

    `tile` None selects the `default_tile`, and `interpret` runs the kernel as plain JAX. The other
    arguments are as in ``pallas_kernels.quantized_matmul``.
    """
    tokens, columns = x.shape[0], values.shape[1]
    tile = tile or default_tile(tokens, x.dtype)
    zero_points = () if zeros is None else (zeros,)
    return pl.pallas_call(
        functools.partial(_kernel, form=form, tile=tile),
        grid=(pl.cdiv(tokens, tile.tokens), pl.cdiv(columns, tile.outputs)),
        out_shape=jax.ShapeDtypeStruct((tokens, columns), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=3),
        interpret=interpret,
        name="quantized_matmul",
    )(jnp.concatenate(halves(x, form)), values, scales, *zero_points)


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
    """Multiply rows x [A,I], sorted by group, each by the quantized matrix of its group: [A,O].

    A Triton kernel computes the product, in x's dtype. `tile` None selects the `grouped_tile`, and
    `interpret` runs the kernel as plain JAX. The other arguments are as in
    ``pallas_kernels.quantized_grouped_matmul``.
    """
    total, columns = x.shape[0], values.shape[2]
    tile = tile or grouped_tile(total, values.shape[0], x.dtype)
    plan = tile_plan(group_sizes, total, tile.tokens)
    zero_points = () if zeros is None else (zeros,)
    return pl.pallas_call(
        functools.partial(_grouped_kernel, form=form, tile=tile),
        # Consecutive programs take the tiles of a group, so its matrix stays in the cache.
        grid=(plan.shape[0], pl.cdiv(columns, tile.outputs)),
        out_shape=jax.ShapeDtypeStruct((total, columns), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=3),
        interpret=interpret,
        name="quantized_grouped_matmul",
    )(jnp.concatenate(halves(x, form)), values, scales, *zero_points, plan)
