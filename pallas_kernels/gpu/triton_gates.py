"""Gates of recurrences in Pallas-Triton."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu.triton_tile import spread
from pallas_kernels.state_arguments import ChannelDeltaOptions, ChannelGates

Refs = dict[str, Any]


def logs_of_channels(
    refs: Refs,
    options: ChannelDeltaOptions,
    token: jax.Array,
    head: jax.Array,
    channel: jax.Array,
    valid: jax.Array,
) -> jax.Array:
    """Compute logarithms of the decays of a head, zeros where `valid` is false.

    Args:
        refs: refs with "decays" [T,heads,inputs], the gates, and "constants" [heads,1+inputs].
        options: sizes of the recurrence.
        token: i32[] or an array of the shape of `channel`.
        head: i32[].
        channel: i32 numbers of a key's numbers.
        valid: bool of the same shape.
    """
    constants, shape = refs["constants"], channel.shape
    token, heads = (
        jnp.broadcast_to(part, shape) if part.ndim else spread(part, shape)
        for part in (token, head)
    )
    gates = plt.load(refs["decays"].at[token, heads, channel], mask=valid, other=0.0)
    biases = plt.load(constants.at[heads, 1 + channel], mask=valid, other=0.0)
    rate, gates = jnp.exp(constants[head, 0]), gates.astype(jnp.float32) + biases
    if options.bound:
        logs = -options.bound / (1.0 + jnp.exp(-rate * gates))
    else:
        logs = -rate * softplus(gates)
    return jnp.where(valid, logs, 0.0)


def softplus(x: jax.Array) -> jax.Array:
    """Return log(1 + exp(x)), with a relative error of at most 2.3e-7 in float32."""
    # log(1 + e) is 2 atanh(e / (2 + e)), whose series is exact to float32 for e up to 1. A GPU's
    # approximate logarithm is not exact near 1.
    exponential = jnp.exp(-jnp.abs(x))
    ratio = exponential / (2.0 + exponential)
    square = ratio * ratio
    series = functools.reduce(lambda total, n: total * square + 1 / n, range(13, 0, -2), 0.0)
    return jnp.maximum(x, 0.0) + 2.0 * ratio * series


def named_gates(gates: jax.Array | ChannelGates) -> dict[str, jax.Array]:
    """Return the gates of a recurrence as operands of a kernel, by name."""
    if isinstance(gates, ChannelGates):
        return {"gates": gates.write, "decays": gates.decay}
    return {"gates": gates}
