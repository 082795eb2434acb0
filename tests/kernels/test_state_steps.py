"""Steps of one token per row, of layers with states, against their specification."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_conv, conv_recurrence, gated_delta, mamba2, reference
from pallas_kernels.devices import DeviceLimits, find_card
from pallas_kernels.gpu import triton_states
from pallas_kernels.gpu.triton_states import RecurrenceConfig, recurrence_config
from pallas_kernels.implementation import choose
from pallas_kernels.state_arguments import (
    ChannelDeltaOptions,
    ChannelGates,
    ConvOptions,
    ConvWeights,
    DeltaOptions,
    Mamba2Options,
    StateRows,
)
from pallas_kernels.state_case import StateCase
from tests.support.fast_compile import EXACT

PLACES = 14
SPARE = PLACES - 1
Options = DeltaOptions | Mamba2Options
TOLERANCES = {jnp.float32: 1e-4, jnp.bfloat16: 2e-2, jnp.float16: 2e-3}
# Sizes, taps, block of columns, and programs of a group. Sizes are powers of two and not.
RECURRENCES: tuple[tuple[Options, int, int, int], ...] = (
    (DeltaOptions(2, 6, 16, 32), 4, 16, 3),
    (DeltaOptions(3, 3, 24, 40, strength=2.0), 2, 64, 1),
    (Mamba2Options(2, 4, 20, 48, 0.01, 2.0), 5, 32, 4),
    (Mamba2Options(1, 2, 7, 5), 7, 16, 1),
    (ChannelDeltaOptions(2, 4, 24, 40), 4, 16, 2),
    (ChannelDeltaOptions(2, 2, 16, 32, bound=2.5), 3, 32, 1),
)


def step_rows() -> StateRows:
    """Make rows of every kind.

    They continue, start from zeros, start from another place, are padding, and store their states
    at a border. The last two have no token and no target.
    """
    source = [0, -1, 2, 9, 4, -1, 3, 0]
    target = [0, 1, 2, 3, -1, 5, 6, -1]
    border = [0, 1, 1, 0, 1, 0, 0, 0]
    saved = [7, 7, 8, 0, 10, 0, 0, 0]
    start = [0, 1, 2, 3, 4, 5, 6, 6, 6]
    parts = start, source, target, border, saved, SPARE
    return StateRows._make(jnp.asarray(part, jnp.int32) for part in parts)


ROWS = len(step_rows().target)
WRITTEN = [0, 1, 2, 3, 5, 7, 8]


def draw(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def states_of(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Draw states with NaN at places that no row reads, and zeros at the spare place."""
    unread = jnp.asarray([1, 5, 6, 7, 8, 10, 11, 12])
    states = draw(seed, PLACES, *shape, dtype=dtype)
    return states.at[unread].set(jnp.nan).at[SPARE].set(0)


def operands(options: Options, taps: int, dtype: Any) -> tuple[Any, ...]:
    """Return the arguments of `conv_recurrence` before the options."""
    exact = jnp.promote_types(dtype, jnp.float32)
    is_delta = isinstance(options, DeltaOptions)
    conv = states_of(2, taps - 1, options.width, dtype=exact)
    state = states_of(3, options.heads, options.inputs, options.outputs, dtype=exact)
    bias = None if is_delta else draw(5, options.width, dtype=dtype)
    weights = ConvWeights(draw(4, taps, options.width, dtype=dtype), bias)
    constants = draw(6, *options.constants, dtype=exact)
    mixed = draw(0, ROWS, options.width, dtype=dtype)
    gates = [draw(7 + nth, ROWS, *shape, dtype=dtype) for nth, shape in enumerate(options.gates)]
    gates = ChannelGates(*gates) if isinstance(options, ChannelDeltaOptions) else gates[0]
    return mixed, gates, (conv, state), weights, constants, step_rows()


def run(function: Any, *arrays: Any, **fixed: Any) -> Any:
    call = functools.partial(function, **fixed)
    return jax.device_get(jax.jit(call, compiler_options=EXACT)(*arrays))


def check(got: Any, expected: Any, before: Any, dtype: Any) -> None:
    """Compare results and states. Places that no row writes keep their bits."""
    tolerance = TOLERANCES[dtype]
    assert got[0].dtype == dtype
    y, wanted = (np.asarray(results[0], np.float64) for results in (got, expected))
    np.testing.assert_allclose(y, wanted, rtol=tolerance, atol=tolerance)
    for after, specified, old in zip(
        *map(jax.tree.leaves, (got[1], expected[1], before)), strict=True
    ):
        np.testing.assert_allclose(after[WRITTEN], specified[WRITTEN], rtol=1e-4, atol=1e-4)
        others = np.setdiff1d(np.arange(PLACES), WRITTEN)
        np.testing.assert_array_equal(after[others], np.asarray(old)[others])


