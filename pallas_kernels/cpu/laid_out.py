"""Products on CPU with weights in the order of the model, which can be differentiated.

The forward pass puts the weight in panels and runs the kernel of `product.py`, so its results have
the bits of a product with a weight in panels. The backward pass multiplies in plain JAX.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cpu.panels import panels_of
from pallas_kernels.cpu.product import panel_product
from pallas_kernels.gradients import varying_as
from pallas_kernels.grouped_gradient import grouped_gradient


def laid_out_product(
    x: jax.Array, w: jax.Array, num_rows: jax.Array | None = None
) -> jax.Array:
    """Multiply x by a weight, or rows sorted by group each by the weight of its group.

    Args:
        x: [T,I], any float.
        w: [I,O], or [E,I,O] with a weight for each group.
        num_rows: as in ``panel_product``.

    Returns:
        [T,O]. Its dtype is that of x, or float32 if x is narrower.
    """
    return _product(x, w, num_rows)


def _forward(x: jax.Array, w: jax.Array, num_rows: jax.Array | None) -> jax.Array:
    y = panel_product(x, panels_of(w), w.dtype.name, num_rows)
    return varying_as(y[:, : w.shape[-1]], x, w, num_rows)


def _backward(operands: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, num_rows = operands
    if w.ndim == 3:
        return *grouped_gradient(x, w, num_rows, g), None
    if num_rows is not None:
        g = jnp.where((jnp.arange(len(g)) < num_rows)[:, None], g, 0)
    exact = g.dtype
    dx = lax.dot_general(g, w.astype(exact), (((1,), (1,)), ((), ())))
    dw = lax.dot_general(x.astype(exact), g, (((0,), (0,)), ((), ())))
    return dx.astype(x.dtype), dw.astype(w.dtype), None


_product = jax.custom_vjp(_forward)
_product.defvjp(lambda *operands: (_forward(*operands), operands), _backward)
