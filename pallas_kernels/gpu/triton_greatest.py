"""Argmax of each row, and a check that all numbers are finite, in Pallas-Triton, in one pass.

A row of logits is long and a call may have a single row. So each program reduces a piece of a row,
and a second kernel, which reads little, reduces the pieces of a row. XLA reads the logits twice.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu.triton_tile import power_of_two

PIECE = 4096
"""Numbers that a program reads."""
LARGEST = float(np.finfo(np.float32).max)
NOT_FINITE = -1
"""Index that stands for a row whose numbers are not all finite."""


def _first_greatest(values: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    greatest = jnp.max(values)
    none = jnp.full_like(index, jnp.iinfo(jnp.int32).max)
    return greatest, jnp.min(jnp.where(values == greatest, index, none))


def _piece_kernel(x_ref: Any, value_ref: Any, index_ref: Any) -> None:
    piece, row = pl.program_id(0), pl.program_id(1)
    column = piece * PIECE + jnp.arange(PIECE)
    exists = column < x_ref.shape[1]
    x = plt.load(x_ref.at[jnp.broadcast_to(row, column.shape), column], mask=exists, other=-LARGEST)
    is_bad = ~(jnp.abs(x) <= LARGEST)  # true for a NaN
    x = jnp.where(exists & ~is_bad, x, -jnp.inf)
    greatest, index = _first_greatest(x, column)
    index = jnp.where(jnp.sum(is_bad.astype(jnp.int32), dtype=jnp.int32) > 0, NOT_FINITE, index)
    value_ref[row, piece] = greatest
    index_ref[row, piece] = index


def _row_kernel(value_ref: Any, index_ref: Any, out_ref: Any) -> None:
    row, pieces = pl.program_id(0), value_ref.shape[1]
    piece = jnp.arange(power_of_two(pieces))
    index = jnp.broadcast_to(row, piece.shape), piece
    values = plt.load(value_ref.at[index], mask=piece < pieces, other=-jnp.inf)
    indices = plt.load(index_ref.at[index], mask=piece < pieces, other=jnp.iinfo(jnp.int32).max)
    best = _first_greatest(values, indices)[1]
    out_ref[row] = jnp.where(jnp.min(indices) < 0, NOT_FINITE, best)


def greatest(x: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Return the argmax of each row of x [R,V] with Triton: i32[R].

    The result is -1 for a row with a NaN or an infinity. `interpret` runs the kernels as plain JAX.
    """
    rows, columns = x.shape
    pieces = -(-columns // PIECE)
    shape = (rows, pieces)
    call = functools.partial(pl.pallas_call, interpret=interpret)
    best = call(
        _piece_kernel,
        grid=(pieces, rows),
        out_shape=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ),
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        name="greatest_of_pieces",
    )(x)
    return call(
        _row_kernel,
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.int32),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        name="greatest_of_rows",
    )(*best)
