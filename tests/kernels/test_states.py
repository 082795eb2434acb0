"""Causal convolution, gated delta rule and Mamba-2 against the recurrences, token by token."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference, states
from pallas_kernels.state_arguments import (
    ChannelDeltaOptions,
    ChannelGates,
    ConvOptions,
    DeltaOptions,
    Mamba2Options,
    StateRows,
)

DTYPES = (jnp.float64, jnp.float32, jnp.bfloat16)
CONVOLUTIONS = ((3, 48), (7, 130), (2, 1))  # width and channels
PLACES = 20
LENGTHS = ([1], [3, 1, 2, 5], [130], [1] * 7, [64, 1, 63])
SIZES = ((2, 6, 16, 32), (2, 2, 5, 7), (1, 3, 16, 130))


def step_rows(lengths: list[int], seed: int, padding: int = 3) -> tuple[StateRows, int]:
    """Make rows with sources, targets and borders of all kinds. Returns them and the tokens."""
    rng = np.random.default_rng(seed)
    count = len(lengths)
    places = rng.permutation(PLACES - 1)
    target, saved, fresh = places[:count].copy(), rng.choice(places[count:], count, False), -1
    source = np.where(rng.random(count) < 0.4, target, rng.choice([fresh, *saved[:1]], count))
    border = np.array([rng.integers(0, length + 1) for length in lengths])
    border[source == saved[0]] = 0
    border[0] *= 0 if (source == saved[0]).any() else 1
    if count > 2:
        target[1] = -1  # padding
    starts = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.concatenate([starts, [starts[-1]]])  # a row without tokens
    arrays = (starts, *(np.append(part, last) for part, last in (
        (source, 0), (target, PLACES - 1), (border, 0), (saved, 0)
    )))  # fmt: skip
    return StateRows(*(jnp.asarray(part, jnp.int32) for part in arrays)), starts[-1] + padding


def draw(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def operands(op: str, sizes: Any, tokens: int, dtype: Any, biased: bool = True) -> list[Any]:
    """Return the arguments of an operation before `rows`, for random numbers."""
    exact = jnp.promote_types(dtype, jnp.float32)
    if op == "causal_conv":
        width, channels = sizes
        past = draw(2, PLACES, width - 1, channels, dtype=exact)
        weight, bias = draw(3, width, channels, dtype=dtype), draw(4, channels, dtype=dtype)
        return [draw(1, tokens, channels, dtype=dtype), past, weight, bias if biased else None]
    past = draw(2, PLACES, sizes.heads, sizes.inputs, sizes.outputs, dtype=exact)
    gates = [draw(3 + nth, tokens, *shape, dtype=dtype) for nth, shape in enumerate(sizes.gates)]
    gates = ChannelGates(*gates) if isinstance(sizes, ChannelDeltaOptions) else gates[0]
    constants = draw(5, *sizes.constants, dtype=exact)
    return [draw(1, tokens, sizes.width, dtype=dtype), gates, past, constants]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    "dtype", [jnp.float64, jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__
)
@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        *(("causal_conv", sizes) for sizes in CONVOLUTIONS),
        *(("gated_delta", DeltaOptions(*sizes)) for sizes in SIZES),
        ("gated_delta", DeltaOptions(*SIZES[1], strength=2.0)),
        *(("gated_delta", ChannelDeltaOptions(*sizes)) for sizes in SIZES),
        *(("gated_delta", ChannelDeltaOptions(*sizes, bound=2.5)) for sizes in SIZES[:2]),
        *(("mamba2", Mamba2Options(*sizes, 0.01, 2.0)) for sizes in SIZES),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_follow_the_specification(
    op: str, sizes: Any, dtype: Any, lengths: list[int]
) -> None:
    with jax.enable_x64(True):
        check(op, sizes, dtype, lengths)


def check(op: str, sizes: Any, dtype: Any, lengths: list[int]) -> None:
    """Compare a kernel with the specification in float64."""
    rows, tokens = step_rows(lengths, len(lengths))
    given = operands(op, sizes, tokens, dtype, biased=len(lengths) > 1)
    options = sizes
    if op == "causal_conv":
        options = ConvOptions("silu" if len(lengths) % 2 else "none")
    wide = jax.tree.map(lambda array: array.astype(jnp.float64), given)
    y, after = jax.jit(getattr(states, op), static_argnums=5)(*given, rows, options)
    specified = jax.jit(getattr(reference, op), static_argnums=5)
    expected, expected_after = specified(*wide, rows, options)
    assert y.dtype == dtype and after.dtype == jnp.promote_types(dtype, jnp.float32)
    tolerance = {jnp.float64: 1e-12, jnp.float32: 1e-4, jnp.bfloat16: 2e-2}[dtype]
    used = np.array(expected)
    np.testing.assert_allclose(y.astype(jnp.float64), used, rtol=tolerance, atol=tolerance)
    tolerance = min(tolerance, 1e-4)
    np.testing.assert_allclose(after, expected_after, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op", ["causal_conv", "gated_delta", "channel_delta", "mamba2"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
def test_bits_do_not_depend_on_chunks(op: str, dtype: Any) -> None:
    length = 24
    sizes: Any = {
        "causal_conv": (4, 37),
        "gated_delta": DeltaOptions(2, 4, 16, 24),
        "channel_delta": ChannelDeltaOptions(2, 4, 16, 24),
        "mamba2": Mamba2Options(2, 4, 16, 24),
    }[op]
    options = ConvOptions("silu") if op == "causal_conv" else sizes
    inputs = [0] if op == "causal_conv" else [0, 1]
    place = 1 if op == "causal_conv" else 2
    given = operands(op, sizes, length, dtype)
    name = "gated_delta" if op == "channel_delta" else op
    run = jax.jit(getattr(states, name), static_argnums=5)
    results: list[Any] = []
    for chunks in ([24], [8, 8, 8], [2, 1, 5, 16], [1] * 24):
        now, outputs, done = list(given), [], 0
        for chunk in chunks:
            part = list(now)
            for index in inputs:
                cut = partial(jax.lax.slice_in_dim, start_index=done, limit_index=done + chunk)
                part[index] = jax.tree.map(cut, given[index])
            source = -1 if done == 0 else 3
            numbers = [[0, chunk], [source], [3], [0], [0]]
            rows = StateRows(*(jnp.asarray(number, jnp.int32) for number in numbers))
            y, now[place] = run(*part, rows, options)
            outputs.append(np.asarray(y))
            done += chunk
        results.append((np.concatenate(outputs).tobytes(), np.asarray(now[place]).tobytes()))
    assert len(set(results)) == 1
