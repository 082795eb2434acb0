"""Attention over a cache of latents, and its writes: every implementation equals the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    LatentOptions,
    latent_attention,
    latent_write,
    quantized_latent_write,
    reference,
)
from pallas_kernels.cpu.latent import LatentTiles, heads_of_tile
from pallas_kernels.gpu import latent_sizes, triton_latent
from pallas_kernels.gpu.latent_sizes import LatentConfig, cell_parts
from pallas_kernels.latent_arguments import as_attention
from tests.kernels.test_cpu_decode import parts_of
from tests.support.fast_compile import FAST
from tests.support.paged_cases import FP8, PagedCall, assert_close, paged_call

SIZE, RANK, SCALE = 40, 32, 0.3
SETUPS = {
    "plain": {},
    "float64": {"dtype": jnp.float64},
    "bfloat16 over float32 pages, page size 32": {
        "dtype": jnp.bfloat16,
        "page_dtype": jnp.float32,
        "page_size": 32,
    },
    "fp8 with a scale under bfloat16": {
        "dtype": jnp.bfloat16,
        "page_dtype": FP8,
        "scales": True,
    },
    "int8 under float32, 5 heads": {"page_dtype": jnp.int8, "heads": 5},
}
MIXED = [(2, 2), (0, 0), (63, 63), (1, 70), (20, 84), (1, 1)]
DECODES = [(1, 1), (1, 70), (1, 0), (1, 130)]


def latent_call(rows: list[tuple[int, int]], **setup) -> PagedCall:
    """Return a call over one array of cells: the keys of a call with one kv head."""
    call = paged_call(rows, kv_heads=1, head_dim=SIZE, **setup)
    call.v_pages, call.options["v_scale"] = call.k_pages, call.options["k_scale"]
    return call


def options_of(call: PagedCall, rank: int = RANK) -> LatentOptions:
    return LatentOptions(rank=rank, scale=SCALE, cache_scale=call.options["k_scale"])


def run(call: PagedCall, implementation: str, rank: int = RANK, **keywords) -> jax.Array:
    def attend(*arrays: jax.Array) -> jax.Array:
        return latent_attention(
            *arrays, options_of(call, rank), implementation=implementation, **keywords
        )

    arrays = call.q, call.k_pages, call.page_table, call.query_start, call.kv_len
    return jax.jit(attend, compiler_options=FAST)(*arrays)


def expected(call: PagedCall, rank: int = RANK) -> jax.Array:
    """Return attention whose keys are whole cells, and whose values are cut from them by hand."""
    wide = call if call.q.dtype == jnp.float64 else call.wide()
    attend = functools.partial(reference.latent_attention, rank=rank)
    return jax.jit(attend, compiler_options=FAST)(
        wide.ragged_arrays, options_of(wide, rank).attention
    )


@pytest.mark.parametrize("implementation", ["xla", "llvm"])
@pytest.mark.parametrize("name", SETUPS)
def test_every_implementation_equals_the_specification(name: str, implementation: str) -> None:
    setup = SETUPS[name]
    with jax.enable_x64(setup.get("dtype") is jnp.float64):
        call = latent_call(MIXED, padding=3, **setup)
        wanted = expected(call)
        if implementation == "llvm" and call.k_pages.dtype == FP8:
            call.k_pages = jax.lax.bitcast_convert_type(call.k_pages, jnp.uint8)
        actual = run(call, implementation)
        assert actual.shape == (*call.q.shape[:2], RANK) and actual.dtype == call.q.dtype
        assert_close(actual, wanted, call.q.dtype)
        assert not np.asarray(actual)[-3:].any()


TRITON = LatentConfig(32, 32, num_stages=1, widest=32, programs_per_sm=8, merged_pieces=2)
"""Small parts, and more programs than a CPU has multiprocessors."""
TRITON_SETUPS = {
    "float32": {},
    "float16 over fp8 with a scale, page size 64, 5 heads": {
        "dtype": jnp.float16,
        "page_dtype": FP8,
        "scales": True,
        "page_size": 64,
        "heads": 5,
    },
    "bfloat16, 40 heads in two tiles": {"dtype": jnp.bfloat16, "heads": 40},
}


@functools.cache
def compiled_triton(name: str, one_query: bool):
    """Return the interpreted Triton kernels of a setup, with arrays of a call as arguments."""

    def attend(arrays: tuple[jax.Array, ...], scale: jax.Array | None) -> jax.Array:
        return triton_latent.latent_attention(
            as_attention(*arrays),
            LatentOptions(TRITON_RANK, SCALE, scale),
            one_query,
            config=TRITON,
            interpret=True,
        )

    return jax.jit(attend, compiler_options=FAST)


TRITON_RANK, TRITON_SIZE = 48, 80
"""Parts of 32 and 16 numbers, and of 32."""
FIXED = {"tokens": 40, "num_pages": 24, "pages_per_row": 8}


def check_triton(name: str, rows: list[tuple[int, int]], one_query: bool, seed: int = 0) -> None:
    setup = {"kv_heads": 1, "head_dim": TRITON_SIZE, **FIXED, **TRITON_SETUPS[name]}
    tokens = len(rows) if one_query else setup["tokens"]
    call = paged_call(rows, **{**setup, "tokens": tokens, "seed": seed})
    call.v_pages, call.options["v_scale"] = call.k_pages, call.options["k_scale"]
    arrays = call.q, call.k_pages, call.page_table, call.query_start, call.kv_len
    actual = compiled_triton(name, one_query)(arrays, call.options["k_scale"])
    wanted = expected(call, TRITON_RANK)
    if one_query:
        has_query = np.array([length > 0 for _, length in rows])
        assert not np.asarray(actual)[~has_query].any()
    assert_close(actual, wanted, call.q.dtype)


@pytest.mark.parametrize("name", TRITON_SETUPS)
def test_the_triton_kernels_equal_the_specification(name: str) -> None:
    """For rows within one share and in several, of few tokens and of many, and for no rows."""
    for rows in (
        [(2, 2), (0, 0), (1, 120), (20, 84)],
        [(33, 33), (1, 1), (3, 127), (0, 5)],
        [(1, 16), (4, 32), (5, 33), (6, 64)],
        [(0, 0), (0, 0), (0, 0), (0, 0)],
    ):
        check_triton(name, rows, one_query=False)


@pytest.mark.parametrize("name", TRITON_SETUPS)
def test_decodes_by_the_triton_kernels_equal_the_specification(name: str) -> None:
    for lengths in ((1, 0, 128, 31), (32, 33, 64, 100), (0, 0, 0, 0)):
        check_triton(name, [(1, length) for length in lengths], one_query=True)


def test_a_cell_is_divided_at_the_end_of_its_value() -> None:
    assert cell_parts(0, 512, 512) + cell_parts(512, 576, 512) == ((0, 512), (512, 64))
    assert cell_parts(0, 512, 256) == ((0, 256), (256, 256))
    assert cell_parts(32, 80, 32) == ((32, 32), (64, 16))
    assert [latent_sizes.heads_of_tile(heads, 64) for heads in (16, 20, 96, 128, 67)] == [
        *(16, 20, 48, 64, 1)
    ]


@pytest.mark.parametrize("heads", [1, 6, 40, 128])
def test_every_number_of_heads_is_divided_into_tiles(heads: int) -> None:
    """Of many rows, and of a single decode, which has two tiles for two threads."""
    for rows in ([(3, 90), (1, 65)], [(1, 150)]):
        call = latent_call(rows, heads=heads)
        assert_close(run(call, "llvm"), expected(call), jnp.float32)


def cut(call: PagedCall, rows: list[tuple[int, int, int]]) -> list[np.ndarray]:
    """Return the results of (row, first query, queries) of a call, computed in one other call."""
    starts, lengths = np.asarray(call.query_start), np.asarray(call.kv_len)
    tokens, ends, sizes = [], [], []
    for row, first, number in rows:
        begin = starts[row] + first
        tokens += range(begin, begin + number)
        ends.append(lengths[row] - (starts[row + 1] - starts[row]) + first + number)
        sizes.append(number)
    part = PagedCall(
        jnp.asarray(np.asarray(call.q)[tokens]),
        call.k_pages,
        call.v_pages,
        jnp.asarray(np.asarray(call.page_table)[[row for row, _, _ in rows]]),
        jnp.asarray(np.concatenate([[0], np.cumsum(sizes)]), jnp.int32),
        jnp.asarray(ends, jnp.int32),
        call.options,
    )
    return np.split(np.asarray(run(part, "llvm")), np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16])
def test_a_query_is_the_same_to_the_bit_however_its_prompt_is_cut(dtype) -> None:
    """Alone, as a decode, behind other rows, and in chunks of any size."""
    with jax.enable_x64(dtype is jnp.float64):
        call = latent_call([(40, 40), (300, 700), (64, 130)], heads=6, dtype=dtype)
        starts = np.asarray(call.query_start)
        whole = np.split(np.asarray(run(call, "llvm")), starts[1:-1])
        chunks = [(1, 0, 37), (0, 0, 40), (1, 37, 2), (2, 0, 64), (1, 39, 1), (1, 40, 260)]
        for (row, first, number), found in zip(chunks, cut(call, chunks), strict=True):
            np.testing.assert_array_equal(found, whole[row][first : first + number])
        decode = (1, 299, 1)
        for rows in ([decode], [decode, (2, 63, 1)]):
            np.testing.assert_array_equal(cut(call, rows)[0], whole[1][-1:])


def test_large_work_is_many_parts_and_a_single_decode_two() -> None:
    def parts(rows: list[tuple[int, int]], heads: int) -> int:
        call = latent_call(rows, heads=heads)
        group = heads_of_tile(heads, len(rows), len(call.q))
        q = call.q.reshape(len(call.q), heads // group, group, SIZE)
        kernel = LatentTiles("float32", "float32", 16, group, SIZE, False, "float32", rank=RANK)
        arrays = q, call.k_pages, call.k_pages, call.page_table, call.query_start, call.kv_len
        return parts_of(kernel, arrays)

    assert parts([(1, 30), (700, 1500)], 8) > 8
    assert parts([(1, 5000)], 16) > 1
    assert parts([(1, 50)], 16) == 1


def test_what_is_not_finite_spoils_its_own_row_only() -> None:
    call = latent_call([(30, 40), (50, 200), (33, 33)])
    pages = np.array(call.k_pages)
    pages[int(call.page_table[1, 2]), 0, 5, 3] = np.nan
    call.k_pages = jnp.asarray(pages)
    actual, rows = np.asarray(run(call, "llvm")), np.split(np.arange(113), [30, 80])
    assert np.isfinite(actual[rows[0]]).all() and np.isfinite(actual[rows[2]]).all()
    assert np.isnan(actual[rows[1]]).any()


def test_rows_of_one_query_can_be_said_to_be_that() -> None:
    call = latent_call(DECODES, tokens=4)
    assert_close(run(call, "xla", one_query=True), expected(call), jnp.float32)
    with pytest.raises(ValueError, match="query has T = 5 tokens; expected one for each of 4"):
        run(latent_call(DECODES, tokens=5), "xla", one_query=True)


def test_the_specification_reads_values_from_the_first_numbers_of_a_cell() -> None:
    """One visible cell has the weight 1, so that the result is its value."""
    call = latent_call([(1, 1)])
    cell = np.asarray(call.k_pages)[int(call.page_table[0, 0]), 0, 0, :RANK]
    assert_close(expected(call)[0], np.tile(cell, (4, 1)), jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, FP8, jnp.uint8])
def test_latents_are_stored_in_their_cells(dtype) -> None:
    rng = np.random.default_rng(0)
    new = jnp.asarray(500 * rng.normal(size=(5, SIZE)), jnp.float32)
    pages = jnp.zeros((3, 1, 8, SIZE), dtype)
    slots = jnp.asarray([9, -1, 3, 24, 23], jnp.int32)
    scale = jnp.asarray([0.5], jnp.float32) if jnp.dtype(dtype).itemsize == 1 else None
    actual = jax.jit(latent_write)(new, pages, slots, scale=scale)
    wanted = reference.latent_write(new, pages, slots, scale)
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(wanted))
    written = np.asarray(actual).reshape(24, SIZE).astype(np.float32).any(axis=1)
    assert np.flatnonzero(written).tolist() == [3, 9, 23]


def test_int8_has_one_scale_for_each_token() -> None:
    rng = np.random.default_rng(0)
    new = jnp.asarray(rng.normal(size=(3, SIZE)) * [[1], [10], [0]], jnp.float32)
    pages, scales = jnp.zeros((2, 1, 4, SIZE), jnp.int8), jnp.ones((2, 1, 4), jnp.float32)
    pages, scales = quantized_latent_write(new, pages, scales, jnp.asarray([5, 2, 1]))
    codes, factors = np.asarray(pages).reshape(8, SIZE), np.asarray(scales).reshape(8)
    for slot, cell in zip((5, 2, 1), np.asarray(new), strict=True):
        assert np.abs(codes[slot] * factors[slot] - cell).max() <= 0.51 * factors[slot]
        np.testing.assert_allclose(factors[slot], np.abs(cell).max() / 127, rtol=1e-6)
    assert (factors[[0, 3, 4, 6, 7]] == 1).all()


def test_a_write_has_no_triton_kernel() -> None:
    with pytest.raises(ValueError, match="no triton kernel for latent_write; allowed: xla"):
        latent_write(
            jnp.ones((2, 48)),
            jnp.zeros((2, 1, 16, 48)),
            jnp.asarray([0, 3]),
            implementation="triton_interpret",
        )


WRONG = {
    r"pages has shape \(4, 2, 16, 40\); expected \[P,1,S,C\]": {"kv_heads": 2},
    "rank is 41; allowed: 1 to C = 40": {"rank": 41},
    "rank is 30; allowed: multiples of 8": {"rank": 30, "implementation": "llvm"},
    "rank is 24; allowed: multiples of 16 from 16 to 512": {
        "head_dim": 48,
        "rank": 24,
        "implementation": "triton_interpret",
    },
    "head dim is 40; allowed: multiples of 16 from 16 to 576": {
        "implementation": "triton_interpret"
    },
    "head dim is 584; allowed: multiples of 8 from 8 to 576": {
        "head_dim": 584,
        "implementation": "llvm",
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message: str) -> None:
    setup = {"kv_heads": 1, "head_dim": SIZE, **WRONG[message]}
    rank, implementation = setup.pop("rank", RANK), setup.pop("implementation", "xla")
    with pytest.raises(ValueError, match=message):
        run(paged_call([(1, 2)], **setup), implementation, rank)
