"""Every implementation that runs on a CPU equals the reference, for all lengths."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import reference, xla
from pallas_kernels.arguments import AttentionArrays, AttentionOptions, attention_case
from pallas_kernels.cpu import attention as cpu_attention
from pallas_kernels.devices import DeviceLimits
from pallas_kernels.gpu import triton_decode, triton_ragged, xla_attention
from pallas_kernels.gpu.triton_plan import (
    BLOCK,
    COUNT,
    FIRST,
    LAST,
    POSITION,
    ROW,
    SHARE,
    SIZE,
    START,
    TOKEN,
    SplitPlan,
    split_lines,
)
from pallas_kernels.gpu.tuning import DecodeConfig, RaggedConfig
from tests.kernels.test_tuning_table import compiling_for
from tests.support.fast_compile import FAST
from tests.support.paged_cases import FP8, PagedCall, assert_close, paged_call

ROWS, TOKENS, PAGES_PER_ROW = 4, 24, 7
DECODE = DecodeConfig(block_tokens=32, programs_per_sm=8, min_blocks=1, merge_numbers=256)
RAGGED = RaggedConfig(tile_rows=32, block_tokens=32)
TURNS = xla_attention.TurnSizes(
    chunk_tokens=32, turn_tokens=96, tile_chunk_tokens=64, tile_queries=4, scores_bytes=1 << 20
)

SETUPS = {
    "plain": {"dtype": jnp.float32},
    "shared prefix, page larger than block": {
        "dtype": jnp.float32,
        "head_dim": 128,
        "page_size": 64,
        "shared": True,
    },
    "head dim 80, window, sinks": {
        "dtype": jnp.float32,
        "head_dim": 80,
        "heads": 6,
        "window": 20,
        "sinks": True,
    },
    "bfloat16, cap, group of 7": {"dtype": jnp.bfloat16, "heads": 14, "soft_cap": 5.0},
    "fp8 under bfloat16": {"dtype": jnp.bfloat16, "page_dtype": FP8, "scales": True},
    "int8 under bfloat16, window": {"dtype": jnp.bfloat16, "page_dtype": jnp.int8, "window": 20},
    "float16, head dim 96, everything": {
        "dtype": jnp.float16,
        "head_dim": 96,
        "heads": 2,
        "window": 9,
        "soft_cap": 3.0,
        "sinks": True,
        "scales": True,
        "scale": 0.3,
    },
}


def _compiled(run, setup: dict, **fixed):
    static = {name: setup.get(name) for name in ("scale", "window", "soft_cap")}

    # Compiling takes most of the time of these tests, so the compiler optimizes little.
    @functools.partial(jax.jit, compiler_options=FAST)
    def call(arrays, options):
        return run(AttentionArrays.of(*arrays), AttentionOptions(**options, **static), **fixed)

    return call


@functools.cache
def _functions(name: str, decode: bool):
    """(expected on float32 copies, {implementation: function}) of a setup, compiled once."""
    setup = SETUPS[name]
    if decode:
        tile = functools.partial(triton_decode.paged_decode_attention, config=DECODE)
        plain, oracle = xla.paged_decode_attention, reference.paged_decode_attention
        native = cpu_attention.paged_decode_attention
        large = xla_attention.paged_decode_attention
    else:
        tile = functools.partial(
            triton_ragged.ragged_paged_attention, config=RAGGED, decode_config=DECODE
        )
        plain, oracle = xla.ragged_paged_attention, reference.ragged_paged_attention
        native = cpu_attention.ragged_paged_attention
        large = xla_attention.ragged_paged_attention
    tested = {
        "triton": _compiled(tile, setup, interpret=True),
        "xla": _compiled(plain, setup),
        "llvm": _compiled(native, setup),
        "xla for a GPU": _compiled(large, setup),
        "xla for a GPU, in turns": _compiled(large, setup, sizes=TURNS),
    }
    return _compiled(oracle, setup), tested


def _array_options(call: PagedCall) -> dict:
    return {name: call.options[name] for name in ("sinks", "k_scale", "v_scale")}


def _agree(name: str, implementation: str, call: PagedCall, decode: bool) -> None:
    expected_of, tested = _functions(name, decode)
    wide = call.wide()
    expected = expected_of(wide.decode if decode else wide.ragged, _array_options(call))
    if implementation == "llvm" and call.k_pages.dtype == FP8:
        call = dataclasses.replace(
            call, k_pages=call.k_pages.view(jnp.uint8), v_pages=call.v_pages.view(jnp.uint8)
        )
    arrays = call.decode if decode else call.ragged
    actual = tested[implementation](arrays, _array_options(call))
    assert actual.dtype == call.q.dtype
    assert_close(actual, expected, call.q.dtype)


@st.composite
def lengths(draw, page_size: int, most: int):
    """Draw a number of positions from 0 to ``most``, often just around a page boundary."""
    near = draw(st.integers(0, 4)) * page_size + draw(st.integers(-1, 1))
    return min(max(draw(st.one_of(st.just(near), st.integers(0, most))), 0), most)


@st.composite
def ragged_rows(draw, page_size: int):
    """Draw ROWS pairs (queries, positions), at most TOKENS queries in all, some rows empty."""
    rows, left = [], TOKENS
    for _ in range(ROWS):
        queries = min(draw(st.sampled_from([0, 1, 1, 1, 2, 5, 11, TOKENS])), left)
        left -= queries
        longest = PAGES_PER_ROW * page_size
        before = draw(lengths(page_size, min(longest, 5 * page_size) - TOKENS))
        rows.append((queries, queries + before))
    return rows


def _call(name: str, rows: list[tuple[int, int]], tokens: int, seed: int) -> PagedCall:
    return paged_call(
        rows,
        tokens=tokens,
        num_pages=ROWS * PAGES_PER_ROW + 2,
        pages_per_row=PAGES_PER_ROW,
        seed=seed,
        **SETUPS[name],
    )


def _tested(names: list[str]) -> list[tuple[str, str]]:
    implementations = ("triton", "xla", "xla for a GPU", "xla for a GPU, in turns", "llvm")
    return [
        (name, implementation)
        for name in names
        for implementation in implementations
        if (SETUPS[name].get("page_dtype"), implementation) != (jnp.int8, "triton")
    ]


@pytest.mark.parametrize(("name", "implementation"), _tested(list(SETUPS)))
@settings(derandomize=True, deadline=None, max_examples=8, database=None)
@given(data=st.data())
def test_ragged(name: str, implementation: str, data) -> None:
    rows = data.draw(ragged_rows(SETUPS[name].get("page_size", 16)))
    call = _call(name, rows, TOKENS, data.draw(st.integers(0, 3)))
    _agree(name, implementation, call, decode=False)


@pytest.mark.parametrize(("name", "implementation"), _tested(list(SETUPS)[2:]))
@settings(derandomize=True, deadline=None, max_examples=6, database=None)
@given(data=st.data())
def test_decode(name: str, implementation: str, data) -> None:
    page_size = SETUPS[name].get("page_size", 16)
    drawn = [data.draw(lengths(page_size, PAGES_PER_ROW * page_size)) for _ in range(ROWS)]
    call = _call(name, [(1, length) for length in drawn], ROWS, data.draw(st.integers(0, 3)))
    _agree(name, implementation, call, decode=True)


@pytest.mark.parametrize("implementation", ["triton", "triton, all in tiles", "xla", "gpu", "llvm"])
def test_full_tiles_and_long_rows(implementation: str) -> None:
    """More blocks than edges: several tiles of a row, several splits, all kinds of row at once."""
    rows = [(70, 200), (1, 150), (0, 0), (1, 1), (3, 3), (64, 64)]
    call = paged_call(rows, dtype=jnp.float32, padding=5)
    expected = _compiled(reference.ragged_paged_attention, {})(call.ragged, {})
    modules = {"xla": xla, "gpu": xla_attention, "llvm": cpu_attention}
    if implementation in modules:
        run = _compiled(modules[implementation].ragged_paged_attention, {})
    else:
        config = dataclasses.replace(RAGGED, split_queries=16 * (implementation == "triton"))
        tiles = functools.partial(triton_ragged.ragged_paged_attention, interpret=True)
        run = _compiled(tiles, {}, config=config, decode_config=DECODE)
    assert_close(run(call.ragged, {}), expected, jnp.float32)


ONE_SM = DeviceLimits("gpu", "NVIDIA H200", (9, 0), num_sms=1)


def plan_of(
    lengths: list[int], queries: list[int] | None, *, tile: int = 1, window: int | None = None
) -> tuple[SplitPlan, np.ndarray]:
    """Return the plan and the lines of rows, which are decodes without `queries`."""
    counts = queries or [1] * len(lengths)
    call = paged_call(list(zip(counts, lengths, strict=True)), head_dim=16)
    arrays = call.ragged_arrays if queries else call.decode_arrays
    op = "ragged" if queries else "decode"
    with compiling_for(ONE_SM):
        case = attention_case(op, arrays, call.attention_options)
    config = DecodeConfig(block_tokens=16, programs_per_sm=24, min_blocks=2)
    plan = SplitPlan.of(case, config, window, tile, 4 if queries else 1)
    start = call.ragged[4] if queries else None
    run = functools.partial(split_lines, plan, interpret=True)
    return plan, np.asarray(jax.jit(run, compiler_options=FAST)(call.kv_len, start))


def check_lines(plan: SplitPlan, lines: np.ndarray, lengths: list[int], counts: list[int]) -> None:
    """Check that shares cover every block that a row's tiles see once, and are alike."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    wanted: dict[tuple[int, int], set[int]] = {}
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if 0 < count <= plan.few:
            for first in range(0, count, plan.queries):
                begin = length - count + first
                end = begin + min(plan.queries, count - first)
                least = 0 if plan.window is None else max(0, begin - plan.window + 1)
                # A tile without positions has a turn all the same.
                wanted[row, first] = set(range(least // 16, -(-end // 16)) if end > 0 else [0])
    total = sum(map(len, wanted.values()))
    assert lines[plan.programs, SHARE] == total
    shares = max(1, min(plan.programs, -(-total // plan.min_blocks)))
    found: dict[tuple[int, int], list[int]] = {}
    for program in range(plan.programs):
        begin, end = lines[program, SHARE], lines[program + 1, SHARE]
        assert 0 <= end - begin <= -(-total // shares)
        assert (end > begin) == (program < shares and total > 0)
        seen = 0
        for tile in range(
            lines[program, FIRST], lines[program + 1, LAST] + 1 if end > begin else 0
        ):
            row, token, size, position = lines[tile, [ROW, TOKEN, SIZE, POSITION]]
            first = token - starts[row]
            low = max(lines[tile, START], begin) - lines[tile, START]
            high = min(lines[tile, START] + lines[tile, COUNT], end) - lines[tile, START]
            if low < high:
                assert position == lengths[row] - counts[row] + first
                assert size == min(plan.queries, counts[row] - first)
                blocks = lines[tile, BLOCK] + np.arange(low, high)
                found.setdefault((int(row), int(first)), []).extend(blocks.tolist())
                seen += high - low
        assert seen == end - begin
    assert {tile: sorted(blocks) for tile, blocks in found.items()} == {
        tile: sorted(blocks) for tile, blocks in wanted.items()
    }


def test_work_is_divided_evenly_and_completely() -> None:
    lengths = [1000, 0, 17, 333]
    for window in (None, 100):
        plan, lines = plan_of(lengths, None, window=window)
        check_lines(plan, lines, lengths, [1] * 4)


@given(
    rows=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 20)), min_size=1, max_size=9),
    tile=st.sampled_from([1, 2, 8]),
    window=st.sampled_from([None, 1, 16, 50]),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_rows_of_few_queries_are_divided_too(
    rows: list[tuple[int, int]], tile: int, window: int | None
) -> None:
    lengths = [max(length, count) for length, count in rows]
    counts = [count for _, count in rows]
    if sum(counts):
        plan, lines = plan_of(lengths, counts, tile=tile, window=window)
        check_lines(plan, lines, lengths, counts)


@pytest.mark.parametrize("rows", [3, 40])
def test_few_programs_for_many_rows_give_the_same(rows: int) -> None:
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in rng.integers(0, 300, rows)]
    call = paged_call([(1, length) for length in lengths], head_dim=16)
    expected = _compiled(reference.paged_decode_attention, {})(call.decode, {})
    config = DecodeConfig(block_tokens=16, programs_per_sm=5, merge_numbers=32)
    with compiling_for(dataclasses.replace(ONE_SM, num_sms=2)):
        run = functools.partial(triton_decode.paged_decode_attention, config=config, interpret=True)
        got = jax.jit(run, compiler_options=FAST)(call.decode_arrays)
    assert_close(got, expected, jnp.float32)
