"""gated: the CPU kernel equals plain JAX, and a number's result is the same at every position."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated
from pallas_kernels.row_arguments import ACTIVATIONS, Activation

EDGES = (0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 200.0, -200.0, 3e38, -3e38, np.nan)


def numbers(rows: int, size: int) -> np.ndarray:
    """Return numbers of very different sizes, including the limits of exponentials."""
    rng = np.random.default_rng(size)
    x = rng.standard_normal((rows, 2, size)) * 10.0 ** rng.integers(-3, 2, (rows, 1, 1))
    x[0, 0, : len(EDGES)] = EDGES[:size]
    x[:, 1] = np.clip(x[:, 1], -0.5, 0.5)
    return x


def expected(x: np.ndarray, activation: Activation) -> np.ndarray:
    """Compute in float64, by the definitions."""
    gate, up = x[:, 0].astype(np.float64), x[:, 1].astype(np.float64)
    if activation == "silu":
        return gate / (1 + np.exp(-np.clip(gate, -700, None))) * up
    cubed = np.clip(gate, -1e3, 1e3) ** 3
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * cubed))) * up


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (jnp.float32, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float32, jnp.bfloat16),
        (jnp.float16, jnp.float16),
    ],
)
def test_results(activation: Activation, dtype: Any, result: Any) -> None:
    for rows, size in ((1, 11), (3, 16), (5, 77)):
        x = numbers(rows, size).astype(np.float32)
        x = np.clip(x, -6e4, 6e4) if dtype == jnp.float16 else x
        given = jnp.asarray(x, dtype)
        got = gated(given, activation, result)
        assert got.dtype == result and got.shape == (rows, size)
        want = expected(np.asarray(given.astype(result).astype(jnp.float32)), activation)
        step = float(jnp.finfo(result).eps)
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=4 * step, atol=1e-7)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float64_stays_float64(activation: Activation) -> None:
    with jax.enable_x64(True):
        x = numbers(3, 21)[1:]
        got = gated(jnp.asarray(x), activation)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, expected(x, activation), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_number_is_the_same_to_the_bit_wherever_it_stands(activation: Activation) -> None:
    """In vectors and alone, and however many threads share the work."""
    x = jnp.asarray(numbers(64, 1031), jnp.float32)
    whole = np.asarray(gated(x, activation))
    for row, size in ((0, 1031), (63, 1031), (17, 5), (5, 1)):
        alone = np.asarray(gated(x[row : row + 1, :, -size:], activation))
        np.testing.assert_array_equal(alone[0], whole[row, -size:])


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x has shape \(3, 4\); expected \[T,2,F\]"):
        gated(jnp.zeros((3, 4)), "silu")
    with pytest.raises(ValueError, match="activation is 'relu'; allowed: silu, gelu_tanh"):
        gated(jnp.zeros((3, 2, 4)), "relu")  # pyright: ignore[reportArgumentType]
