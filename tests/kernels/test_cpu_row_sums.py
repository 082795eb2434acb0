"""Sums of rows, softmax and sigmoid: right, and the same to the bit however many rows there are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import row_ops, row_sums, sigmoid, softmax, softplus
from pallas_kernels.cpu import row_sums as cpu_sums
from tests.support.fast_compile import FAST

OF = ("numbers", "squares", "exps")
SIZES = (1, 3, 8, 31, 32, 33, 64, 100, 768, 2053)
Of = Literal["numbers", "squares", "exps"]


def exact(x: np.ndarray, of: Of) -> np.ndarray:
    """Return the terms of the sum in float64."""
    wide = x.astype(np.float64)
    if of == "exps":
        return np.exp(wide - wide.max(axis=-1, keepdims=True))
    return np.square(wide) if of == "squares" else wide


def of_each(function: Callable[[jax.Array], jax.Array], rows: list[np.ndarray]) -> list[np.ndarray]:
    """Return a function's results of several arrays, computed by one program."""
    run = jax.jit(lambda rows: [function(x) for x in rows], compiler_options=FAST)
    return list(map(np.asarray, run(rows)))


# A kernel of the CPU's own computes it, whatever XLA's options are.
compiled_sums = jax.jit(row_sums, static_argnums=1, compiler_options=FAST)


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_rows_of_any_length(dtype: str, of: Of) -> None:
    rng = np.random.default_rng(0)
    rows = [3 * rng.standard_normal((5, size)).astype(jnp.dtype(dtype)) for size in SIZES]
    with jax.enable_x64(True):
        for x, found in zip(rows, of_each(functools.partial(row_sums, term=of), rows), strict=True):
            assert found.dtype == (np.float64 if dtype == "float64" else np.float32)
            terms = exact(x, of)
            bound = (1e-14 if dtype == "float64" else 1e-6) * np.abs(terms).sum(axis=-1)
            assert (np.abs(found - terms.sum(axis=-1)) <= bound).all(), (x.shape, found)


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_is_the_same_to_the_bit_among_any_number(dtype, of: Of) -> None:
    rng = np.random.default_rng(1)
    for size in (33, 768):
        x = rng.standard_normal((600, size)).astype(jnp.dtype(dtype))
        together = np.asarray(compiled_sums(x, of))
        for count in (1, 2, 3, 4, 8, 300):
            some = [compiled_sums(x[at : at + count], of) for at in range(0, 600, max(count, 60))]
            beside = np.concatenate(
                [together[at : at + count] for at in range(0, 600, max(count, 60))]
            )
            np.testing.assert_array_equal(np.concatenate(some), beside)


