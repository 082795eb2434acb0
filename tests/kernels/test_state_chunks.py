"""Prompts of layers with states: kernels in chunk form and convolutions, interpreted.

Each is compared with its specification in float64, for rows of 0 to 137 tokens with borders at any
offset. Whatever a row may not read is NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.devices import DeviceLimits, find_card
from pallas_kernels.gpu import triton_causal_conv, triton_channel_chunks, triton_state_chunks
from pallas_kernels.gpu.triton_state_chunks import ChunkConfig
from pallas_kernels.implementation import choose
from pallas_kernels.state_arguments import (
    ChannelDeltaOptions,
    ChannelGates,
    ConvOptions,
    DeltaOptions,
    Mamba2Options,
    StateRows,
)
from pallas_kernels.state_case import StateCase
from tests.support.fast_compile import EXACT

TOKENS, PLACES, LONGEST = 144, 12, 130
PADDING = 2
"""The row without a target."""
UNREAD = np.array([4, 5, 6, 7, 8, 9, 10, 11])
TOLERANCES = {jnp.float32: 2e-5, jnp.bfloat16: 1e-2, jnp.float16: 1e-3}
"""Of results, relative to the largest one. States have these too."""
SMALL = ChunkConfig(block_tokens=16, columns=16, block_inputs=16, row_inputs=16)
# Options, dtype, and block sizes other than the default.
CASES: dict[str, tuple[Any, Any, ChunkConfig | None]] = {
    "delta": (DeltaOptions(1, 3, 24, 20), jnp.bfloat16, None),
    "delta-small-blocks": (DeltaOptions(2, 4, 40, 33, strength=2.0), jnp.float32, SMALL),
    "channels": (ChannelDeltaOptions(1, 2, 24, 20), jnp.bfloat16, None),
    "channels-small-blocks": (
        ChannelDeltaOptions(2, 2, 40, 33, strength=2.0, bound=2.5),
        jnp.float32,
        SMALL,
    ),
    "mamba2": (Mamba2Options(1, 2, 24, 40, 0.01, 2.0), jnp.bfloat16, None),
    "mamba2-small-blocks": (Mamba2Options(2, 2, 20, 16), jnp.float32, SMALL),
    "conv": (ConvOptions("silu"), jnp.bfloat16, None),
    "conv-of-seven": (ConvOptions(), jnp.float32, None),
}
OTHERS: dict[str, tuple[Any, Any, ChunkConfig | None]] = {
    "delta-float16": (DeltaOptions(1, 1, 8, 8), jnp.float16, None),
    "channels-float16": (ChannelDeltaOptions(1, 1, 8, 8), jnp.float16, None),
    "channels-float32": (ChannelDeltaOptions(1, 1, 70, 8), jnp.float32, None),
    "mamba2-float32": (Mamba2Options(1, 1, 70, 8), jnp.float32, None),
}
OPERATIONS = {
    ConvOptions: "causal_conv",
    ChannelDeltaOptions: "gated_delta",
    DeltaOptions: "gated_delta",
    Mamba2Options: "mamba2",
}
CONVOLUTIONS = {"conv": (3, 130), "conv-of-seven": (7, 20)}  # taps and channels


def rows_of(length: int, border: int, seed: int, last: int = 3) -> StateRows:
    """Make a row of `length` tokens, a row of one, padding of two, a long row and an empty one.

    `last` tokens follow the last row. The first row starts from zeros or from its own state, and
    the long one from place 3.
    """
    rng = np.random.default_rng(seed)
    lengths = [length, 1, 2, TOKENS - last - 3 - length, 0]
    source = [rng.choice([-1, 0]), 1, 2, 3, 4]
    target, saved = [0, 1, -1, 2, 5], [6, 7, 8, 9, 10]
    border_of_long = rng.integers(0, lengths[3] + 1)
    borders = [border, rng.integers(0, 2), 1, border_of_long, 0]
    parts = np.cumsum([0, *lengths]), source, target, borders, saved
    return StateRows(*(jnp.asarray(part, jnp.int32) for part in parts))


def draw(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@functools.cache
def operands(name: str) -> list[Any]:
    """Return the arguments of an operation before `rows`, with NaN in states that no row reads."""
    options, dtype, _ = (CASES | OTHERS)[name]
    if isinstance(options, ConvOptions):
        taps, channels = CONVOLUTIONS[name]
        bias = draw(4, channels, dtype=dtype) if options.activation == "silu" else None
        past, weight = draw(2, PLACES, taps - 1, channels), draw(3, taps, channels, dtype=dtype)
        return [draw(1, TOKENS, channels, dtype=dtype), past.at[UNREAD].set(jnp.nan), weight, bias]
    past = draw(2, PLACES, options.heads, options.inputs, options.outputs)
    # The first head forgets everything at most tokens.
    constants = draw(4, *options.constants).at[0, 0].set(5.0)
    mixed = draw(1, TOKENS, options.width, dtype=dtype)
    gates = [draw(5 + nth, TOKENS, *shape, dtype=dtype) for nth, shape in enumerate(options.gates)]
    gate = ChannelGates(*gates) if isinstance(options, ChannelDeltaOptions) else gates[0]
    return [mixed, gate, past.at[UNREAD].set(jnp.nan), constants]


@functools.cache
def compiled(name: str, is_specification: bool) -> Any:
    options, dtype, config = (CASES | OTHERS)[name]
    op = OPERATIONS[type(options)]
    if is_specification:
        run = functools.partial(getattr(reference, op), options=options)
    else:
        is_conv = op == "causal_conv"
        size = CONVOLUTIONS[name][0] if is_conv else options.inputs
        case = StateCase(op, DeviceLimits("cpu", "cpu"), jnp.dtype(dtype), TOKENS, size)
        fixed = {"options": options, "case": case, "interpret": True}
        fixed |= {} if config is None else {"config": config}
        module = triton_causal_conv if is_conv else triton_state_chunks
        module = triton_channel_chunks if isinstance(options, ChannelDeltaOptions) else module
        run = functools.partial(getattr(module, op), **fixed)
    return jax.jit(run, compiler_options=EXACT)


def check(name: str, rows: StateRows, poisoned: int | None = None) -> None:
    """Compare the kernel with the specification. Tokens of padding are NaN.

    Args:
        poisoned: a row with a NaN at its middle, whose results are not compared.
    """
    _, dtype, _ = (CASES | OTHERS)[name]
    arrays = list(operands(name))
    token, start = np.arange(TOKENS), np.asarray(rows.query_start)
    row = np.searchsorted(start, token, side="right") - 1
    is_padding = (row == len(rows.target)) | (row == PADDING)
    is_nan, places = is_padding.copy(), np.arange(PLACES)
    if poisoned is not None:
        is_nan[(start[poisoned] + start[poisoned + 1]) // 2] = True
        spoiled = [int(part[poisoned]) for part in (rows.target, rows.saved)]
        places = np.setdiff1d(places, spoiled)
    arrays[0] = jnp.where(jnp.asarray(is_nan)[:, None], jnp.nan, arrays[0])
    y, after = (np.asarray(part, np.float64) for part in compiled(name, False)(*arrays, rows))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda part: part.astype(jnp.float64), arrays)
        results = compiled(name, True)(*wide, rows)
        expected, expected_after = (np.asarray(part) for part in results)
    assert not y[is_padding].any()
    pairs = (y[row != poisoned], expected[row != poisoned]), (after[places], expected_after[places])
    for got, specified in pairs:
        scale = max(1.0, np.nanmax(np.abs(specified)))
        np.testing.assert_allclose(got, specified, rtol=0, atol=scale * TOLERANCES[dtype])


@pytest.mark.parametrize("name", CASES)
def test_rows_of_every_length(name: str) -> None:
    """The border is anywhere: at zero for no border, at the end, within a block or between two."""
    rng = np.random.default_rng(7)
    for length in range(1, LONGEST + 1):
        check(name, rows_of(length, int(rng.integers(0, length + 1)), length))


@pytest.mark.parametrize(
    "name", ["delta-small-blocks", "channels-small-blocks", "mamba2", "conv-of-seven"]
)
def test_borders_at_every_offset(name: str) -> None:
    for border in range(LONGEST + 1):
        check(name, rows_of(LONGEST, border, border))


@pytest.mark.parametrize("name", OTHERS)
def test_other_dtypes(name: str) -> None:
    for length, last in ((1, 0), (2, 0), (64, 3), (77, 40)):
        check(name, rows_of(length, length // 2, length, last))


@pytest.mark.parametrize("name", ["delta", "channels", "mamba2", "conv"])
def test_numbers_of_a_row_reach_no_other_row(name: str) -> None:
    for row in (0, 1, 3):
        check(name, rows_of(20, 7, 0), poisoned=row)


@pytest.mark.parametrize("op", ["causal_conv", "gated_delta", "channel_delta", "mamba2"])
def test_cards_from_capability_8_0_on_run_kernels(op: str) -> None:
    names = {}
    for name in ("Tesla T4", "NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA GeForce RTX 5090"):
        limits = find_card(name).limits
        case = StateCase(op, limits, jnp.dtype(jnp.bfloat16), 64, 4)
        names[limits.capability] = choose("auto", case)
    assert names == {(7, 5): "xla", (8, 0): "triton", (9, 0): "triton", (12, 0): "triton"}
    on_cpu = StateCase(op, DeviceLimits("cpu", "cpu"), jnp.dtype(jnp.bfloat16), 64, 4)
    assert choose("auto", on_cpu) == "llvm"


@pytest.mark.parametrize(
    ("op", "size", "named"),
    [("causal_conv", 17, "17 taps"), ("gated_delta", 257, "257 inputs"), ("mamba2", 512, "512")],
)
def test_sizes_without_a_kernel_are_named(op: str, size: int, named: str) -> None:
    limits = find_card("NVIDIA H200").limits
    case = StateCase(op, limits, jnp.dtype(jnp.bfloat16), 64, size)
    assert choose("auto", case) == "xla"
    with pytest.raises(ValueError, match=named):
        choose("triton", case)
