"""grouped_matmul: all implementations give the reference's rows and read only needed matrices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels import grouped_matmul, reference, xla_grouped_matmul
from pallas_kernels.gpu import triton_grouped_matmul
from pallas_kernels.gpu.tuning import GroupedConfig
from tests.support.fast_compile import FAST
from tests.support.paged_cases import assert_close

ROWS, GROUPS = 40, 5
# Tiles smaller and larger than groups, and sizes that blocks divide or not.
CONFIG = GroupedConfig(block_rows=16, block_columns=32, block_inner=16)
SETUPS = {
    "float32": (jnp.float32, 32, 64),
    "bfloat16, uneven": (jnp.bfloat16, 40, 24),
}


@functools.cache
def compiled(name: str):
    runs = {
        "reference": reference.grouped_matmul,
        "triton": functools.partial(
            triton_grouped_matmul.grouped_matmul, config=CONFIG, interpret=True
        ),
        "xla": xla_grouped_matmul.grouped_matmul,
    }
    return jax.jit(runs[name], compiler_options=FAST)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("name", SETUPS)
@settings(derandomize=True, deadline=None, max_examples=12, database=None)
@example(shares=[0, 0, ROWS, 0, 0])
@example(shares=[0] * GROUPS)
@example(shares=[17, 0, 1, 0, 22])
@given(shares=st.lists(st.integers(0, 20), min_size=GROUPS, max_size=GROUPS))
def test_rows_meet_their_groups_matrix(name: str, implementation: str, shares: list[int]) -> None:
    """Matrices of groups without rows, and rows of no group, are NaN, so that a read shows."""
    dtype, inputs, outputs = SETUPS[name]
    sizes = np.minimum(shares, np.maximum(ROWS - np.cumsum([0, *shares[:-1]]), 0))
    rng = np.random.default_rng(sum(shares))
    x = rng.normal(size=(ROWS, inputs))
    w = rng.normal(size=(GROUPS, inputs, outputs)) / 8
    arrays = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    sizes = jnp.asarray(sizes, jnp.int32)
    wide = [array.astype(jnp.float32) for array in arrays]
    expected = compiled("reference")(*wide, sizes)
    unread = arrays[0].at[int(sizes.sum()) :].set(jnp.nan)
    matrices = jnp.where((sizes == 0)[:, None, None], jnp.nan, arrays[1])
    actual = compiled(implementation)(unread, matrices, sizes)
    assert actual.dtype == dtype
    assert_close(actual, expected, dtype)
    assert not np.asarray(actual, np.float32)[int(sizes.sum()) :].any()


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_a_tile(rows: int) -> None:
    x, w = jnp.ones((rows, 16)), jnp.arange(4.0)[:, None, None] * jnp.ones((4, 16, 8))
    sizes = jnp.zeros(4, jnp.int32).at[3].set(rows)
    for implementation in ("xla", "triton_interpret"):
        y = grouped_matmul(x, w, sizes, implementation=implementation)
        np.testing.assert_array_equal(y, np.full((rows, 8), 48.0))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_on_cpu_the_weights_are_neither_copied_nor_converted(dtype) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((6, 32), (64, 32, 64))]
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)
    memory = jax.jit(grouped_matmul).lower(*shapes, sizes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 64 * 32 * 64 * shapes[1].dtype.itemsize // 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"w": jnp.ones((2, 5, 3))}, "D = 5"),
        ({"w": jnp.ones((2, 4, 3), jnp.bfloat16)}, "w has dtype"),
        ({"x": jnp.ones((3, 4), jnp.int32)}, "x has dtype"),
        ({"x": jnp.ones((0, 4))}, "A = 0"),
        ({"group_sizes": jnp.ones(3, jnp.int32)}, "group_sizes has shape"),
        ({"group_sizes": jnp.ones(2)}, "group_sizes has dtype"),
        ({"implementation": "triton"}, "needs a GPU"),
        ({"implementation": "mosaic_gpu"}, "mosaic_gpu"),
        ({"implementation": "dense"}, "allowed"),
    ],
)
def test_misuse_names_the_argument(change: dict, named: str) -> None:
    call = {"x": jnp.ones((3, 4)), "w": jnp.ones((2, 4, 3)), "group_sizes": jnp.ones(2, jnp.int32)}
    with pytest.raises(ValueError, match=named):
        grouped_matmul(**{**call, **change})
