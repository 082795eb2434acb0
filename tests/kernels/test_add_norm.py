"""add_norm: every implementation gives the reference's sum, to the bit, and its norm."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_norm, reference
from pallas_kernels.row_arguments import NO_NORM, NormOptions
from tests.support.fast_compile import EXACT

IMPLEMENTATIONS = ("triton_interpret", "xla", "llvm")
# Parts of delta, offset, rounds_last.
KINDS = ((None, 0.0, False), (0, 0.0, False), (0, 1.0, True), (1, 0.0, True), (4, 0.0, False))
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
RUNS = [
    (name, dtype)
    for name in IMPLEMENTATIONS
    for dtype in DTYPES
    if (name, dtype) != ("llvm", jnp.float16)
]


Arrays = tuple[np.ndarray, np.ndarray | None, np.ndarray]


def inputs(dtype: Any, rows: int, width: int, parts: int | None, seed: int = 0) -> Arrays:
    """Return rows of very different sizes, including one of zeros and one with a NaN.

    Args:
        parts: of delta, 0 for an undivided one, None for no delta.
    """
    dtype = jnp.dtype(dtype)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width)) * 10.0 ** rng.integers(-3, 4, (rows, 1))
    if rows > 2:
        x[1] = 0.0
        x[2, width // 2] = np.nan
    scale = rng.standard_normal(width).astype(dtype)
    if parts is None:
        return x.astype(dtype), None, scale
    shape = (parts, rows, width) if parts else (rows, width)
    delta = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, (rows, 1))
    if rows > 2:
        delta[..., 1, :] = 0.0
    if parts == 4:  # rows of padding
        delta = np.concatenate([delta, np.full((parts, 2, width), np.nan)], axis=1)
    return x.astype(dtype), delta.astype(np.float32 if parts else dtype), scale


def check(got: tuple[Any, Any], want: tuple[Any, Any], dtype: Any, *, exact: bool = True) -> None:
    """Compare sums to the bit, and norms within a step of the dtype, or two if it rounds twice."""
    for result in got:
        assert result.dtype == dtype and result.shape == want[0].shape
    sums = [np.asarray(array, np.float64) for array in (got[0], want[0])]
    if exact:
        np.testing.assert_array_equal(*sums)
    else:  # parts may be added in another order, and cancel
        largest = np.nanmax(np.abs(sums[1]), axis=1, initial=0)
        step = float(jnp.finfo(dtype).eps)
        assert (np.nanmax(np.abs(sums[0] - sums[1]), axis=1) <= 8 * step * largest).all()
        return
    norms = [np.asarray(array, np.float64) for array in (got[1], want[1])]
    np.testing.assert_allclose(*norms, rtol=4 * float(jnp.finfo(dtype).eps), atol=1e-7)


Call = tuple[tuple[Any, ...], NormOptions]  # x, delta, scale, delta_scale


def run(implementation: str, calls: Sequence[Call]) -> list[tuple[Any, Any]]:
    """Return the results of all calls, computed by one program: to compile is most of the cost.

    Args:
        implementation: of `add_norm`, or "reference".
    """

    @functools.partial(jax.jit, compiler_options=EXACT)
    def program(arrays: list[Any]) -> list[tuple[jax.Array, jax.Array]]:
        found = []
        for own, (_, options) in zip(arrays, calls, strict=True):
            if implementation == "reference":
                found.append(reference.add_norm(*own, options))
            else:
                found.append(add_norm(*own, options=options, implementation=implementation))
        return found

    return jax.device_get(program([arrays for arrays, _ in calls]))


@functools.cache
def calls_of_kinds(dtype: Any, rows: int, width: int) -> tuple[list[Call], list[tuple[Any, Any]]]:
    """Return a call of every kind, and the specification's results."""
    calls: list[Call] = []
    for parts, offset, rounds_last in KINDS:
        arrays = inputs(dtype, rows, width, parts, seed=width)
        calls.append(((*arrays, None), NormOptions(1e-5, offset, rounds_last)))
    return calls, run("reference", calls)


@functools.cache
def calls_with_factors(dtype: Any, parts: int) -> tuple[list[Call], list[tuple[Any, Any]]]:
    """Return calls that norm and scale the added rows, and the specification's results."""
    calls: list[Call] = []
    for has_norm, has_delta_norm, factor, offset in (
        *((True, True, 1.0, 1.0), (True, True, 0.3, 0.0), (True, False, 0.3, 0.0)),
        *((False, True, 1.0, 0.0), (False, False, 1.0, 0.0)),
    ):
        x, delta, scale = inputs(dtype, 5, 80, parts)
        scales = scale if has_norm else None, 1 + scale[::-1] if has_delta_norm else None
        calls.append(((x, delta, *scales), NormOptions(1e-5, offset, offset > 0, factor)))
    return calls, run("reference", calls)


