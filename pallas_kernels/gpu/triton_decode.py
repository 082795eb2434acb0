"""Attention of rows of few queries over the paged KV cache, in Pallas-Triton, with split KV.

The KV of a row is split over programs as in Flash-Decoding (Dao et al. 2023), but the device plans
the split from the lengths of the rows (`triton_plan`). A program takes a share of all KV blocks of
the step. A share can contain short rows and parts of long ones.

A row within one share is stored directly. If a row is in several shares, each program stores its
partial result. The program that finishes last, as a counter shows, merges all of them in the order
of the blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.arguments import (
    ARRIVALS,
    NO_OPTIONS,
    AttentionArrays,
    AttentionOptions,
    Case,
    attention_case,
)
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
from pallas_kernels.gpu.triton_tile import (
    NEGATIVE,
    RowPages,
    Softmax,
    Span,
    TileSpec,
    attend,
    ceil_div,
    head_parts,
    load_queries,
    normalized,
    power_of_two,
    spread,
    store_rows,
    tile_bounds,
)
from pallas_kernels.gpu.tuning import DecodeConfig, fit_block, lookup

MIN_DOT_ROWS = 16
"""Rows of the smallest tensor core product."""


@dataclasses.dataclass(frozen=True)
class KvSplit:
    """Compile-time properties of an attention kernel whose KV is split over programs."""

    spec: TileSpec  # sizes and options of a tile
    case: Case  # shapes and dtypes of the call
    plan: SplitPlan  # division of the KV
    config: DecodeConfig  # block sizes
    interpret: bool  # whether plain JAX runs the programs, one after the other


def _split_kernel(*arrays: Any, names: tuple[str, ...], split: KvSplit) -> None:
    # Computes one program's share of the blocks of one kv head.
    refs = dict(zip(names, arrays, strict=True))
    program, kv_head, lines = pl.program_id(0), pl.program_id(1), refs["lines"]
    begin, end = lines[program, SHARE], lines[program + 1, SHARE]

    def run(tile: jax.Array, _: None) -> None:
        start, count = lines[tile, START], lines[tile, COUNT]
        first, last = jnp.maximum(start, begin), jnp.minimum(start + count, end)

        @pl.when(first < last)
        def _() -> None:
            _run_piece(refs, tile, first - start, last - start, program, kv_head, split)

    stop = jnp.where(begin < end, lines[program + 1, LAST] + 1, 0)
    lax.fori_loop(lines[program, FIRST], stop, run, None)


def _run_piece(
    refs: dict[str, Any],
    tile: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    program: jax.Array,
    kv_head: jax.Array,
    split: KvSplit,
) -> None:
    """Compute attention of a query tile over its KV blocks [begin, end), and store the result."""
    # The last piece of a tile to finish merges the results of all its pieces.
    # The pieces of a tile belong to consecutive programs. The first piece can be the last turn of
    # its program, so each program has two places for partial results.
    spec, plan, lines = split.spec, split.plan, refs["lines"]
    row, token, size = (lines[tile, column] for column in (ROW, TOKEN, SIZE))
    position, block, start, count = (lines[tile, c] for c in (POSITION, BLOCK, START, COUNT))
    bounds = tile_bounds(position, position + size - 1, spec.window)
    last_block = jnp.minimum(block + end, ceil_div(bounds[1], spec.block_tokens))
    span = Span(*bounds, block + begin, last_block)
    local, head, valid = _queries_of(spec.tile_rows, kv_head, split.case.group, size)
    queries = load_queries(refs["q"], token + local, head, valid, spec)
    pages = RowPages.of(refs, row, kv_head)
    softmax = attend(queries, position + local, pages, span, spec)
    if not plan.is_merged:
        _store_result(refs, token, size, kv_head, softmax, split)
        return

    @pl.when(end - begin == count)
    def _() -> None:
        _store_result(refs, token, size, kv_head, softmax, split)

    @pl.when(end - begin < count)
    def _() -> None:
        total = lines[plan.programs, SHARE]
        shares = plan.shares(total)
        first = lax.div((start + 1) * shares - 1, total)
        pieces = lax.div((start + count) * shares - 1, total) - first + 1
        place = 2 * program + (begin == 0).astype(jnp.int32)
        _store_partial(refs, (place, kv_head), valid, softmax, split.spec)
        if not split.interpret:
            plt.debug_barrier()
        counter = first * split.case.K + kv_head
        earlier = plt.atomic_add(refs["arrivals"], (counter,), jnp.int32(1))

        @pl.when(earlier == pieces - 1)
        def _() -> None:
            whole = _merged(refs, first, pieces, size, kv_head, split)
            _store_result(refs, token, size, kv_head, whole, split)


def _queries_of(
    rows: int, kv_head: jax.Array, group: int, size: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    index = jnp.arange(rows)
    local = lax.div(index, jnp.full_like(index, group))
    head = kv_head * group + lax.rem(index, jnp.full_like(index, group))
    return local, head, local < size


def _store_partial(
    refs: dict[str, Any],
    place: tuple[jax.Array, jax.Array],
    valid: jax.Array,
    softmax: Softmax,
    spec: TileSpec,
) -> None:
    acc, *statistics = softmax
    index = jnp.arange(spec.tile_rows)
    first = tuple(spread(number, index.shape) for number in place)
    for (start, width), part in zip(head_parts(spec.head_dim), acc, strict=True):
        shape = (spec.tile_rows, width)
        address = [spread(i, shape, 0) for i in (*first, index)]
        column = spread(start + jnp.arange(width), shape, 1)
        mask = spread(valid, shape, 0)
        plt.store(refs["acc"].at[(*address, column)], part, mask=mask)
    for number, statistic in enumerate(statistics):
        address = refs["stats"].at[(*first, jnp.full_like(index, number), index)]
        plt.store(address, statistic, mask=valid)


def _merged(
    refs: dict[str, Any],
    first: jax.Array,
    count: jax.Array,
    size: jax.Array,
    kv_head: jax.Array,
    split: KvSplit,
) -> Softmax:
    """Return the `Softmax` of a tile, merged from the stored results of its `count` pieces."""
    columns = head_parts(split.spec.head_dim)
    rows = power_of_two(split.case.group * split.plan.queries)
    at_once = max(1, split.config.merge_numbers // (rows * columns[0][1]))
    row = jnp.arange(rows)

    def load(name: str, piece: jax.Array, last: tuple[Any, ...], other: float) -> jax.Array:
        place = 2 * (first + piece) + (piece == 0).astype(jnp.int32)
        index = (place, spread(kv_head, piece.shape), *last)
        row_of = last[-1] if name == "stats" else last[0]
        mask = piece < count
        mask &= lax.div(row_of, jnp.full_like(row_of, split.case.group)) < size
        return plt.load(refs[name].at[index], mask=mask, other=other)

    def step(i: jax.Array, carry: Softmax) -> Softmax:
        acc, top, total = carry
        piece = i * at_once + jnp.arange(at_once)
        shape = (at_once, rows)
        pieces, rows_of = spread(piece, shape, 0), spread(row, shape, 1)
        tops = load("stats", pieces, (jnp.zeros_like(pieces), rows_of), NEGATIVE)
        sums = load("stats", pieces, (jnp.ones_like(pieces), rows_of), 0.0)
        new_top = jnp.maximum(top, tops.max(axis=0))
        shrink, weight = jnp.exp2(top - new_top), jnp.exp2(tops - spread(new_top, shape, 1))
        new_acc = []
        for part, (start, width) in zip(acc, columns, strict=True):
            shape = (at_once, rows, width)
            column = spread(start + jnp.arange(width), shape, 2)
            pieces = spread(piece, shape, 0)
            rows_of = spread(row, shape, 1)
            partial = load("acc", pieces, (rows_of, column), 0.0)
            added = (partial * spread(weight, shape, 0, 1)).sum(axis=0)
            new_acc.append(part * spread(shrink, part.shape, 0) + added)
        return tuple(new_acc), new_top, total * shrink + (sums * weight).sum(axis=0)

    carry = (
        tuple(jnp.zeros((rows, width), jnp.float32) for _, width in columns),
        jnp.full((rows,), NEGATIVE, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    return lax.fori_loop(jnp.int32(0), ceil_div(count, at_once), step, carry)


def _store_result(
    refs: dict[str, Any],
    token: jax.Array,
    size: jax.Array,
    kv_head: jax.Array,
    softmax: Softmax,
    split: KvSplit,
) -> None:
    local, head, valid = _queries_of(softmax[-1].shape[0], kv_head, split.case.group, size)
    acc = normalized(refs, softmax, kv_head, head, valid)
    store_rows(refs["out"], token + local, head, valid, acc, split.spec)


def split_and_merge(
    arrays: AttentionArrays,
    options: AttentionOptions,
    split: KvSplit,
    into: jax.Array | None = None,
) -> jax.Array:
    """Compute attention of rows of few queries, with the KV split over programs: [T,N,H].

    `into` [T,N,H] is overwritten at the tokens of these rows and returned. None allocates an array
    that is defined only at these tokens.
    """
    q, k_pages, v_pages, page_table, query_start, kv_len = arrays
    case, plan, config = split.case, split.plan, split.config
    lines = split_lines(plan, kv_len, query_start, interpret=split.interpret)
    inputs = {"q": q, "k": k_pages, "v": v_pages, "table": page_table, "lines": lines}
    inputs |= {"k_scale": options.k_scale, "v_scale": options.v_scale, "into": into}
    if options.sinks is not None:
        inputs["sinks"] = options.sinks.astype(jnp.float32)
    outputs = {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    if plan.is_merged:
        arrivals = options.arrivals
        inputs["arrivals_before"] = jnp.zeros(ARRIVALS, jnp.int32) if arrivals is None else arrivals
        outputs["arrivals"] = jax.ShapeDtypeStruct((ARRIVALS,), jnp.int32)
        places, numbers = (2 * plan.programs, case.K), case.group * plan.queries
        outputs["acc"] = jax.ShapeDtypeStruct((*places, numbers, case.H), jnp.float32)
        outputs["stats"] = jax.ShapeDtypeStruct((*places, 2, numbers), jnp.float32)
    operands = {name: array for name, array in inputs.items() if array is not None}
    names = (*operands, *outputs)
    aliases = {"into": "out", "arrivals_before": "arrivals"}
    return pl.pallas_call(
        functools.partial(_split_kernel, names=names, split=split),
        grid=(plan.programs, case.K),
        out_shape=tuple(outputs.values()),
        input_output_aliases={
            names.index(before): names.index(after) - len(operands)
            for before, after in aliases.items()
            if before in operands
        },
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=split.interpret,
        name="split_attention",
    )(*operands.values())[0]


def paged_decode_attention(
    arrays: AttentionArrays,
    options: AttentionOptions = NO_OPTIONS,
    *,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute attention of one query per row over the paged KV cache with Triton: [R,N,H]."""
    case = attention_case("decode", arrays, options)
    config = config or lookup(DecodeConfig, case)
    config = dataclasses.replace(config, block_tokens=fit_block(config.block_tokens, case))
    plan = SplitPlan.of(case, config, options.window)
    spec = TileSpec.of(case, MIN_DOT_ROWS, config.block_tokens, options)
    return split_and_merge(arrays, options, KvSplit(spec, case, plan, config, interpret))
