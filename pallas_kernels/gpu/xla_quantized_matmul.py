"""The product with a quantized weight in plain JAX, for a GPU on which Triton does not compile.

Codes are stored output-major there. Then a product of a few rows is one reduction per row over the
same codes. XLA fuses up to eight reductions with the decoding of the codes, so the codes are read
once and the weight is never stored in floats. With input-major codes it would fuse two. A product
of more rows needs the weight in x's dtype, one block of outputs at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized_codes import (
    GPU_BLOCK_BYTES,
    code_offset,
    codes_a_row,
    decode,
    halves,
    is_minimum,
    scaled,
)

MOST_ROWS = 16
"""Most rows that are computed by reductions. More would read the codes more than twice."""


def output_major_matmul(
    x: jax.Array, values: jax.Array, scales: jax.Array, zeros: jax.Array | None, *, form: str
) -> jax.Array:
    """Multiply x [T,I] by a quantized weight whose arrays are transposed, in plain JAX.

    Arguments are as in ``pallas_kernels.output_major_matmul``. Returns [T,O], float32 or wider.
    """
    if x.shape[0] <= MOST_ROWS:
        return _reduced(x, values, scales, zeros, form)
    return _in_blocks(x, values, scales, zeros, form)


def _reduced(
    x: jax.Array, values: jax.Array, scales: jax.Array, zeros: jax.Array | None, form: str
) -> jax.Array:
    """Multiply few rows x [T,I] by a transposed quantized weight, with one reduction per row.

    XLA stores the weight in floats if it is expensive to compute. So scales multiply products, not
    weights, and zero points are a product of their own with the inputs summed by group. Returns
    [T,O], float32 or wider.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    weights, scale = decode(values, form, wide), scales.astype(wide)
    inputs = [part.astype(wide) for part in halves(x, form)]
    if scale.shape[1] == 1:
        out = _row_sums(weights, inputs) * scale[:, 0]
    else:
        out = _row_sums(weights, inputs, _spread(scale, values.shape))
    if zeros is None:
        return out
    sums = x.astype(wide).reshape(x.shape[0], zeros.shape[1], -1).sum(axis=2)
    if is_minimum(zeros):
        return out + _row_sums([zeros.astype(wide) + code_offset(form) * scale], [sums])
    return out - _row_sums([zeros.astype(wide) - code_offset(form)], [sums], scale)


def _row_sums(
    weights: list[jax.Array], inputs: list[jax.Array], factor: jax.Array | None = None
) -> jax.Array:
    # [T,O] from lists of parts of inputs [T,I] and of weights [O,I]. The products of the parts are
    # added, and `factor` [O,I] multiplies the sums.

    def row(index: int) -> jax.Array:
        terms = [w * part[index] for w, part in zip(weights, inputs, strict=True)]
        products = sum(terms[1:], terms[0])
        return (products if factor is None else products * factor).sum(axis=1)

    return jnp.stack([row(index) for index in range(inputs[0].shape[0])])


def _spread(groups: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    each = shape[1] // groups.shape[1]
    return jnp.broadcast_to(groups[..., None], (*groups.shape, each)).reshape(shape)


def _in_blocks(
    x: jax.Array, values: jax.Array, scales: jax.Array, zeros: jax.Array | None, form: str
) -> jax.Array:
    """Multiply x [T,I] by a transposed quantized weight, one block of outputs at a time.

    A block of the weight is dequantized and multiplied. Each block waits for the one before, so
    only one dequantized block is in memory. Returns [T,O], float32 or wider.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    outputs, inputs = values.shape[0], values.shape[1] * codes_a_row(form)
    width = max(128, GPU_BLOCK_BYTES // (inputs * x.dtype.itemsize) // 128 * 128)
    parts = halves(x, form)
    blocks: list[jax.Array] = []
    for start in range(0, outputs, width):
        cut = slice(start, min(start + width, outputs))
        codes = values[cut]
        if blocks:  # a dequantized block takes the memory of the one before
            codes, blocks[-1] = lax.optimization_barrier((codes, blocks[-1]))
        zero = None if zeros is None else zeros[cut]
        weights, scale = _weights(codes, scales[cut], zero, form, wide)
        products = [
            lax.dot_general(
                part, weight.astype(x.dtype), (((1,), (1,)), ((), ())), preferred_element_type=wide
            )
            for part, weight in zip(parts, weights, strict=True)
        ]
        blocks.append(sum(products, jnp.zeros((), wide)) * scale)
    return jnp.concatenate(blocks, axis=1)


def _weights(
    values: jax.Array, scales: jax.Array, zeros: jax.Array | None, form: str, dtype: jnp.dtype
) -> tuple[list[jax.Array], jax.Array]:
    weights, scale = decode(values, form, dtype), scales.astype(dtype)
    if zeros is None and scale.shape[1] == 1:
        return weights, scale[:, 0]
    factor = _spread(scale, values.shape)
    zero = None if zeros is None else _spread(zeros, values.shape)
    return [scaled(part, factor, zero, form) for part in weights], jnp.ones((), dtype)
