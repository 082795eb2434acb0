"""The grouped matrix product in plain JAX, for CPU: cost depends on the rows, not on the groups.

Rows are cut into tiles of one group each. A loop over the tiles reads the matrix of the group and
multiplies. The matrix of a group without rows is never read. `lax.ragged_dot` would multiply every
row by the matrix of every group, on CPU and on GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

MOST_ROWS = 32


def tile_rows(rows: int, groups: int) -> int:
    """Return the number of rows of a tile of a grouped product: a power of two from 2 to 32.

    The number is near twice the mean of `rows` rows over `groups` groups. Half a tile of padding
    costs as much as reading a matrix twice. With one row of 16-bit numbers, XLA would convert the
    matrix to float32 in a separate pass.
    """
    fitting = 1 << max(1, (2 * rows // groups).bit_length() - 1)
    return min(fitting, MOST_ROWS)


def row_tiles(
    group_sizes: jax.Array, rows: int, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cut the rows of a grouped product into tiles of at most `size` rows of one group.

    Args:
        group_sizes: i32[E] rows of each group.
        rows: number of rows of all groups and of padding.
        size: most rows of a tile.

    Returns:
        i32[tiles] group of each tile, i32[tiles] first row of each tile, and the number of tiles.
        Entries after that number are undefined.
    """
    groups = group_sizes.shape[0]
    end = jnp.cumsum(group_sizes)
    tiles = -(-group_sizes // size)
    last = jnp.cumsum(tiles)
    # At most one tile of each group is not full.
    item = jnp.arange(rows // size + min(groups, rows), dtype=jnp.int32)
    group = jnp.searchsorted(last, item, side="right", method="scan_unrolled")
    group = jnp.minimum(group, groups - 1).astype(jnp.int32)
    first = (end - group_sizes)[group] + (item - (last - tiles)[group]) * size
    return group, first.astype(jnp.int32), last[-1]


def grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiply rows x [A,D], sorted by group, each by the matrix of its group, in plain JAX.

    `w` [E,D,F] holds the matrices and `group_sizes` i32[E] the rows of each group. Returns [A,F] of
    x's dtype, zero for rows after the last group.
    """
    rows, inputs = x.shape
    groups, _, outputs = w.shape
    exact = jnp.promote_types(x.dtype, jnp.float32)
    size = tile_rows(rows, groups)
    group, first, count = row_tiles(group_sizes, rows, size)
    zero = jnp.int32(0)
    x = jnp.pad(x, ((0, size), (0, 0)))

    def body(tile: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # out is [A + size, F]. w [groups, inputs, outputs] is carried unchanged.
        out, w = carry
        if w.dtype != exact:
            # A dot converts 16-bit weights to float32. Without this barrier, XLA would move the
            # conversion out of the loop and convert the weights of all groups.
            w = lax.optimization_barrier(w)
        tile_x = lax.dynamic_slice(x, (first[tile], zero), (size, inputs))
        matrix = lax.dynamic_slice(w, (group[tile], zero, zero), (1, inputs, outputs))[0]
        y = lax.dot(tile_x, matrix, preferred_element_type=exact)
        # Rows that a tile writes past the end of its group are overwritten by the next group's
        # tile.
        return lax.dynamic_update_slice(out, y, (first[tile], zero)), w

    out = jnp.zeros((rows + size, outputs), exact)
    out, _ = lax.fori_loop(0, count, body, (out, w))
    owned = jnp.arange(rows) < group_sizes.sum()
    return jnp.where(owned[:, None], out[:rows], 0).astype(x.dtype)
