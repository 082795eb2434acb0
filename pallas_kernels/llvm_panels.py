"""How weights lie for the product of `llvm_product.py`, and what it computes, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

PANEL = 32  # outputs


def panel_shape(inputs: int, outputs: int, dtype: np.dtype) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the panels of a weight of I inputs and O outputs.

    [ceil(O / PANEL), words, PANEL], where a word holds one input of an output, or several that
    follow each other in a row of [O, I]. 16-bit floats become bits.
    """
    return (
        (-(-outputs // PANEL), inputs, PANEL),
        np.dtype(np.uint16) if dtype.itemsize == 2 else dtype,
    )


def in_panels(weight: np.ndarray) -> np.ndarray:
    """[I, O] as panels; outputs of the last one beyond O are zero."""
    inputs, outputs = weight.shape
    shape, dtype = panel_shape(inputs, outputs, weight.dtype)
    weight, panels = weight.view(dtype), np.empty(shape, dtype)
    count, whole = len(panels), outputs // PANEL
    columns = weight[:, : whole * PANEL].reshape(inputs, whole, PANEL)
    np.copyto(panels[:whole], columns.transpose(1, 0, 2))
    if whole < count:
        panels[whole] = 0
        panels[whole, :, : outputs - whole * PANEL] = weight[:, whole * PANEL :]
    return panels


def reference(x: jax.Array, panels: jax.Array, weights: str) -> jax.Array:
    """What `panel_product` computes, in plain JAX."""
    if panels.dtype == jnp.uint16:
        panels = jax.lax.bitcast_convert_type(panels, jnp.dtype(weights))
    y = jnp.einsum("ti,nic->tnc", x, panels.astype(x.dtype), precision="highest")
    return y.reshape(x.shape[0], -1)
