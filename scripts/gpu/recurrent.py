"""Decodes of layers with a state per sequence: arrays and calls that the GPU scripts use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    ConvWeights,
    DeltaOptions,
    Mamba2Options,
    StateRows,
    causal_conv,
    conv_recurrence,
)
from scripts.gpu.cases import RecurrentCase


def options_of(case: RecurrentCase) -> DeltaOptions | Mamba2Options:
    """Return the sizes of the recurrence of a case."""
    return (DeltaOptions if case.kind == "delta" else Mamba2Options)(*case.sizes)


def decode_rows(rows: int, places: int) -> StateRows:
    """Make rows of one token that continue from their own states. The last place is spare.

    Args:
        rows: number of rows.
        places: number of places of the states, at least one more than rows.
    """
    number = np.arange(rows, dtype=np.int32)
    zeros = np.zeros_like(number)
    parts = np.arange(rows + 1, dtype=np.int32), number, number, zeros, zeros
    return StateRows(*map(jnp.asarray, parts), jnp.int32(places - 1))


def recurrent_arrays(case: RecurrentCase, places: int) -> tuple[tuple[jax.Array, ...], Any]:
    """Return random states of a case, and its other arrays. The states of the last place are 0."""
    rng, dtype = np.random.default_rng(0), jnp.dtype(case.dtype)

    def draw(*shape: int, kind: Any = dtype) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), kind)

    def states(*shape: int) -> jax.Array:
        return draw(places, *shape, kind=jnp.float32).at[-1].set(0)

    channels = case.sizes[0] if case.kind == "conv" else options_of(case).width
    conv = states(case.width - 1, channels)
    x = draw(case.rows, channels)
    weights = ConvWeights(draw(case.width, channels), draw(channels))
    if case.kind == "conv":
        return (conv,), (x, weights)
    options = options_of(case)
    gates = (case.rows, 2, options.heads) if case.kind == "delta" else (case.rows, options.heads)
    state = states(options.heads, options.inputs, options.outputs)
    constants = draw(options.num_constants, options.heads, kind=jnp.float32)
    return (conv, state), (x, weights, draw(*gates), constants)


def call_of(case: RecurrentCase, implementation: str, one_token: bool = True) -> Callable[..., Any]:
    """Return a decode as a function of its states, its other arrays and its rows.

    It returns the result and the new states.
    """
    options = {"one_token": one_token, "implementation": implementation}

    def call(states: tuple[jax.Array, ...], arrays: Any, rows: StateRows) -> Any:
        x, weights, *rest = arrays
        if case.kind == "conv":
            y, state = causal_conv(x, states[0], weights.weight, weights.bias, rows, **options)
            return y, (state,)
        gates, constants = rest
        return conv_recurrence(
            x, gates, states, weights, constants, rows, options_of(case), **options
        )

    return call


def recurrent_call(case: RecurrentCase, implementation: str) -> tuple[Any, Callable[..., Any]]:
    """Return shapes of the arguments of a decode with 8 places beside its rows, and the call."""
    places = case.rows + 8
    shapes = jax.eval_shape(
        lambda: (*recurrent_arrays(case, places), decode_rows(case.rows, places))
    )
    return shapes, call_of(case, implementation)
