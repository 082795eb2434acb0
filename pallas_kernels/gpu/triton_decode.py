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
    AttentionOptions,
    Case,
    attention_case,
)
from pallas_kernels.devices import target_device
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
    LOG2E,
    NEGATIVE,
    Parts,
    Span,
    TileSpec,
    attend,
    ceil_div,
    head_parts,
    load_queries,
    power_of_two,
    spread,
    store_rows,
    tile_bounds,
)
from pallas_kernels.gpu.tuning import DecodeConfig, lookup

MIN_DOT_ROWS = 16
"""Rows of the smallest tensor core product."""
Found = tuple[Parts, jax.Array, jax.Array]
"""Unnormalised attention of a tile: acc parts [rows, part], maxima and sums [rows]."""


@dataclasses.dataclass(frozen=True)
class _Split:
    """Static properties of a call.

    Attributes:
        spec: sizes and options of a tile.
        kv_heads, group: number of kv heads, and of query heads per kv head.
        plan: division of the KV.
        merge_numbers: how many numbers of partial results a program reads at a time.
        interpret: whether plain JAX runs the programs, one after the other.
    """

    spec: TileSpec
    kv_heads: int
    group: int
    plan: SplitPlan
    merge_numbers: int
    interpret: bool


def _split_kernel(*arrays: Any, names: tuple[str, ...], split: _Split) -> None:
    """Compute one program's share of the blocks of one kv head.

    `arrays` are the operands and outputs named by `names`, in that order.
    """
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
    split: _Split,
) -> None:
    """Compute blocks ``begin`` to ``end`` of a tile. The last piece to finish merges the tile.

    The pieces of a tile belong to consecutive programs. The first piece can be the last turn of its
    program, so each program has two places for partial results. The other pieces are the first
    turns of their programs.
    """
    spec, plan, lines = split.spec, split.plan, refs["lines"]
    row, token, size = (lines[tile, column] for column in (ROW, TOKEN, SIZE))
    position, block, start, count = (lines[tile, c] for c in (POSITION, BLOCK, START, COUNT))
    bounds = tile_bounds(position, position + size - 1, spec.window)
    last_block = jnp.minimum(block + end, ceil_div(bounds[1], spec.block_tokens))
    span = Span(*bounds, block + begin, last_block)
    local, head, valid = _queries_of(spec.tile_rows, kv_head, split.group, size)
    queries = load_queries(refs["q"], token + local, head, valid, spec)
    key_scale = refs["k_scale"][kv_head] if "k_scale" in refs else None
    found = attend(
        *(queries, refs["k"], refs["v"], refs["table"], row, kv_head),
        *(position + local, span, key_scale, spec),
    )
    if not plan.is_merged:
        _store_result(refs, token, size, kv_head, found, split)
        return

    @pl.when(end - begin == count)
    def _() -> None:
        _store_result(refs, token, size, kv_head, found, split)

    @pl.when(end - begin < count)
    def _() -> None:
        total = lines[plan.programs, SHARE]
        shares = plan.shares(total)
        first = lax.div((start + 1) * shares - 1, total)
        pieces = lax.div((start + count) * shares - 1, total) - first + 1
        place = 2 * program + (begin == 0).astype(jnp.int32)
        _store_partial(refs, place, kv_head, valid, found, split)
        counter = first * split.kv_heads + kv_head
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
    place: jax.Array,
    kv_head: jax.Array,
    valid: jax.Array,
    found: Found,
    split: _Split,
) -> None:
    """Store the partial result of a piece, completely before the program counts as arrived."""
    acc, *statistics = found
    index = jnp.arange(split.spec.tile_rows)
    first = spread(place, index.shape), spread(kv_head, index.shape)
    for (start, width), part in zip(head_parts(split.spec.head_dim), acc, strict=True):
        shape = (split.spec.tile_rows, width)
        address = [spread(i, shape, 0) for i in (*first, index)]
        column = spread(start + jnp.arange(width), shape, 1)
        mask = spread(valid, shape, 0)
        plt.store(refs["acc"].at[(*address, column)], part, mask=mask)
    for number, statistic in enumerate(statistics):
        address = refs["stats"].at[(*first, jnp.full_like(index, number), index)]
        plt.store(address, statistic, mask=valid)
    if not split.interpret:
        plt.debug_barrier()


