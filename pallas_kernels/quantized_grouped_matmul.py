"""The grouped matrix product with quantized matrices.

Codes, scales and zero points are as in ``quantized_matmul``, with a leading dimension for the
group: values [E,rows,O], scales and zeros [E,groups,O]. On CPU a loop over tiles of rows
dequantizes a block of columns of one matrix at a time, in float32. On a GPU the kernel of
``gpu/triton_quantized_matmul.py`` dequantizes in registers. A matrix without rows is never
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.implementation import deferred
from pallas_kernels.quantized_codes import halves
from pallas_kernels.quantized_matmul import block_product, block_width, check, choose
from pallas_kernels.xla_grouped_matmul import row_tiles, tile_rows

BLOCK_COLUMNS: Mapping[str, int] = MappingProxyType({"int8": 256, "fp8": 128, "int4": 128})
"""Outputs per turn of the loop on CPU, by form. fp8 and int4 take longer to decode, and run in 0.6
to 0.8 of the time with blocks that fit a nearer cache (768 inputs, 2 to 32 rows per tile)."""

_triton = deferred("pallas_kernels.gpu.triton_quantized_matmul", "quantized_grouped_matmul")


def quantized_grouped_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
    *,
    form: str,
    implementation: str = "auto",
) -> jax.Array:
    """Multiply rows, which are sorted by group, each by the quantized matrix of its group.

    Args:
        x: [A,I], bfloat16, float16, float32 or float64.
        values: [E,rows,O], the codes. See ``quantized_matmul``.
        scales: [E,groups,O], any float.
        zeros: [E,groups,O], zero points or minima as in ``quantized_matmul``, or None.
        group_sizes: i32[E], not negative, with a sum of at most A. Rows after the last group yield
            zeros.
        form: "int8", "fp8" or "int4".
        implementation: "auto" selects Triton on a GPU if x is not float64 and the codes are
            addressable, and XLA elsewhere.

    Returns:
        [A,O] of x's dtype. Accumulated in float32 (float64 for float64).

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """
    _check(x, values, scales, zeros, group_sizes, form, implementation)
    implementation = choose(implementation, x, values)
    if implementation == "xla":
        return _in_tiles(x, values, scales, zeros, group_sizes, form)
    return _triton(
        x,
        values,
        scales,
        zeros,
        group_sizes,
        form=form,
        interpret=implementation == "triton_interpret",
    )


def _in_tiles(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
    form: str,
) -> jax.Array:
    """Compute `quantized_grouped_matmul` in plain JAX, in a loop over tiles and column blocks.

    A turn multiplies a tile of rows of one group by a dequantized column block of the group's
    matrix. All column blocks have one width, so the last may overlap the one before. Returns [A,O]
    of x's dtype, zero for rows after the last group.
    """
    rows, columns = x.shape[0], values.shape[2]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    size = tile_rows(rows, values.shape[0])
    group, first, count = row_tiles(group_sizes, rows, size)
    width = block_width(BLOCK_COLUMNS[form], x.shape[1], columns)
    blocks, zero = -(-columns // width), jnp.int32(0)
    inputs = halves(jnp.pad(x, ((0, size), (0, 0))), form)

    def body(turn: jax.Array, out: jax.Array) -> jax.Array:
        tile = turn // blocks
        column = jnp.minimum(turn % blocks * width, columns - width)

        def cut(array: jax.Array) -> jax.Array:
            start, shape = (group[tile], zero, column), (1, array.shape[1], width)
            return lax.dynamic_slice(array, start, shape)[0]

        tile_inputs = [
            lax.dynamic_slice(part, (first[tile], zero), (size, part.shape[1])).astype(wide)
            for part in inputs
        ]
        block_zeros = None if zeros is None else cut(zeros)
        y = block_product(tile_inputs, cut(values), cut(scales), block_zeros, form)
        # Rows that a tile writes past the end of its group are overwritten by the next group's
        # tile.
        return lax.dynamic_update_slice(out, y, (first[tile], column))

    out = jnp.zeros((rows + size, columns), wide)
    out = lax.fori_loop(jnp.int32(0), count.astype(jnp.int32) * blocks, body, out)
    owned = jnp.arange(rows) < group_sizes.sum()
    return jnp.where(owned[:, None], out[:rows], 0).astype(x.dtype)


def _check(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
    form: str,
    implementation: str,
) -> None:
    """Raise ValueError if an argument of ``quantized_grouped_matmul`` has a wrong shape or dtype.

    The message names the argument and the expected shape or dtype.
    """
    if values.ndim != 3 or values.shape[0] < 1:
        raise ValueError(f"values have shape {values.shape}; expected [E, rows, O]")
    many = values.shape[0]
    for name, array in (("scales", scales), ("zeros", zeros)):
        if array is not None and (array.ndim != 3 or array.shape[0] != many):
            raise ValueError(f"{name} have shape {array.shape}; expected [{many}, groups, O]")

    def first(array: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)

    first_zeros = None if zeros is None else first(zeros)
    check(x, first(values), first(scales), first_zeros, form, implementation)
    if group_sizes.shape != (many,) or group_sizes.dtype != jnp.int32:
        got = f"{group_sizes.dtype}{list(group_sizes.shape)}"
        raise ValueError(f"group_sizes are {got}; expected int32[{many}], one a matrix of values")
