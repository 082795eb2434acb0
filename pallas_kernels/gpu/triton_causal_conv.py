"""Causal convolution of a few taps over rows of any number of tokens, in Pallas-Triton.

Most programs compute a block of tokens and channels, all of whose inputs are tokens of the step.
One more program for each row and block of channels computes the row's first tokens, which also need
the inputs in the state, and writes the new states. So one program alone accesses a row's state.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu.triton_tile import power_of_two, spread
from pallas_kernels.state_arguments import ConvOptions, StateRows
from pallas_kernels.state_case import StateCase

BLOCK, CHANNELS = 32, 128
"""Tokens and channels of a program. They were not timed."""


@dataclasses.dataclass(frozen=True)
class ConvSpec:
    """Compile-time sizes of the kernel."""

    options: ConvOptions
    taps: int
    blocks: int  # blocks of tokens
    channels: int  # channels of a program, a power of two
    interpret: bool

    def result(self, total: jax.Array) -> jax.Array:
        """Apply the activation to sums of float32."""
        return total / (1.0 + jnp.exp(-total)) if self.options.activation == "silu" else total


def _kernel(*arrays: Any, names: tuple[str, ...], spec: ConvSpec) -> None:
    """Body of the kernel: compute a block of tokens, or the first tokens and states of a row."""
    refs = dict(zip(names, arrays, strict=True))
    part, number = pl.program_id(0), pl.program_id(1)
    width = refs["x"].shape[1]
    channel = part * spec.channels + jnp.arange(spec.channels, dtype=jnp.int32)
    is_inside = channel < width
    weights = []
    for tap in range(spec.taps):
        at = jnp.full_like(channel, tap), channel
        weight = plt.load(refs["weight"].at[at], mask=is_inside, other=0.0)
        weights.append(weight.astype(jnp.float32))
    bias = jnp.zeros(channel.shape, jnp.float32)
    if "bias" in refs:
        bias = plt.load(refs["bias"].at[channel], mask=is_inside, other=0.0).astype(jnp.float32)

    @pl.when(number < spec.blocks)
    def _() -> None:
        _convolve_block(refs, number, channel, weights, bias, spec)

    @pl.when(number >= spec.blocks)
    def _() -> None:
        _begin_row(refs, number - spec.blocks, channel, weights, bias, spec)


def _convolve_block(
    refs: dict[str, Any],
    block: jax.Array,
    channel: jax.Array,
    weights: list[jax.Array],
    bias: jax.Array,
    spec: ConvSpec,
) -> None:
    """Write the results of the tokens of a block whose inputs are all tokens, and of padding."""
    tokens, width = refs["x"].shape
    shape = (BLOCK, spec.channels)
    token = block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    exists = token < tokens
    position = plt.load(refs["positions"].at[token], mask=exists, other=0)
    is_whole = exists & (position >= spec.taps - 1)
    lines, columns = spread(token, shape, 0), spread(channel, shape, 1)
    is_inside = columns < width
    mask = spread(is_whole, shape, 0) & is_inside
    total = spread(bias, shape, 1)
    for tap, weight in enumerate(weights):
        at = lines - (spec.taps - 1 - tap), columns
        x = plt.load(refs["x"].at[at], mask=mask, other=0.0).astype(jnp.float32)
        total = total + x * spread(weight, shape, 1)
    y = jnp.where(mask, spec.result(total), 0.0).astype(refs["y"].dtype)
    mask = spread(is_whole | (exists & (position < 0)), shape, 0) & is_inside
    plt.store(refs["y"].at[lines, columns], y, mask=mask)


def _begin_row(
    refs: dict[str, Any],
    row: jax.Array,
    channel: jax.Array,
    weights: list[jax.Array],
    bias: jax.Array,
    spec: ConvSpec,
) -> None:
    """Write the results of a row's first tokens, and its states at the border and at the end."""
    past, width = spec.taps - 1, refs["x"].shape[1]
    begin, end, target = refs["starts"][row], refs["starts"][row + 1], refs["target"][row]
    source, border = refs["source"][row], refs["border"][row]
    is_inside = (channel < width) & (target >= 0) & (begin < end)

    def load_input(position: jax.Array | int) -> jax.Array:
        """Load the inputs at a position of the row, negative for inputs of the state."""
        position = jnp.asarray(position, jnp.int32)
        at = spread(begin + position, channel.shape), channel
        mask = is_inside & (position >= 0) & (begin + position < end)
        x = plt.load(refs["x"].at[at], mask=mask, other=0.0).astype(jnp.float32)
        at = spread(jnp.maximum(source, 0), channel.shape), spread(position + past, channel.shape)
        mask = is_inside & (position < 0) & (source >= 0)
        old = plt.load(refs["states_before"].at[(*at, channel)], mask=mask, other=0.0)
        return jnp.where(position < 0, old, x)

    inputs = [load_input(position) for position in range(-past, past)]
    new = []
    for place, stop in ((refs["saved"][row], border), (target, end - begin)):
        new.append((place, [load_input(stop - past + nth) for nth in range(past)]))
    if not spec.interpret:  # the target can be the source
        plt.debug_barrier()
    for nth in range(past):
        total = bias
        for tap, weight in enumerate(weights):
            total = total + inputs[nth + tap] * weight
        at = spread(begin + nth, channel.shape), channel
        y = spec.result(total).astype(refs["y"].dtype)
        plt.store(refs["y"].at[at], y, mask=is_inside & (begin + nth < end))
    for is_stored, (place, numbers) in zip((border > 0, target >= 0), new, strict=True):
        for nth, number in enumerate(numbers):
            place = jnp.maximum(place, 0)
            at = spread(place, channel.shape), jnp.full_like(channel, nth), channel
            plt.store(refs["states"].at[at], number, mask=is_inside & is_stored)


def _positions(rows: StateRows, tokens: int) -> jax.Array:
    # Padding has -1.
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = (rows.query_start[None] <= token[:, None]).sum(axis=1, dtype=jnp.int32) - 1
    count = len(rows.source)
    is_real = (row >= 0) & (row < count)
    row = jnp.clip(row, 0, count - 1)
    is_real &= rows.target[row] >= 0
    return jnp.where(is_real, token - rows.query_start[row], -1)


def causal_conv(
    x: jax.Array,
    states: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    rows: StateRows,
    options: ConvOptions,
    case: StateCase,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Convolve each channel over a row's tokens and the inputs that its state holds, with Triton.

    Arguments are as in ``pallas_kernels.causal_conv``, with the `case` of the call. `interpret`
    runs the kernel as plain JAX.

    Returns:
        y [T,C] of x's dtype, zeros for padding, and the new states.
    """
    tokens, width = x.shape
    blocks, channels = -(-tokens // BLOCK), min(CHANNELS, max(16, power_of_two(width)))
    spec = ConvSpec(options, case.size, blocks, channels, interpret)
    operands = {"x": x, "weight": weight, "positions": _positions(rows, tokens)}
    operands |= {} if bias is None else {"bias": bias}
    operands |= {"starts": rows.query_start, "source": rows.source, "target": rows.target}
    operands |= {"border": rows.border, "saved": rows.saved}
    names = (*operands, "states_before", "states", "y")
    states, y = pl.pallas_call(
        functools.partial(_kernel, names=names, spec=spec),
        grid=(-(-width // channels), blocks + len(rows.source)),
        out_shape=(
            jax.ShapeDtypeStruct(states.shape, states.dtype),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
        ),
        input_output_aliases={len(operands): 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="causal_conv",
    )(*operands.values(), states)
    return y, states
