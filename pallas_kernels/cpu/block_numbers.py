# pyright: reportUnknownMemberType=false
"""Dequantization of weights in GGUF blocks, in plain JAX: the specification of their products.

All is computed in float32, in the order of the formulas in `cpu/blocks.py`, so the numbers equal
the numbers of the package gguf to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.blocks import FORMATS, BlockFormat
from pallas_kernels.cpu.panels import PANEL


def columns(panels: jax.Array, outputs: jax.Array, form: str) -> jax.Array:
    """Dequantize the weights of some outputs of a weight in GGUF blocks: float32 [T, I].

    Args:
        panels: the weight, uint8 of `blocks.panel_shape`.
        outputs: int [T] numbers of the outputs, which must be in range.
        form: name of the GGUF format.
    """
    # Arithmetic on two constants. Operations for each byte would be most of a model's program.
    start, step = _byte_places(form)
    index = (start + step * (outputs % PANEL)[:, None])[:, None, :]
    panel = (outputs // PANEL)[:, None, None]
    block = jnp.arange(panels.shape[1])[None, :, None]
    return numbers(panels.at[panel, block, index].get(mode="promise_in_bounds"), form)


def _byte_places(form: str) -> tuple[np.ndarray, np.ndarray]:
    # For each byte of a block, in the order of `in_panel`: its offset in a panel for output 0, and
    # the distance to the same byte of the next output.
    starts: list[int] = []
    steps: list[int] = []
    for place in FORMATS[form].in_panel.values():
        for unit, item in np.ndindex(place.units, place.count):
            before = place.first + unit * place.size + place.start + item * place.item
            starts += range(PANEL * before, PANEL * before + place.item)
            steps += [place.item] * place.item
    return np.array(starts, np.int32), np.array(steps, np.int32)


def numbers(rows: jax.Array, form: str) -> jax.Array:
    """Dequantize rows of GGUF blocks: float32 [..., inputs].

    Args:
        rows: uint8 [..., blocks, bytes of a block], with the fields of `BlockFormat.fields`.
        form: name of the GGUF format.
    """
    layout = FORMATS[form]
    parts = {
        name: rows[..., place.start : place.start + place.count * place.item]
        for name, place in layout.fields.items()
    }
    codes = _codes(parts, layout).astype(jnp.float32)
    codes = codes.reshape(*rows.shape[:-1], layout.runs, layout.run)
    scale = (_power if layout.is_power else _half)(parts["scale"])
    if layout.scaled:
        factors = parts["scales"]
        if not layout.has_minimum:
            factors = jax.lax.bitcast_convert_type(factors, jnp.int8)
        scale = scale * factors.astype(jnp.float32)
    values = codes * scale[..., None]
    if layout.has_minimum:
        minimum = _half(parts["minimum"])
        if layout.scaled:
            minimum = -(minimum * parts["minima"].astype(jnp.float32))
        values = values + minimum[..., None]
    return values.reshape(*rows.shape[:-2], -1)


def _half(field: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(field, jnp.uint16)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)[..., None]


def _power(field: jax.Array) -> jax.Array:
    exponent = field.astype(jnp.int32)
    bits = jnp.where(exponent < 2, 0x200000 << exponent, (exponent - 1) << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _codes(parts: Mapping[str, jax.Array], layout: BlockFormat) -> jax.Array:
    codes = _unpacked(parts["low"], layout.low)
    if layout.high:
        codes = codes | _unpacked(parts["high"], layout.high) << layout.low
    if layout.low == 8:
        return codes.astype(jnp.uint8).astype(jnp.int8).astype(jnp.int32)
    if layout.numbers:
        codes = jnp.asarray(layout.numbers, jnp.int32)[codes]
    return codes - layout.offset


def _unpacked(field: jax.Array, bits: int) -> jax.Array:
    halves = jax.lax.bitcast_convert_type(field.reshape(*field.shape[:-1], -1, 2), jnp.uint16)
    words = halves.astype(jnp.int32).reshape(*halves.shape[:-1], -1, 1, 2)
    shifts = jnp.arange(0, 16, bits)[:, None]
    return (words >> shifts & (1 << bits) - 1).reshape(*field.shape[:-1], -1)
