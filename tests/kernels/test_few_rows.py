"""Products of few rows: every implementation gives the reference's numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_matmul, matmul_in_parts, reference
from tests.support.fast_compile import EXACT

IMPLEMENTATIONS = ("triton_interpret", "xla")
DTYPES = (jnp.bfloat16, jnp.float16)
# Rows, inputs, outputs: tiles of every size, sizes that they divide and not.
SHAPES = ((1, 64, 64), (3, 200, 72), (16, 128, 100), (33, 64, 130), (64, 136, 16), (5, 8, 1))


def inputs(dtype: Any, rows: int, *shape: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return rows of very different sizes, one of which is NaN where there are several."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, shape[0])) * 10.0 ** rng.integers(-2, 2, (rows, 1))
    if rows > 2:
        x[2] = np.nan
    w = rng.standard_normal(shape) * shape[0] ** -0.5
    return x.astype(jnp.dtype(dtype)), w.astype(jnp.dtype(dtype))


PARTS = (1, 2, 8)
ACTIVATIONS: tuple[Any, ...] = ("silu", "gelu_tanh")


def results(function: Callable[..., jax.Array], kinds: Sequence[Any], x: Any, w: Any) -> list[Any]:
    """Return the products of all kinds, of one program: to compile is most of the cost."""

    @functools.partial(jax.jit, compiler_options=EXACT)
    def program(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        return [function(x, w, kind) for kind in kinds]

    return jax.device_get(program(x, w))


@functools.cache
def specified(
    function: Callable[..., jax.Array], kinds: tuple[Any, ...], dtype: Any, rows: int, *shape: int
) -> list[np.ndarray]:
    return results(function, kinds, *inputs(dtype, rows, *shape))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "outputs"), SHAPES)
def test_sums_over_parts(
    implementation: str, dtype: Any, rows: int, width: int, outputs: int
) -> None:
    found = results(
        functools.partial(matmul_in_parts, implementation=implementation),
        PARTS,
        *inputs(dtype, rows, width, outputs),
    )
    wanted = specified(reference.matmul_in_parts, PARTS, dtype, rows, width, outputs)
    for parts, got, want in zip(PARTS, found, wanted, strict=True):
        assert got.dtype == jnp.float32 and got.shape == (parts, rows, outputs)
        assert_rows_close(got, want, 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "outputs"), [*SHAPES, (130, 72, 40)])
def test_gated(implementation: str, dtype: Any, rows: int, width: int, outputs: int) -> None:
    found = results(
        functools.partial(gated_matmul, implementation=implementation),
        ACTIVATIONS,
        *inputs(dtype, rows, width, 2, outputs),
    )
    wanted = specified(reference.gated_matmul, ACTIVATIONS, dtype, rows, width, 2, outputs)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype and got.shape == (rows, outputs)
        # Both products may be rounded to the number next to the reference's.
        assert_rows_close(got, want.astype(np.float32), 4 * float(jnp.finfo(dtype).eps))


def assert_rows_close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Compare by the largest number of each row, with NaN in the same places."""
    numbers = np.asarray(got, np.float32)
    assert (np.isnan(numbers) == np.isnan(want)).all()
    largest = np.nan_to_num(np.abs(want)).max(axis=-1, keepdims=True)
    off = np.nan_to_num(np.abs(numbers - want))
    assert (off <= tolerance * largest).all(), (off / np.maximum(largest, 1e-30)).max()


def test_some_rows_of_few_outputs_have_a_kernel_too() -> None:
    run = functools.partial(matmul_in_parts, implementation="triton_interpret")
    [got] = results(run, (4,), *inputs(jnp.bfloat16, 130, 64, 24))
    [want] = specified(reference.matmul_in_parts, (4,), jnp.bfloat16, 130, 64, 24)
    assert_rows_close(got, want, 1e-6)


def test_large_gates_do_not_overflow() -> None:
    x = np.array([[1.0], [-1.0]], jnp.bfloat16)
    w = np.array([[[1e4, 3.0], [1.0, 1.0]]], jnp.bfloat16)
    kernel = functools.partial(gated_matmul, implementation="triton_interpret")
    both = (results(run, ACTIVATIONS, x, w) for run in (kernel, reference.gated_matmul))
    for got, want in zip(*both, strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, want)), rtol=1e-2)


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, w = rng.standard_normal((3, 8)), rng.standard_normal((8, 2, 5))
        parts = matmul_in_parts(x, w[:, 0], 4)
        np.testing.assert_allclose(parts.sum(axis=0), x @ w[:, 0], rtol=1e-13)
        gate, up = np.moveaxis(np.einsum("td,dgf->tgf", x, w), 1, 0)
        expected = gate / (1 + np.exp(-gate)) * up
        np.testing.assert_allclose(gated_matmul(x, w), expected, rtol=1e-13)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x, w: matmul_in_parts(x[0], w[:, 0], 1), r"x has shape .* expected \[T,D\]"),
        (lambda x, w: matmul_in_parts(x, w, 1), r"w has shape .* expected \[D,F\] with D = 16"),
        (lambda x, w: matmul_in_parts(x, w[:8, 0], 1), "w has shape"),
        (lambda x, w: matmul_in_parts(x, w[:, 0], 3), "parts is 3; allowed: divisors of D = 16"),
        (lambda x, w: matmul_in_parts(x, w[:, 0], 0), "parts is 0"),
        (
            lambda x, w: matmul_in_parts(x, w[:, 0].astype(jnp.bfloat16), 1),
            "w has dtype bfloat16; expected that of x, float32",
        ),
        (lambda x, w: gated_matmul(x, w[:, 0]), r"expected \[D,2,F\] with D = 16"),
        (lambda x, w: gated_matmul(x, w, "relu"), "activation is 'relu'; allowed: silu, gelu"),
        (
            lambda x, w: gated_matmul(x, w, implementation="triton_interpret"),
            "x has dtype float32; allowed: bfloat16 or float16",
        ),
        (
            lambda x, w: matmul_in_parts(
                jnp.zeros((65, 16), jnp.bfloat16),
                jnp.zeros((16, 2049), jnp.bfloat16),
                1,
                implementation="triton_interpret",
            ),
            "x has T = 65 rows; allowed: 1 to 64",
        ),
        (lambda x, w: gated_matmul(x, w, implementation="mosaic_gpu"), "mosaic_gpu needs a GPU"),
    ],
)
def test_misuse_is_refused(run: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(jnp.zeros((3, 16)), jnp.zeros((16, 2, 4)))
