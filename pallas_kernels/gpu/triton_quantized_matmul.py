"""Quantized weights times activations in Pallas-Triton: dequantized in registers, never in memory.

One program per tile of tokens and outputs, a loop over the inputs. The codes are what is read from
memory, so a step of few tokens costs about the codes' bytes (as in Frantar et al. 2024, "MARLIN",
without its layouts).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.quantized_codes import decode, halves


class Tile(NamedTuple):
    """Sizes of a program's tile: tokens, outputs, and rows of codes in one turn of its loop."""

    tokens: int
    outputs: int
    rows: int
    warps: int = 4


def default_tile(tokens: int, dtype: jnp.dtype) -> Tile:
    """In 16 bits compiled for an H200 without spills (scripts.gpu.compile_offline), not timed yet.

    Small tiles for few tokens, so that there are programs for every SM; large ones for many, since
    each tile of tokens dequantizes the weight again.
    """
    if tokens <= 16:
        return Tile(16, 32, 64)
    if tokens <= 64 or dtype.itemsize > 2:  # float32 has no tensor cores here, and spills a little
        return Tile(64, 64, 32)
    return Tile(128, 128, 32, warps=8)


def _kernel(
    x_ref: Any, values_ref: Any, scales_ref: Any, *rest: Any, form: str, tile: Tile
) -> None:
    """One tile. x_ref [parts*T,R]: the halves of x below each other; rest: zeros, the output."""
    zeros_ref, out_ref = rest if len(rest) == 2 else (None, *rest)
    tokens, columns = out_ref.shape
    rows, groups = values_ref.shape[0], scales_ref.shape[0]
    token = pl.program_id(0) * tile.tokens + jnp.arange(tile.tokens)
    column = pl.program_id(1) * tile.outputs + jnp.arange(tile.outputs)
    token_mask, column_mask = (token < tokens)[:, None], (column < columns)[None, :]
    grouped = groups > 1 or zeros_ref is not None

    def at(index: Any, other: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
        return jnp.broadcast_to(index[:, None], shape), jnp.broadcast_to(other[None, :], shape)

    def body(turn: Any, acc: Any) -> Any:
        row = turn * tile.rows + jnp.arange(tile.rows)
        shape = (tile.rows, tile.outputs)
        mask = (row < rows)[:, None] & column_mask
        values = plt.load(values_ref.at[*at(row, column, shape)], mask=mask, other=0)
        weights = decode(values, form, jnp.float32)
        if grouped:
            group = lax.div(row, jnp.full_like(row, rows // groups))
            where = at(group, column, shape)
            scale = plt.load(scales_ref.at[*where], mask=mask, other=0).astype(jnp.float32)
            if zeros_ref is not None:
                zero = plt.load(zeros_ref.at[*where], mask=mask, other=0).astype(jnp.int32)
                weights = [weight - (zero.astype(jnp.float32) - 8) for weight in weights]
            weights = [weight * scale for weight in weights]
        for part, weight in enumerate(weights):
            shape = (tile.tokens, tile.rows)
            where = at(token + part * tokens, row, shape)
            x = plt.load(x_ref.at[*where], mask=token_mask & (row < rows)[None, :], other=0)
            weight = jnp.where(mask, weight, 0).astype(x.dtype)
            exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            acc += jnp.dot(x, weight, precision=exact, preferred_element_type=jnp.float32)
        return acc

    acc = jnp.zeros((tile.tokens, tile.outputs), jnp.float32)
    acc = lax.fori_loop(0, -(-rows // tile.rows), body, acc)
    if not grouped:
        first = jnp.zeros((1,), jnp.int32)
        where = at(first, column, (1, tile.outputs))
        acc = acc * plt.load(scales_ref.at[*where], mask=column_mask, other=0).astype(jnp.float32)
    where = at(token, column, (tile.tokens, tile.outputs))
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
    """See ``pallas_kernels.quantized_matmul``; [T,I] -> f32[T,O]."""
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
