"""The CPU kernel for rows of many queries: right at every edge, the same however rows are cut."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention, reference
from pallas_kernels.cpu.ragged import PagedTiles
from tests.kernels.test_cpu_decode import SETUPS as DECODE_SETUPS
from tests.kernels.test_cpu_decode import STATIC, parts_of
from tests.support.fast_compile import FAST
from tests.support.paged_cases import (
    PagedCall,
    assert_close,
    operation_with_keywords,
    paged_call,
    with_keywords,
)

SETUPS = {
    "float64, group of 3": {"dtype": jnp.float64, "heads": 6},
    "bfloat16 pages under float64, head dim 8": {
        "dtype": jnp.float64,
        "page_dtype": jnp.bfloat16,
        "head_dim": 8,
        "heads": 2,
    },
    "float16, multi-query, page size 32, sinks, cap": {
        "dtype": jnp.float16,
        "page_size": 32,
        "heads": 5,
        "kv_heads": 1,
        "sinks": True,
        "soft_cap": 3.0,
    },
    "float16 pages, page size 24, window, head dim 40": {
        "page_dtype": jnp.float16,
        "page_size": 24,
        "head_dim": 40,
        "window": 30,
    },
    "int8, page size 24, head dim 40, sinks": {
        "page_dtype": jnp.int8,
        "page_size": 24,
        "head_dim": 40,
        "sinks": True,
    },
    "page size 256, window longer than a block": {
        "page_size": 256,
        "window": 70,
        "scales": True,
        "scale": 0.5,
    },
}
EDGES = [(2, 2), (0, 0), (63, 63), (1, 70), (64, 64), (65, 129), (2, 65), (100, 300)]


def run(function, call: PagedCall) -> jax.Array:
    static = {name: call.options[name] for name in STATIC}
    arrays = {name: value for name, value in call.options.items() if name not in STATIC}
    jitted = jax.jit(functools.partial(function, **static), compiler_options=FAST)
    return jitted(*call.ragged, **arrays)


llvm = operation_with_keywords(ragged_paged_attention, "llvm")
oracle = with_keywords(reference.ragged_paged_attention)


@pytest.mark.parametrize("name", SETUPS)
def test_every_edge_of_a_tile_and_a_block(name: str) -> None:
    setup = SETUPS[name]
    with jax.enable_x64(setup.get("dtype") is jnp.float64):
        call = paged_call(EDGES, padding=3, **setup)
        wide = call if call.q.dtype == jnp.float64 else call.wide()
        actual = run(llvm, call)
        assert actual.dtype == call.q.dtype
        assert_close(actual, run(oracle, wide), call.q.dtype)
        assert not np.asarray(actual)[-3:].any()


def cut(call: PagedCall, rows: list[tuple[int, int, int]]) -> list[np.ndarray]:
    """Return the results of (row, first query, queries) of a call, computed in one other call."""
    starts, lengths = np.asarray(call.query_start), np.asarray(call.kv_len)
    tokens, ends, sizes = [], [], []
    for row, first, number in rows:
        begin = starts[row] + first
        tokens += range(begin, begin + number)
        ends.append(lengths[row] - (starts[row + 1] - starts[row]) + first + number)
        sizes.append(number)
    out = llvm(
        jnp.asarray(np.asarray(call.q)[tokens]),
        call.k_pages,
        call.v_pages,
        jnp.asarray(np.asarray(call.page_table)[[row for row, _, _ in rows]]),
        jnp.asarray(np.concatenate([[0], np.cumsum(sizes)]), jnp.int32),
        jnp.asarray(ends, jnp.int32),
        **call.options,
    )
    return np.split(np.asarray(out), np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("setup", [{}, {"dtype": jnp.bfloat16, "window": 90, "sinks": True}])
def test_a_query_is_the_same_to_the_bit_however_its_prompt_is_cut(setup: dict) -> None:
    """Alone, behind other rows, and in chunks of any size."""
    call = paged_call([(40, 40), (300, 700), (64, 900)], heads=6, **setup)
    starts = np.asarray(call.query_start)
    whole = np.split(np.asarray(llvm(*call.ragged, **call.options)), starts[1:-1])
    for row, size in enumerate((40, 300, 64)):
        np.testing.assert_array_equal(cut(call, [(row, 0, size)])[0], whole[row])
    chunks = [(1, 0, 37), (0, 0, 40), (1, 37, 2), (2, 0, 64), (1, 39, 1), (1, 40, 260)]
    for (row, first, number), found in zip(chunks, cut(call, chunks), strict=True):
        np.testing.assert_array_equal(found, whole[row][first : first + number])


@pytest.mark.parametrize("name", DECODE_SETUPS)
def test_a_query_of_a_chunk_is_what_decode_gives_it_to_the_bit(name: str) -> None:
    setup = DECODE_SETUPS[name]
    sizes = (70, 3, 2, 9)
    with jax.enable_x64(setup.get("dtype") is jnp.float64):
        spans = [(size, size + before) for size, before in zip(sizes, (0, 150, 0, 55), strict=True)]
        call = paged_call(spans, **setup)
        together = llvm(*call.ragged, **call.options)
        singles = [(row, at, 1) for row, size in enumerate(sizes) for at in range(size)]
        np.testing.assert_array_equal(np.concatenate(cut(call, singles)), np.asarray(together))


def test_large_work_is_many_parts_and_several_threads_at_once() -> None:
    call = paged_call([(1, 30), (700, 1500), (2, 2), (300, 300)], head_dim=32)
    kernel = PagedTiles("float32", "float32", 16, 2, 32, capped=False, query_dtype="float32")
    assert parts_of(kernel, call.ragged) > 8
    assert parts_of(kernel, paged_call([(20, 20), (1, 900)], head_dim=32).ragged) == 1
    jitted = jax.jit(llvm)
    expected = np.asarray(jitted(*call.ragged))
    assert_close(expected, run(oracle, call), jnp.float32)

    def many(_: int) -> bool:
        return all(np.array_equal(jitted(*call.ragged), expected) for _ in range(4))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(many, range(4)))


def test_what_is_not_finite_spoils_its_own_row_only() -> None:
    call = paged_call([(30, 40), (50, 200), (33, 33)])
    before = np.asarray(llvm(*call.ragged))
    keys, values, table = map(np.array, (call.k_pages, call.v_pages, call.page_table))
    keys[table[1, 2], 0, 3, 0], values[table[1, 9], 0, 3, 0] = np.nan, np.inf
    call.k_pages, call.v_pages = jnp.asarray(keys), jnp.asarray(values)
    after = np.asarray(llvm(*call.ragged))
    assert not np.isfinite(after[30:80, :2]).all(axis=(1, 2)).any()
    others = np.r_[0:30, 80:113]
    np.testing.assert_array_equal(after[others], before[others])
    np.testing.assert_array_equal(after[30:80, 2:], before[30:80, 2:])