def test_dimensions_in_front_stay_and_nothing_is_no_error() -> None:
    x = jnp.arange(24.0, dtype=jnp.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(row_sums(x), x.sum(axis=-1))
    assert row_sums(x[:0]).shape == (0, 3)
    np.testing.assert_array_equal(row_sums(x[..., :0]), np.zeros((2, 3)))


def test_what_is_not_finite_spoils_its_own_row_only() -> None:
    x = np.ones((3, 40), np.float32)
    x[0, 35], x[1, 7] = np.nan, -np.inf
    assert np.isnan(np.asarray(row_sums(jnp.asarray(x)))[0])
    np.testing.assert_array_equal(row_sums(jnp.asarray(x), "squares")[1:], [np.inf, 40])
    np.testing.assert_allclose(row_sums(jnp.asarray(x), "exps")[1:], [39, 40])


@pytest.mark.parametrize("of", OF)
def test_plain_jax_gives_the_same_but_for_rounding(monkeypatch: pytest.MonkeyPatch, of: Of) -> None:
    x = jnp.asarray(np.random.default_rng(2).standard_normal((4, 100)), jnp.bfloat16)
    native = row_sums(x, of)
    monkeypatch.setattr(row_ops, "has_llvm", lambda: False)
    plain = row_sums(x, of)
    assert plain.dtype == native.dtype
    np.testing.assert_allclose(plain, native, rtol=1e-5, atol=1e-5)


def test_large_work_is_shared_by_threads() -> None:
    """Parts begin and end at rows."""
    x = np.random.default_rng(3).standard_normal((1013, 700)).astype(np.float32)
    jitted = jax.jit(functools.partial(cpu_sums.row_sums, term="squares"))
    np.testing.assert_allclose(jitted(x), np.square(x).sum(axis=1), rtol=1e-5)


def sigmoid_of(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax_of(x: np.ndarray) -> np.ndarray:
    exps = np.exp(x - x.max(axis=-1, keepdims=True))
    return exps / exps.sum(axis=-1, keepdims=True)


def softplus_of(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


SHARES = pytest.mark.parametrize(
    ("function", "plain"), [(softmax, softmax_of), (sigmoid, sigmoid_of), (softplus, softplus_of)]
)


@SHARES
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shares_of_rows_of_any_length(function, plain, dtype: str) -> None:
    rng, bound = np.random.default_rng(0), {"float32": 4e-6, "float64": 1e-14}[dtype]
    rows = [(5 * rng.standard_normal((7, size))).astype(dtype) for size in (*SIZES, 1000)]
    with jax.enable_x64(True):
        for x, found in zip(rows, of_each(function, rows), strict=True):
            assert found.dtype == dtype and found.shape == x.shape
            np.testing.assert_allclose(found, plain(x.astype(np.float64)), rtol=bound)


@SHARES
def test_shares_are_the_same_to_the_bit_beside_any_rows(function, plain) -> None:
    rng = np.random.default_rng(1)
    for size in (6, 8, 60, 128):
        x = np.float32(3 * rng.standard_normal((515, size)))
        together = np.asarray(jax.jit(function)(x))
        np.testing.assert_allclose(together, plain(x.astype(np.float64)), rtol=4e-6)
        for count in (1, 2, 3, 4, 7, 8, 64):
            some = jax.jit(function)
            for at in range(0, 515 - count, 37):
                beside = together[at : at + count]
                np.testing.assert_array_equal(some(x[at : at + count]), beside)


def test_shares_of_what_is_far_apart_and_not_finite() -> None:
    x = np.zeros((4, 40), np.float32)
    x[0, 3], x[1, 35], x[2, :], x[3, ::2] = 200, np.nan, -1e30, -np.inf
    shares = np.asarray(softmax(jnp.asarray(x)))
    np.testing.assert_array_equal(shares[0], np.arange(40) == 3)
    assert np.isnan(shares[1]).all()
    np.testing.assert_allclose(shares[2], 1 / 40, rtol=1e-6)
    np.testing.assert_allclose(shares[3], (np.arange(40) % 2) / 20, rtol=1e-6)
    found = np.asarray(sigmoid(jnp.asarray([-np.inf, -1e30, -50.0, 0.0, 50.0, np.inf, np.nan])))
    np.testing.assert_allclose(found, [0, 0, 2e-22, 0.5, 1, 1, np.nan], rtol=0.1, atol=1e-29)


@SHARES
def test_plain_jax_gives_the_same_shares(monkeypatch: pytest.MonkeyPatch, function, plain) -> None:
    x = jnp.asarray(np.random.default_rng(2).standard_normal((4, 100)), jnp.float32)
    native = function(x)
    monkeypatch.setattr(row_ops, "has_llvm", lambda: False)
    np.testing.assert_allclose(function(x), native, rtol=1e-5)
    assert function(x[:, :0]).shape == (4, 0)


@SHARES
def test_shares_of_16_bits_are_refused(function, plain) -> None:
    with pytest.raises(ValueError, match="bfloat16; allowed: float32, float64"):
        function(jnp.zeros((2, 8), jnp.bfloat16))
