"""Every implementation that runs on a CPU gives what the reference gives, whatever the lengths."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import reference, xla
from pallas_kernels.arguments import AttentionOptions
from pallas_kernels.cpu import decode as cpu_decode
from pallas_kernels.cpu import ragged as cpu_ragged
from pallas_kernels.devices import DeviceLimits
from pallas_kernels.gpu import triton_decode, triton_ragged, xla_attention
from pallas_kernels.gpu.tuning import DecodeConfig, RaggedConfig
from tests.support.paged_cases import FP8, PagedCall, assert_close, paged_call

ROWS, TOKENS, PAGES_PER_ROW = 4, 24, 7
DECODE = DecodeConfig(block_tokens=32, programs_per_sm=8, min_blocks=1, merge_splits=2)
RAGGED = RaggedConfig(tile_rows=32, block_tokens=32)
TURNS = xla_attention.Sizes(
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
    """``run`` jitted with the static options of a setup; arrays and array options are arguments."""
    static = {name: setup.get(name) for name in ("scale", "window", "soft_cap")}

    # Compiling is most of what these tests cost, so the compiler is told not to try hard.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
    def call(arrays, options):
        return run(*arrays, AttentionOptions(**options, **static), **fixed)

    return call


@functools.cache
def _functions(name: str, decode: bool):
    """(expected on float32 copies, {implementation: function}) of a setup, compiled once."""
    setup = SETUPS[name]
    if decode:
        tile = functools.partial(triton_decode.paged_decode_attention, config=DECODE)
        plain, oracle = xla.paged_decode_attention, reference.paged_decode_attention
        native = cpu_decode.paged_decode_attention
        large = xla_attention.paged_decode_attention
    else:
        tile = functools.partial(
            triton_ragged.ragged_paged_attention, config=RAGGED, decode_config=DECODE
        )
        plain, oracle = xla.ragged_paged_attention, reference.ragged_paged_attention
        native = cpu_ragged.ragged_paged_attention
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
    """A number of positions from 0 to ``most``, often just around a page boundary."""
    near = draw(st.integers(0, 4)) * page_size + draw(st.integers(-1, 1))
    return min(max(draw(st.one_of(st.just(near), st.integers(0, most))), 0), most)


@st.composite
def ragged_rows(draw, page_size: int):
    """ROWS pairs (queries, positions) of at most TOKENS queries in all, empty rows among them."""
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
    """Setups with what is tested on them; llvm takes the bits of float8."""
    implementations = ("triton", "xla", "xla for a GPU", "xla for a GPU, in turns", "llvm")
    return [(name, implementation) for name in names for implementation in implementations]


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
    modules = {"xla": xla, "gpu": xla_attention, "llvm": cpu_ragged}
    if implementation in modules:
        run = _compiled(modules[implementation].ragged_paged_attention, {})
    else:
        config = dataclasses.replace(RAGGED, split_single=implementation == "triton")
        tiles = functools.partial(triton_ragged.ragged_paged_attention, interpret=True)
        run = _compiled(tiles, {}, config=config, decode_config=DECODE)
    assert_close(run(call.ragged, {}), expected, jnp.float32)


ONE_SM = DeviceLimits("gpu", "NVIDIA H200", (9, 0), num_sms=1)


def test_work_is_divided_evenly_and_completely() -> None:
    """The plan covers every block of every row once, and no item has more than its share."""
    call = paged_call([(1, 1000), (1, 0), (1, 17), (1, 333)], head_dim=16)
    case = triton_decode.attention_case(
        "decode", ONE_SM, *call.decode[:4], None, call.decode[4], call.attention_options
    )
    config = DecodeConfig(block_tokens=16, programs_per_sm=24, min_blocks=2)
    token, take = jnp.array([7, 5, 3, 9]), jnp.array([1, 0, 1, 1])
    items, rows = triton_decode.split_plan(call.kv_len, token, take, case, None, config)
    covered = [[] for _ in range(4)]
    for row, first, last, at in items.tolist():
        covered[row] += list(range(first, last))
        assert at == token[row]
        assert last - first <= -(-(63 + 2 + 21) // 12)
    assert [sorted(blocks) for blocks in covered] == [list(range(n)) for n in (63, 0, 2, 21)]
    assert rows[-1, 0] <= items.shape[0]
    assert rows[:-1, 1].tolist() == token.tolist() and rows[:-1, 2].tolist() == take.tolist()
