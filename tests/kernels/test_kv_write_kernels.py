"""kv_write: every implementation stores exactly the reference's values, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import kv_write, quantized_kv_write, reference

PAGES, HEADS, SIZE, TOKENS = 5, 3, 16, 6
SETUPS = {
    "float32": (jnp.float32, jnp.float32, 64, False),
    "bfloat16, head dim 80": (jnp.bfloat16, jnp.bfloat16, 80, False),
    "fp8 with scales": (jnp.bfloat16, jnp.float8_e4m3fn, 64, True),
    "fp8 without": (jnp.float16, jnp.float8_e4m3fn, 64, False),
    "bits of fp8": (jnp.float32, jnp.uint8, 64, True),
}


EXPECTED = jax.jit(reference.kv_write)
ACTUAL = jax.jit(kv_write, static_argnames="implementation")


TESTED = [
    (name, implementation)
    for name in SETUPS
    for implementation in ("triton_interpret", "xla")
    if (name, implementation) != ("bits of fp8", "triton_interpret")
]


def _bits(x: jax.Array) -> np.ndarray:
    x = x.view(jnp.float8_e4m3fn) if x.dtype == jnp.uint8 else x
    return np.asarray(x.astype(jnp.float32))


@pytest.mark.parametrize(("name", "implementation"), TESTED)
@settings(derandomize=True, deadline=None, max_examples=8, database=None)
@given(
    slots=st.lists(
        st.integers(-2, PAGES * SIZE + 2), min_size=TOKENS, max_size=TOKENS, unique=True
    ),
    size=st.sampled_from([1.0, 300.0]),
)
def test_stores_what_the_reference_stores(
    name: str, implementation: str, slots: list[int], size: float
) -> None:
    dtype, page_dtype, head_dim, scaled = SETUPS[name]
    rng = np.random.default_rng(0)
    shape = (PAGES, HEADS, SIZE, head_dim)
    numbers = jnp.float8_e4m3fn if page_dtype == jnp.uint8 else page_dtype
    pages = [jnp.asarray(rng.normal(size=shape), numbers).view(page_dtype) for _ in range(2)]
    new = [jnp.asarray(rng.normal(size=(TOKENS, HEADS, head_dim)) * size, dtype) for _ in range(2)]
    scale = jnp.asarray([0.5, 1.0, 3.0], jnp.float32) if scaled else None
    arguments = (*new, *pages, jnp.asarray(slots, jnp.int32))
    expected = EXPECTED(*arguments, k_scale=scale, v_scale=scale)
    actual = ACTUAL(*arguments, k_scale=scale, v_scale=scale, implementation=implementation)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == page_dtype
        np.testing.assert_array_equal(_bits(mine), _bits(theirs))
        assert np.isfinite(_bits(mine)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_int8_is_within_half_a_step_of_each_token_and_head(dtype) -> None:
    """Codes and scales go to the cells of their tokens alone, and zeros come back as zeros."""
    rng = np.random.default_rng(0)
    k, v = (
        rng.normal(size=(TOKENS, HEADS, 40)) * 10.0 ** rng.integers(-6, 6, HEADS)[:, None]
        for _ in range(2)
    )
    v[2, 1] = 0
    slots = np.array([17, -1, 3, PAGES * SIZE, 79, 16])
    shape = (PAGES, HEADS, SIZE)
    before = [np.full((*shape, 40), 99, np.int8)] * 2 + [np.full(shape, 9.0, np.float32)] * 2
    new = [jnp.asarray(x, dtype) for x in (k, v)]
    written = jax.jit(quantized_kv_write)(*new, *before, jnp.asarray(slots, jnp.int32))
    expected = jax.jit(reference.quantized_kv_write)(*new, *before, jnp.asarray(slots, jnp.int32))
    for mine, theirs in zip(written, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    keys, values, *scales = map(np.asarray, written)
    rest = np.ones((PAGES, SIZE), bool)
    for token, slot in enumerate(slots):
        if 0 <= slot < PAGES * SIZE:
            page, offset = divmod(slot, SIZE)
            rest[page, offset] = False
            for codes, scale, stored in zip((keys, values), scales, new, strict=True):
                step, real = scale[page, :, offset, None], np.asarray(stored[token], np.float64)
                assert (np.abs(codes[page, :, offset] * step - real) <= step * 0.5001).all()
                np.testing.assert_allclose(step[:, 0], np.abs(real).max(axis=-1) / 127, rtol=1e-6)
    for array, old in zip(written, before, strict=True):
        kept = np.asarray(array).swapaxes(1, 2)[rest]
        np.testing.assert_array_equal(kept, old.swapaxes(1, 2)[rest])


def test_donated_int8_pages_and_scales_are_written_in_place() -> None:
    shape = (PAGES, HEADS, SIZE)
    cells = [jnp.zeros((*shape, 64), jnp.int8)] * 2 + [jnp.zeros(shape)] * 2
    new, slots = jnp.ones((TOKENS, HEADS, 64)), jnp.arange(TOKENS, dtype=jnp.int32)
    run = jax.jit(quantized_kv_write, donate_argnums=(2, 3, 4, 5))
    compiled = run.lower(new, new, *cells, slots).compile()
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == sum(array.nbytes for array in cells)
    assert analysis.temp_size_in_bytes < cells[0].nbytes


@pytest.mark.parametrize("implementation", ["triton_interpret", "xla"])
def test_donated_pages_are_written_in_place(implementation: str) -> None:
    pages = [jnp.zeros((PAGES, HEADS, SIZE, 64)) for _ in range(2)]
    new = [jnp.ones((TOKENS, HEADS, 64)) for _ in range(2)]

    def write(k_pages, v_pages, slots):
        return kv_write(*new, k_pages, v_pages, slots, implementation=implementation)

    slots = jnp.arange(TOKENS, dtype=jnp.int32)
    compiled = jax.jit(write, donate_argnums=(0, 1)).lower(*pages, slots).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * pages[0].nbytes