@pytest.mark.parametrize(("implementation", "dtype"), RUNS)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 16), (33, 80), (3, 2880)])
def test_sums_and_norms(implementation: str, dtype: Any, rows: int, width: int) -> None:
    calls, wanted = calls_of_kinds(dtype, rows, width)
    found = run(implementation, calls)
    for (parts, *_), got, want in zip(KINDS, found, wanted, strict=True):
        check(got, want, dtype, exact=parts != 4)
        # A NaN in one row does not reach another.
        finite = [row for row in range(rows) if rows < 3 or row != 2]
        assert np.isfinite(np.asarray(got[1], np.float32)[finite]).all()


@pytest.mark.parametrize(("implementation", "dtype"), RUNS)
@pytest.mark.parametrize("parts", [0, 1])
def test_what_is_added_is_normed_and_scaled(implementation: str, dtype: Any, parts: int) -> None:
    calls, wanted = calls_with_factors(dtype, parts)
    found = run(implementation, calls)
    for (arrays, _), got, want in zip(calls, found, wanted, strict=True):
        rows = [0, 1, 3, 4]  # without the one that is not a number
        step = float(jnp.finfo(dtype).eps)
        for mine, theirs in zip(got, want, strict=True):
            assert mine.dtype == dtype
            pair = [np.asarray(array, np.float64)[rows] for array in (mine, theirs)]
            largest = np.abs(pair[1]).max(axis=1, keepdims=True)
            assert (np.abs(pair[0] - pair[1]) <= 4 * step * largest).all()
        if arrays[2] is None:
            np.testing.assert_array_equal(*(np.asarray(array, np.float32) for array in got))


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True):
        x, delta, scale = inputs(jnp.float64, 3, 24, 0)
        got = add_norm(x, delta, scale, options=NormOptions(1e-6))
        want = reference.add_norm(x, delta, scale, None, NormOptions(1e-6))
        np.testing.assert_allclose(got[1], want[1], rtol=1e-14)
        with pytest.raises(ValueError, match="x has dtype float64; allowed: bfloat16, float16 or"):
            add_norm(x, delta, scale, options=NormOptions(1e-6), implementation="triton_interpret")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros(4)}, r"x has shape \(4,\); expected \[T,D\]"),
        ({"x": jnp.zeros((0, 4))}, "expected .*, both at least 1"),
        ({"delta": jnp.zeros((2, 5))}, "delta"),
        ({"delta": jnp.zeros((2, 4), jnp.bfloat16)}, "delta has dtype bfloat16"),
        ({"delta": jnp.zeros((3, 2, 4), jnp.bfloat16)}, "delta has dtype bfloat16"),
        ({"scale": jnp.zeros(5)}, "scale"),
        ({"scale": jnp.zeros(4, jnp.float16)}, "scale has dtype float16"),
        ({"scale": None}, "delta is None; expected one"),
        ({"delta_scale": jnp.ones(4)}, "delta is None; expected one"),
        ({"delta": jnp.zeros((2, 4)), "delta_scale": jnp.ones(3)}, "delta_scale has shape"),
        ({"options": NormOptions(-1.0)}, "eps is -1.0; allowed: 0 or more"),
        (
            {
                "x": jnp.zeros((2, 4), jnp.float16),
                "scale": jnp.ones(4, jnp.float16),
                "implementation": "llvm",
            },
            "x has dtype float16; allowed: bfloat16, float32 or float64",
        ),
        ({"implementation": "mosaic_gpu"}, "mosaic_gpu needs a GPU"),
    ],
)
def test_misuse_is_refused(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"x": jnp.zeros((2, 4)), "delta": None, "scale": jnp.ones(4)}
    call |= {"options": NormOptions(1e-5), **change}
    with pytest.raises(ValueError, match=message):
        add_norm(**call)


def test_a_row_too_wide_for_registers_is_refused() -> None:
    x = jax.ShapeDtypeStruct((1, 32769), jnp.float32)
    scale = jax.ShapeDtypeStruct((32769,), jnp.float32)
    with pytest.raises(ValueError, match="x has D = 32769; allowed: 1 to 32768"):
        jax.eval_shape(
            lambda x, scale: add_norm(
                x, None, scale, options=NO_NORM, implementation="triton_interpret"
            ),
            *(x, scale),
        )
