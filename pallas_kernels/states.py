"""Operations with a state per sequence: causal convolution, gated delta rule, Mamba-2.

The states of all sequences are rows of one array. In a step, each row of tokens reads its state at
one place of this array and writes the new state to another. It can also write the state of a point
within its tokens to a third place, from which later sequences with the same prefix start.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.devices import target_device
from pallas_kernels.implementation import choose, kernel
from pallas_kernels.state_arguments import (
    ChannelGates,
    ConvOptions,
    ConvWeights,
    DeltaOptions,
    Mamba2Options,
    StateRows,
)
from pallas_kernels.state_case import StateCase

NO_CONV_OPTIONS, SILU = ConvOptions(), ConvOptions("silu")
STATE_DTYPES = (jnp.float32, jnp.float64)


def causal_conv(
    x: jax.Array,
    states: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    rows: StateRows,
    options: ConvOptions = NO_CONV_OPTIONS,
    *,
    one_token: bool = False,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Convolve each channel over a row's tokens and the inputs that its state holds.

    Args:
        x: [T,C], any float.
        states: [N,W-1,C] the inputs before the next token, oldest first, float32 (float64 for
            float64). In place if donated.
        weight: [W,C], the weight of the newest token last.
        bias: [C] or None.
        rows: tokens and places of each row.
        options: of the convolution.
        one_token: whether row r has token r alone, or is padding.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        y [T,C] of x's dtype, zeros for padding, and the new states. The computation is in the dtype
        of the states.
    """
    op = "conv_step" if one_token and _has_step_kernel(x, rows) else "causal_conv"
    run = _chosen(op, x, states, len(weight), implementation)
    return run(x, states, weight, bias, rows, options)


def gated_delta(
    mixed: jax.Array,
    gates: jax.Array | ChannelGates,
    states: jax.Array,
    constants: jax.Array,
    rows: StateRows,
    options: DeltaOptions,
    *,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Apply the gated delta rule (Yang et al. 2024) to each head of each row, token by token.

    Args:
        mixed: [T,M] queries, keys and values of all heads, one after the other.
        gates: [T,2,heads] of the dtype of `mixed`: before the sigmoid of the write strength, and
            before the softplus of the decay.
        states: [N,heads,inputs,outputs] float32 (float64 for float64). In place if donated.
        constants: [2,heads] of the dtype of the states: log of the decay rate, and the bias of the
            softplus.
        rows: tokens and places of each row.
        options: sizes. With ``ChannelDeltaOptions`` each number of a key has a decay of its own
            (Kimi Team 2025, arXiv:2510.26692): `gates` are ``ChannelGates``, and `constants` are
            [heads,1+inputs], for each head the log of its decay rate and then the biases.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        y [T,heads,outputs] of the dtype of `mixed`, zeros for padding, and the new states. The
        computation is in the dtype of the states.
    """
    run = _chosen(options.op, mixed, states, options.inputs, implementation)
    return run(mixed, gates, states, constants, rows, options)


def mamba2(
    mixed: jax.Array,
    steps: jax.Array,
    states: jax.Array,
    constants: jax.Array,
    rows: StateRows,
    options: Mamba2Options,
    *,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence of Mamba-2 (Dao and Gu 2024) to each head of each row.

    Args:
        mixed: [T,M] x of all heads, B of all groups and C of all groups, one after the other.
        steps: [T,heads] of the dtype of `mixed`, step sizes before bias and softplus.
        states: [N,heads,inputs,outputs] float32 (float64 for float64). In place if donated.
        constants: [3,heads] of the dtype of the states: log of the decay rate, bias of the step
            sizes, and factor of the direct path.
        rows: tokens and places of each row.
        options: sizes.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        y [T,heads,outputs] of the dtype of `mixed`, zeros for padding, and the new states. The
        computation is in the dtype of the states.
    """
    run = _chosen("mamba2", mixed, states, options.inputs, implementation)
    return run(mixed, steps, states, constants, rows, options)


def conv_recurrence(
    mixed: jax.Array,
    gates: jax.Array | ChannelGates,
    states: tuple[jax.Array, jax.Array],
    weights: ConvWeights,
    constants: jax.Array,
    rows: StateRows,
    options: DeltaOptions | Mamba2Options,
    *,
    one_token: bool = False,
    implementation: str = "auto",
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Convolve the numbers of each token, with SiLU, and then apply a recurrence to each row.

    This is ``causal_conv`` and after it ``gated_delta`` or ``mamba2``, by the type of `options`. On
    a GPU a step of one token per row is one launch.

    Args:
        mixed: [T,M] queries, keys and values of all heads, in the order of the recurrence.
        gates: the gates of ``gated_delta``, or the steps of ``mamba2``.
        states: states of the convolution [N,W-1,M] and of the recurrence, with the same places. In
            place if donated.
        weights: of the convolution of M channels.
        constants: of the recurrence.
        rows: tokens and places of each row.
        options: sizes of the recurrence.
        one_token: whether row r has token r alone, or is padding.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        y [T,heads,outputs] of the dtype of `mixed`, zeros for padding, and the new states. The
        convolution is rounded to the dtype of `mixed`.
    """
    conv, state = states
    if one_token and _has_step_kernel(mixed, rows):
        run = _chosen("conv_recurrence", mixed, state, options.inputs, implementation)
        return run(mixed, gates, states, weights, constants, rows, options)
    weight, bias = weights
    mixed, conv = causal_conv(mixed, conv, weight, bias, rows, SILU, implementation=implementation)
    run = _chosen(options.op, mixed, state, options.inputs, implementation)
    y, state = run(mixed, gates, state, constants, rows, options)
    return y, (conv, state)


def _has_step_kernel(x: jax.Array, rows: StateRows) -> bool:
    """Return whether steps of one token per row have a kernel of their own: true for GPUs."""
    tokens, count = len(x), len(rows.target)
    if tokens != count:
        raise ValueError(f"x has T = {tokens} tokens; expected one for each of {count} rows")
    return target_device().is_gpu


def _chosen(
    op: str, x: jax.Array, states: jax.Array, size: int, implementation: str
) -> Callable[..., Any]:
    """Return the implementation of an operation for tokens x and their states.

    Raises:
        ValueError: `states` has the wrong dtype, or the implementation cannot run the call.
    """
    if states.dtype not in STATE_DTYPES:
        raise ValueError(f"states has dtype {states.dtype}; allowed: float32, float64")
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if states.dtype != wide:
        raise ValueError(f"states has dtype {states.dtype}; expected {wide} with {x.dtype} inputs")
    case = StateCase(op, target_device(), jnp.dtype(x.dtype), len(x), size)
    name = choose(implementation, case) if x.size else "xla"
    run = kernel(op, name, case.platform)
    return partial(run, case=case) if name.startswith("triton") else run
