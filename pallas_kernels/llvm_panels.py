"""How weights lie for the product of `llvm_product.py`, and what it computes, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

PANEL = 32  # outputs


def in_panels(weight: np.ndarray) -> np.ndarray:
    """[I, O] as panels; outputs of the last one beyond O are zero. 16-bit floats become bits."""
    inputs, outputs = weight.shape
    if weight.dtype.itemsize == 2:
        weight = weight.view(np.uint16)
    count = -(-outputs // PANEL)
    panels = np.empty((count, inputs, PANEL), weight.dtype)
    whole = outputs // PANEL
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
