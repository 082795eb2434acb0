"""greatest: every implementation finds the first greatest number, and numbers that are not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import greatest

IMPLEMENTATIONS = ("triton_interpret", "xla")
LARGEST = np.finfo(np.float32).max


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 4096), (2, 4097), (5, 9000), (4, 100)])
def test_the_first_greatest_is_found(implementation: str, rows: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    # Few different numbers, so that many are equal.
    x = rng.integers(-5, 5, (rows, columns)).astype(np.float32)
    x[0] = -LARGEST
    x[-1, columns // 2] = LARGEST
    found = np.asarray(greatest(jnp.asarray(x), implementation=implementation))
    np.testing.assert_array_equal(found, x.argmax(axis=1))
    assert found.dtype == np.int32


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("where", [0, 4095, 4096, 4999])
def test_a_row_that_is_not_finite_has_none(implementation: str, bad: float, where: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 5000)).astype(np.float32)
    x[1, where] = bad
    found = np.asarray(greatest(jnp.asarray(x), implementation=implementation))
    assert found[1] == -1
    np.testing.assert_array_equal(found[[0, 2]], x.argmax(axis=1)[[0, 2]])


def test_float64_is_compared_as_such() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray([[1.0, 1.0 + 1e-12], [1e300, 0.0]])
        assert greatest(x).tolist() == [1, 0]
        with pytest.raises(ValueError, match="x has dtype float64; allowed: bfloat16, float16 or"):
            greatest(x, implementation="triton_interpret")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (jnp.zeros(4), r"x has shape \(4,\); expected \[R,V\]"),
        (jnp.zeros((2, 0)), "both at least 1"),
        (jnp.zeros((2, 3), jnp.bfloat16), "x has dtype bfloat16; allowed: float32, float64"),
    ],
)
def test_misuse_is_refused(x: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        greatest(x)