def _merged(
    refs: dict[str, Any],
    first: jax.Array,
    count: jax.Array,
    size: jax.Array,
    kv_head: jax.Array,
    split: _Split,
) -> Found:
    """Combine the partial results of the pieces of a tile, in the order of their blocks.

    Args:
        first: the program of the first piece.
        count: number of pieces.

    Returns:
        The unnormalized attention of the tile: acc parts [rows, part], maxima and sums [rows].
    """
    columns = head_parts(split.spec.head_dim)
    rows = power_of_two(split.group * split.plan.queries)
    at_once = max(1, split.merge_numbers // (rows * columns[0][1]))
    row = jnp.arange(rows)

    def load(name: str, piece: jax.Array, last: tuple[Any, ...], other: float) -> jax.Array:
        """Load numbers of pieces and rows of this kv head, in the shape of ``piece``."""
        place = 2 * (first + piece) + (piece == 0).astype(jnp.int32)
        index = (place, spread(kv_head, piece.shape), *last)
        row_of = last[-1] if name == "stats" else last[0]
        mask = piece < count
        mask &= lax.div(row_of, jnp.full_like(row_of, split.group)) < size
        return plt.load(refs[name].at[index], mask=mask, other=other)

    def step(i: jax.Array, carry: Found) -> Found:
        """Add ``at_once`` pieces to the carry."""
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
    found: Found,
    split: _Split,
) -> None:
    """Divide by the sum of the softmax, and write the rows of a tile to their tokens and heads."""
    acc, top, total = found
    local, head, valid = _queries_of(total.shape[0], kv_head, split.group, size)
    if "sinks" in refs:
        sink = plt.load(refs["sinks"].at[head], mask=valid, other=0.0) * LOG2E
        new_top = jnp.maximum(top, sink)
        shrink = jnp.exp2(top - new_top)
        acc = tuple(part * spread(shrink, part.shape, 0) for part in acc)
        total = total * shrink + jnp.exp2(sink - new_top)
    inverse = 1.0 / jnp.where(total == 0, 1.0, total)
    if "v_scale" in refs:
        inverse = inverse * refs["v_scale"][kv_head]
    acc = tuple(part * spread(inverse, part.shape, 0) for part in acc)
    store_rows(refs["out"], token + local, head, valid, acc, split.spec)


def split_and_merge(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_len: jax.Array,
    query_start: jax.Array | None,
    into: jax.Array | None,
    arrivals: jax.Array | None,
    options: AttentionOptions,
    *,
    case: Case,
    config: DecodeConfig,
    plan: SplitPlan,
    tile_rows: int,
    interpret: bool,
) -> jax.Array:
    """Compute attention of rows of few queries, with the KV split over programs.

    Args:
        query_start: as in ``ragged_paged_attention``. None if row r has only query r.
        into: [T,N,H], overwritten at the tokens of these rows. None allocates an array that is
            defined only at these tokens.
        arrivals: as in ``paged_decode_attention``.
        plan: division of the KV.
        tile_rows: rows of a tile in the products, at least its queries times the group.

    Returns:
        [T,N,H].
    """
    split = _Split(
        spec=TileSpec.of(case, tile_rows, config.block_tokens, options),
        kv_heads=case.K,
        group=case.group,
        plan=plan,
        merge_numbers=config.merge_numbers,
        interpret=interpret,
    )
    lines = split_lines(plan, kv_len, query_start, interpret=interpret)
    given = {"q": q, "k": k_pages, "v": v_pages, "table": page_table, "lines": lines}
    given |= {"k_scale": options.k_scale, "v_scale": options.v_scale, "into": into}
    if options.sinks is not None:
        given["sinks"] = options.sinks.astype(jnp.float32)
    outputs = {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    if plan.is_merged:
        given["arrivals_before"] = jnp.zeros(ARRIVALS, jnp.int32) if arrivals is None else arrivals
        outputs["arrivals"] = jax.ShapeDtypeStruct((ARRIVALS,), jnp.int32)
        places, numbers = (2 * plan.programs, case.K), case.group * plan.queries
        outputs["acc"] = jax.ShapeDtypeStruct((*places, numbers, case.H), jnp.float32)
        outputs["stats"] = jax.ShapeDtypeStruct((*places, 2, numbers), jnp.float32)
    operands = {name: array for name, array in given.items() if array is not None}
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
        interpret=interpret,
        name="split_attention",
    )(*operands.values())[0]


def paged_decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_len: jax.Array,
    options: AttentionOptions = NO_OPTIONS,
    *,
    arrivals: jax.Array | None = None,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute attention of one query per row with Triton: [R,N,H].

    Implementation "triton" of ``pallas_kernels.paged_decode_attention``.

    Args:
        config: block sizes. None reads the tuning table.
        interpret: run on any device, slowly, as plain JAX operations.
    """
    device = target_device()
    case = attention_case("decode", device, q, k_pages, v_pages, page_table, None, kv_len, options)
    config = config or lookup(DecodeConfig, case)
    config = dataclasses.replace(config, block_tokens=fit_block(config.block_tokens, case))
    return split_and_merge(
        *(q, k_pages, v_pages, page_table, kv_len),
        *(None, None, arrivals, options),
        case=case,
        config=config,
        plan=SplitPlan.of(case, config, options.window),
        tile_rows=MIN_DOT_ROWS,
        interpret=interpret,
    )


def fit_block(block_tokens: int, case: Case) -> int:
    """Halve a block size while it exceeds the longest KV of a row, but not below 16.

    16 rows are the smallest product of tensor cores.
    """
    longest = case.M * case.S
    while block_tokens > 16 and block_tokens // 2 >= longest:
        block_tokens //= 2
    return block_tokens
