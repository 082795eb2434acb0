"""Products of few rows in Pallas-Triton: over parts of the inputs, or with a gate.

With few rows a product takes as long as reading its weights, if enough programs read them. So the
inputs are divided over programs too. XLA selects its tiles by timing at every start. These tiles
are always the same, and so are the results.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu.triton_tile import spread
from pallas_kernels.gpu.tuning import ProductConfig, product_config
from pallas_kernels.row_arguments import Activation, ProductCase


def _kernel(
    x_ref: Any,
    w_ref: Any,
    out_ref: Any,
    *,
    case: ProductCase,
    config: ProductConfig,
    activation: Activation | None,
) -> None:
    """Body of the kernel of a product of few rows: compute a tile of rows and columns.

    A program adds the products of one of `case.parts` parts of the inputs, and writes the tile to
    the output. With `activation` it computes the two products of a gated MLP and writes
    ``activation(x @ gate) * (x @ up)``.
    """
    rows, columns, inner = config.block_rows, config.block_columns, config.block_inner
    part, size = pl.program_id(2), case.D // case.parts
    column = pl.program_id(0) * columns + jnp.arange(columns)
    row = pl.program_id(1) * rows + jnp.arange(rows)
    last = (part + 1) * size

    def weights(k: jax.Array, *which: int) -> jax.Array:
        """Load the elements of w at rows `k` and this program's columns: [inner, columns].

        Elements beyond the matrix are 0. `which` indexes the middle axis of w (gate or up), if w
        has one.
        """
        shape = (inner, columns)
        down, across = spread(k, shape, 0), spread(column, shape, 1)
        mask = across < case.F
        if size % inner:
            mask &= down < last
        index = (down, *(jnp.full_like(down, number) for number in which), across)
        return plt.load(w_ref.at[index], mask=mask, other=0.0)

    def step(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Return the sums [rows, columns] plus the products of the inputs of loop step i.

        There is one array of sums, or two (gate and up) in a gated product.
        """
        k = part * size + i * inner + jnp.arange(inner)
        shape = (rows, inner)
        down, across = spread(row, shape, 0), spread(k, shape, 1)
        mask = down < case.T
        if size % inner:
            mask &= across < last
        x = plt.load(x_ref.at[down, across], mask=mask, other=0.0)
        which = ((0,), (1,)) if case.is_gated else ((),)
        return tuple(
            acc + plt.dot(x, weights(k, *index)) for acc, index in zip(accs, which, strict=True)
        )

    accs = tuple(jnp.zeros((rows, columns), jnp.float32) for _ in range(1 + case.is_gated))
    accs = lax.fori_loop(0, -(-size // inner), step, accs)
    shape = (rows, columns)
    down, across = spread(row, shape, 0), spread(column, shape, 1)
    mask = (down < case.T) & (across < case.F)
    if activation is None:
        address = out_ref.at[spread(part, shape), down, across]
        plt.store(address, accs[0], mask=mask)
    else:
        # The products are rounded before the activation, like the result of every product.
        gate, up = (acc.astype(case.dtype).astype(jnp.float32) for acc in accs)
        hidden = (_active(gate, activation) * up).astype(case.dtype)
        plt.store(out_ref.at[down, across], hidden, mask=mask)


def _active(gate: jax.Array, activation: Activation) -> jax.Array:
    if activation == "silu":
        return gate / (1.0 + jnp.exp(-gate))
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    # 1 + tanh(x) = 2 - 2 / (1 + e^2x), which saturates cleanly at both ends.
    return gate * (1.0 - 1.0 / (1.0 + jnp.exp(2.0 * inner)))


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _product(
    x: jax.Array,
    w: jax.Array,
    case: ProductCase,
    activation: Activation | None,
    config: ProductConfig,
    interpret: bool,
) -> jax.Array:
    """Run the kernel of a product of few rows x [T,D]: f32[parts,T,F], or [T,F] if gated.

    The product is gated if `activation` is not None. Because of `jax.jit` a program traces and
    lowers the kernel once for all layers.
    """
    if activation is None:
        out = jax.ShapeDtypeStruct((case.parts, case.T, case.F), jnp.float32)
    else:
        out = jax.ShapeDtypeStruct((case.T, case.F), case.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, case=case, config=config, activation=activation),
        # Consecutive programs take the blocks of rows of one column block, so weights stay in the
        # cache.
        grid=(-(-case.F // config.block_columns), -(-case.T // config.block_rows), case.parts),
        out_shape=out,
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name=case.op,
    )(x, w)


def matmul_in_parts(
    x: jax.Array,
    w: jax.Array,
    case: ProductCase,
    *,
    config: ProductConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply few rows x [T,D] by w [D,F] with Triton, over equal parts of the inputs.

    Args:
        x, w: operands of the product.
        case: sizes of the product, with the number of parts.
        config: block sizes. None reads the tuning table.
        interpret: run the kernel as plain JAX on any device.

    Returns:
        f32[parts,T,F]. The sum over the parts is x @ w.
    """
    return _product(x, w, case, None, config or product_config(case), interpret)


def gated_matmul(
    x: jax.Array,
    w: jax.Array,
    case: ProductCase,
    activation: Activation,
    *,
    config: ProductConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute ``activation(x @ gate) * (x @ up)`` of few rows x [T,D] with Triton.

    Args:
        x: [T,D] rows.
        w: [D,2,F] gate and up.
        case: sizes of the product.
        activation: "silu" or "gelu_tanh".
        config: block sizes. None reads the tuning table.
        interpret: run the kernel as plain JAX on any device.

    Returns:
        [T,F] of x's dtype.
    """
    return _product(x, w, case, activation, config or product_config(case), interpret)
