"""The derivatives of a grouped product in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gradients import varying_as
from pallas_kernels.xla_grouped_matmul import row_tiles

TILE = 128  # rows


def grouped_gradient(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the derivatives of a product of rows, sorted by group, by the matrix of their group.

    Rows are cut into tiles of one group each. The cost depends on the number of rows and not on
    the number of groups.

    Args:
        x: [A,D] rows.
        w: [E,D,F] matrices of the groups.
        group_sizes: i32[E] rows of each group.
        g: [A,F] derivatives by the product. Those of rows after the last group have no effect.

    Returns:
        The derivatives by x, [A,D], zero for rows after the last group, and by w, [E,D,F]. Both
        are accumulated in float32 or wider.
    """
    (rows, inputs), outputs = x.shape, w.shape[2]
    exact = jnp.promote_types(x.dtype, jnp.float32)
    group, first, count = row_tiles(group_sizes, rows, TILE)
    end = jnp.cumsum(group_sizes)
    padded = [jnp.pad(array.astype(exact), ((0, TILE), (0, 0))) for array in (x, g)]
    zero = jnp.int32(0)

    def body(tile: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dx, dw = carry
        start, number = first[tile], group[tile]
        is_own = (start + jnp.arange(TILE) < end[number])[:, None]
        tile_x = lax.dynamic_slice(padded[0], (start, zero), (TILE, inputs))
        tile_g = lax.dynamic_slice(padded[1], (start, zero), (TILE, outputs))
        tile_g = jnp.where(is_own, tile_g, 0)
        matrix = lax.dynamic_slice(w, (number, zero, zero), (1, inputs, outputs))[0]
        part = lax.dot_general(tile_g, matrix.astype(exact), (((1,), (1,)), ((), ())))
        # Rows past the end of the group are zeros, and the next tile overwrites them.
        dx = lax.dynamic_update_slice(dx, part, (start, zero))
        change = lax.dot_general(tile_x, tile_g, (((0,), (0,)), ((), ())))
        before = lax.dynamic_slice(dw, (number, zero, zero), (1, inputs, outputs))
        return dx, lax.dynamic_update_slice(dw, before + change[None], (number, zero, zero))

    empty = jnp.zeros((rows + TILE, inputs), exact), jnp.zeros(w.shape, exact)
    empty = tuple(varying_as(zeros, x, w, group_sizes, g) for zeros in empty)
    dx, dw = lax.fori_loop(0, count, body, empty)
    return dx[:rows].astype(x.dtype), dw.astype(w.dtype)