@pytest.mark.parametrize(
    ("nth", "dtype"),
    [
        *((0, jnp.bfloat16), (1, jnp.float32), (2, jnp.float16), (3, jnp.bfloat16)),
        *((4, jnp.bfloat16), (5, jnp.float32), (4, jnp.float16)),
    ],
)
def test_one_launch_follows_the_specification(nth: int, dtype: Any) -> None:
    options, taps, block, programs = RECURRENCES[nth]
    arrays = operands(options, taps, dtype)
    expected = run(reference.conv_recurrence, *arrays, options=options)
    case = StateCase("conv_recurrence", DeviceLimits("cpu", "cpu"), jnp.dtype(dtype), ROWS, taps)
    config = RecurrenceConfig(block, programs)
    fixed = {"options": options, "case": case, "config": config, "interpret": True}
    check(run(triton_states.conv_recurrence, *arrays, **fixed), expected, arrays[2], dtype)


@pytest.mark.parametrize(("width", "channels"), [(3, 130), (2, 16)])
@pytest.mark.parametrize("is_biased", [True, False])
def test_convolution_alone(width: int, channels: int, is_biased: bool) -> None:
    dtype = jnp.bfloat16
    options = ConvOptions("silu" if is_biased else "none")
    bias = draw(3, channels, dtype=dtype) if is_biased else None
    x, weight = draw(0, ROWS, channels, dtype=dtype), draw(2, width, channels, dtype=dtype)
    before = states_of(1, width - 1, channels)
    arrays = x, before, weight, bias, step_rows()
    expected = run(reference.causal_conv, *arrays, options=options)
    chosen = {"one_token": True, "implementation": "triton_interpret"}
    got = run(causal_conv, *arrays, options=options, **chosen)
    check(got, expected, before, dtype)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("nth", [0, 2, 4])
def test_a_cpu_runs_the_same_kernels_for_every_step(nth: int, dtype: Any) -> None:
    options, taps, *_ = RECURRENCES[nth]
    recurrence = gated_delta if isinstance(options, DeltaOptions) else mamba2

    def apart(mixed: Any, gates: Any, states: Any, weights: Any, constants: Any, rows: Any) -> Any:
        conv, state = states
        mixed, conv = causal_conv(
            mixed, conv, weights.weight, weights.bias, rows, ConvOptions("silu")
        )
        y, state = recurrence(mixed, gates, state, constants, rows, options)  # type: ignore[arg-type]
        return y, (conv, state)

    with jax.enable_x64(True):
        arrays = operands(options, taps, dtype)
        expected = run(apart, *arrays)
        for one_token in (True, False):
            got = run(conv_recurrence, *arrays, options=options, one_token=one_token)
            for part, wanted in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
                assert part.tobytes() == wanted.tobytes()


def test_cards_before_capability_8_0_use_plain_xla() -> None:
    names = {}
    for name in ("Tesla T4", "NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA GeForce RTX 5090"):
        limits = find_card(name).limits
        case = StateCase("conv_recurrence", limits, jnp.dtype(jnp.bfloat16), 1, 4)
        names[limits.capability] = choose("auto", case)
    assert names == {(7, 5): "xla", (8, 0): "triton", (9, 0): "triton", (12, 0): "triton"}


def test_rows_of_several_tokens_are_refused_by_a_step() -> None:
    options, taps, *_ = RECURRENCES[0]
    mixed, gates, *rest = operands(options, taps, jnp.float32)
    with pytest.raises(ValueError, match=r"x has T = 7 tokens; expected one for each of 8 rows"):
        conv_recurrence(mixed[1:], gates[1:], *rest, options=options, one_token=True)


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize("options", [
    DeltaOptions(16, 16, 128, 128), DeltaOptions(16, 48, 128, 128), Mamba2Options(8, 96, 128, 80),
    Mamba2Options(1, 128, 128, 64), DeltaOptions(2, 6, 96, 80), Mamba2Options(1, 4, 512, 48),
], ids=str)  # fmt: skip
def test_block_sizes_divide_the_work(options: Options, rows: int) -> None:
    for counters in (0, 3 * options.width):
        config = recurrence_config(options, rows, counters, 132)
        parts = options.heads // options.groups * -(-options.outputs // config.block_outputs)
        assert parts % config.programs == 0
        assert config.programs == 1 or rows * options.groups <= counters
        if counters:  # every multiprocessor has a program, or there are no more parts
            programs = rows * options.groups * config.programs
            assert programs >= 132 or (config.block_outputs == 16 and config.programs == parts)
