"""The compiled kernels against the reference in float32, NaN wherever they may not read."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    grouped_matmul,
    kv_write,
    paged_decode_attention,
    quantized_grouped_matmul,
    ragged_paged_attention,
    reference,
)
from tests.support.paged_cases import FP8, assert_close, paged_call

pytestmark = pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")

RAGGED_ROWS = [(300, 1000), (1, 2500), (0, 0), (1, 1), (7, 70), (128, 128), (1, 0)]
DECODE_ROWS = [(1, n) for n in (1, 15, 16, 17, 64, 65, 0, 1000, 5000)]
OPTIONS = {"window": 100, "soft_cap": 5.0, "sinks": True}
DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32, "fp8": FP8}


def _setup(dtype: str, head_dim: int, options: dict) -> dict:
    fp8 = dtype == "fp8"
    return {
        "dtype": jnp.bfloat16 if fp8 else DTYPES[dtype],
        "page_dtype": DTYPES[dtype],
        "scales": fp8,
        "head_dim": head_dim,
        "heads": 8,
        "kv_heads": 2,
        **options,
    }


def _ragged(implementation: str, setup: dict) -> None:
    call = paged_call(RAGGED_ROWS, padding=9, **setup)
    actual = ragged_paged_attention(
        *call.ragged, call.attention_options, implementation=implementation
    )
    wide = call.wide()
    expected = reference.ragged_paged_attention(wide.ragged_arrays, wide.attention_options)
    assert_close(actual, expected, call.q.dtype)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), list(itertools.product(DTYPES, (64, 80, 96, 128, 256)))
)
def test_triton_ragged(dtype: str, head_dim: int, options: dict) -> None:
    _ragged("triton", _setup(dtype, head_dim, options))


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mosaic_ragged(dtype: str, head_dim: int, page_size: int, options: dict) -> None:
    _ragged("mosaic_gpu", {**_setup(dtype, head_dim, options), "page_size": page_size})


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), list(itertools.product(DTYPES, (64, 80, 96, 128, 256)))
)
def test_triton_decode(dtype: str, head_dim: int, options: dict) -> None:
    call = paged_call(DECODE_ROWS, **_setup(dtype, head_dim, options))
    actual = paged_decode_attention(*call.decode, call.attention_options, implementation="triton")
    wide = call.wide()
    expected = reference.paged_decode_attention(wide.decode_arrays, wide.attention_options)
    assert_close(actual, expected, call.q.dtype)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_triton_page_sizes_and_groups(page_size: int, group: int) -> None:
    setup = _setup("bfloat16", 128, {"page_size": page_size, "heads": 2 * group})
    _ragged("triton", setup)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_kv_write_is_exact_and_in_place(dtype: str) -> None:
    rng = np.random.default_rng(0)
    new = [jnp.asarray(rng.normal(size=(64, 8, 128)) * 200, jnp.bfloat16) for _ in range(2)]
    slots = jnp.asarray(rng.permutation(200)[:64] - 10, jnp.int32)
    zeros = [jnp.zeros((12, 8, 16, 128), DTYPES[dtype]) for _ in range(2)]
    expected = reference.kv_write(*new, *zeros, slots)
    pages = [jnp.zeros_like(z) for z in zeros]
    where = [p.unsafe_buffer_pointer() for p in pages]
    actual = jax.jit(kv_write, donate_argnums=(2, 3))(*new, *pages, slots)
    assert [a.unsafe_buffer_pointer() for a in actual] == where
    for mine, theirs in zip(actual, expected, strict=True):
        assert bool((mine.astype(jnp.float32) == theirs.astype(jnp.float32)).all())


@pytest.mark.parametrize("rows", [1, 40, 700])
@pytest.mark.parametrize("shape", [(264, 200), (256, 512)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_grouped_matmul(dtype: str, shape: tuple[int, int], rows: int) -> None:
    """Groups without rows, and rows of no group, hold NaN."""
    rng, groups = np.random.default_rng(rows), 9
    x = jnp.asarray(rng.normal(size=(rows, shape[0])), dtype)
    w = jnp.asarray(rng.normal(size=(groups, *shape)) / 16, dtype)
    sizes = jnp.asarray(
        rng.multinomial(rows, rng.dirichlet(np.ones(groups + 1) / 3))[:-1], jnp.int32
    )
    wide = x.astype(jnp.float32), w.astype(jnp.float32)
    expected = reference.grouped_matmul(*wide, sizes)
    x = x.at[int(sizes.sum()) :].set(jnp.nan)
    w = jnp.where((sizes == 0)[:, None, None], jnp.nan, w)
    actual = grouped_matmul(x, w, sizes, implementation="triton")
    assert_close(actual, expected, x.dtype)


@pytest.mark.parametrize("rows", [1, 40, 700])
@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_quantized_grouped_matmul(dtype: str, form: str, rows: int) -> None:
    """Against plain JAX. Scales of groups without rows, and rows of no group, are NaN."""
    rng, groups, inputs, outputs = np.random.default_rng(rows), 9, 288, 200
    codes = rng.integers(0, 112, (groups, inputs // (2 if form == "int4" else 1), outputs))
    values = jnp.asarray(codes, jnp.int8 if form == "int8" else jnp.uint8)
    scales = rng.uniform(1e-4, 1e-3, (groups, 9 if form == "int4" else 1, outputs))
    zeros = jnp.full(scales.shape, 7, jnp.uint8) if form == "int4" else None
    x = jnp.asarray(rng.normal(size=(rows, inputs)), dtype)
    sizes = jnp.asarray(
        rng.multinomial(rows, rng.dirichlet(np.ones(groups + 1) / 3))[:-1], jnp.int32
    )
    scales = jnp.asarray(scales, jnp.float32)
    wide = x.astype(jnp.float32), values, scales, zeros, sizes
    with jax.default_matmul_precision("highest"):
        expected = quantized_grouped_matmul(*wide, form=form, implementation="xla")
    x = x.at[int(sizes.sum()) :].set(jnp.nan)
    scales = jnp.where((sizes == 0)[:, None, None], jnp.nan, scales)
    actual = quantized_grouped_matmul(
        *(x, values, scales, zeros, sizes), form=form, implementation="triton"
    )
    assert_close(actual, expected, x.dtype)
