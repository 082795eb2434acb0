"""Layout of weights for the product of `cpu/product.py`, and its specification in plain JAX.

`panel_shape` defines the layout. No other module depends on it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

PANEL = 32  # outputs


def in_pairs(dtype: str) -> bool:
    """Return whether panels store weights of a dtype in pairs of inputs: true for "bfloat16"."""
    return dtype == "bfloat16"


def panel_shape(inputs: int, outputs: int, dtype: np.dtype) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and dtype of the panels that store a weight of I inputs and O outputs.

    - Most dtypes: [ceil(O / PANEL), I, PANEL]. Element [n, i, o] is the weight of input i and
      output PANEL * n + o. float16 is stored as its bits, uint16, because XLA on CPU converts whole
      arrays of 16-bit floats.
    - bfloat16: uint32 [ceil(O / PANEL), ceil(I / 2), PANEL]. Word [n, p, o] holds the bits of
      inputs 2 p (lower half) and 2 p + 1 (upper half) of output PANEL * n + o. So a row of a
      checkpoint's [O, I], read as words, is a column of a panel.

    Outputs beyond O are zero, and so is the second half of the last word if I is odd.
    """
    count = -(-outputs // PANEL)
    if in_pairs(dtype.name):
        return (count, -(-inputs // 2), PANEL), np.dtype(np.uint32)
    return (count, inputs, PANEL), np.dtype(np.uint16) if dtype.itemsize == 2 else dtype


def in_panels(weight: np.ndarray, panels: np.ndarray | None = None) -> np.ndarray:
    """Copy a weight [I, O] to panels (see `panel_shape`), and return the panels.

    `panels` is the array to fill. None allocates a new one.
    """
    inputs, outputs = weight.shape
    shape, dtype = panel_shape(inputs, outputs, weight.dtype)
    panels = np.empty(shape, dtype) if panels is None else panels
    if not in_pairs(weight.dtype.name):
        _fill(panels, weight.view(dtype))
        return panels
    halves = panels.view(np.uint16).reshape(*shape, 2)
    bits = weight.view(np.uint16)
    _fill(halves[..., 0], bits[0::2])
    _fill(halves[:, : inputs // 2, :, 1], bits[1::2])
    halves[:, inputs // 2 :, :, 1] = 0
    return panels


def panels_of(weights: jax.Array) -> jax.Array:
    """Return weights [..., I, O] in panels (see `panel_shape`), in plain JAX.

    The result has the bits of `in_panels`.
    """
    *many, inputs, outputs = weights.shape
    paired = in_pairs(weights.dtype.name)
    odd, beyond = inputs % 2 if paired else 0, -outputs % PANEL
    pad = *((0, 0) for _ in many), (0, odd), (0, beyond)
    weights = jnp.pad(weights, pad) if odd or beyond else weights
    if weights.dtype.itemsize == 2:
        weights = jax.lax.bitcast_convert_type(weights, jnp.uint16)
    weights = weights.reshape(*many, inputs + odd, -1, PANEL).swapaxes(-2, -3)
    if not paired:
        return weights
    pairs = weights.reshape(*weights.shape[:-2], -1, 2, PANEL).astype(jnp.uint32)
    return pairs[..., 0, :] | pairs[..., 1, :] << 16


def weight_of(panels: jax.Array, inputs: int, outputs: int, dtype: str) -> jax.Array:
    """Return weights [..., I, O] of `dtype` from panels (see `panel_shape`), in plain JAX."""
    if in_pairs(dtype):
        halves = jnp.stack([panels & 0xFFFF, panels >> 16], axis=-2).astype(jnp.uint16)
        panels = halves.reshape(*panels.shape[:-2], -1, PANEL)
    rows = panels.swapaxes(-2, -3)
    weights = rows.reshape(*rows.shape[:-2], -1)[..., :inputs, :outputs]
    target = jnp.dtype(dtype)
    if weights.dtype == target:
        return weights
    return jax.lax.bitcast_convert_type(weights, target)


def _fill(panels: np.ndarray, weight: np.ndarray) -> None:
    inputs, outputs = weight.shape
    whole = outputs // PANEL
    columns = weight[:, : whole * PANEL].reshape(inputs, whole, PANEL)
    np.copyto(panels[:whole], columns.transpose(1, 0, 2))
    if whole < len(panels):
        panels[whole] = 0
        panels[whole, :, : outputs - whole * PANEL] = weight[:, whole * PANEL :]


def rows_as_columns(rows: np.ndarray, panels: np.ndarray, column: int) -> None:
    """Copy rows [R, I] of weights to the panels as outputs, from output `column` on.

    The panels may hold outputs of other rows too, which stay.

    Args:
        rows: [R, I], contiguous, one output in each row.
        panels: the panels that these rows reach, to be changed.
        column: output of the first row in the first panel.
    """
    words = rows.view(f"u{rows.dtype.itemsize}")
    if in_pairs(rows.dtype.name):
        words = np.pad(words, ((0, 0), (0, rows.shape[1] % 2))).view(np.uint32)
    words = words.view(panels.dtype)
    for index, panel in enumerate(panels):
        first = index * PANEL - column
        chosen = words[max(0, first) : first + PANEL]
        start = max(0, -first)
        panel[:, start : start + len(chosen)] = chosen.T


def rows_in_order(values: np.ndarray) -> np.ndarray:
    """Rearrange codes, scales or zero points [..., R, O] to [..., ceil(O / PANEL), R, PANEL].

    Outputs beyond O are zero. Returns a new array.
    """
    *many, rows, outputs = values.shape
    panels = np.empty((*many, -(-outputs // PANEL), rows, PANEL), values.dtype)
    for index in np.ndindex(*many):
        _fill(panels[index], values[index])
    return panels


def columns(panels: jax.Array, outputs: jax.Array, inputs: int, dtype: str) -> jax.Array:
    """Return the weights of some outputs of a weight in panels: [T, I] of the weight's dtype.

    Args:
        panels: the weight, see `panel_shape`.
        outputs: int [T] numbers of the outputs, which must be in range.
        inputs: I, the number of inputs.
        dtype: dtype of the weight.
    """
    index = outputs // PANEL, slice(None), outputs % PANEL
    return _weights(panels.at[index].get(mode="promise_in_bounds"), inputs, dtype)


def _weights(columns: jax.Array, inputs: int, dtype: str) -> jax.Array:
    if in_pairs(dtype):
        halves = jax.lax.bitcast_convert_type(columns, jnp.uint16)
        columns = halves.reshape(columns.shape[0], -1)[:, :inputs]
    target = jnp.dtype(dtype)
    return columns if columns.dtype == target else jax.lax.bitcast_convert_type(columns, target)


def reference(x: jax.Array, panels: jax.Array, weights: str) -> jax.Array:
    """Multiply x [T, I] by a weight in panels, of dtype `weights`, in plain JAX.

    This is the specification of `panel_product`. Returns [T, P * PANEL] for P panels, float32 or
    wider.
    """
    outputs = panels.shape[0] * PANEL
    rows = panels.transpose(0, 2, 1).reshape(outputs, -1)
    exact = jnp.promote_types(x.dtype, jnp.float32)
    weight = _weights(rows, x.shape[1], weights).astype(exact)
    return jnp.einsum("ti,oi->to", x.astype(exact), weight, precision="highest")
