"""Attention of one query per row over paged KV, in Pallas-Triton, split over programs and merged.

The split is Flash-Decoding's (Dao et al. 2023), but planned on the device from ``kv_len``: all
blocks of the step are divided over about ``programs_per_sm`` programs an SM, so that a long row
gets many programs and a short row few, and a row's blocks are divided evenly among its programs.
Shapes alone bound the number of work items; items past the step's own have no blocks and end at
once.
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

from pallas_kernels.arguments import NO_OPTIONS, AttentionOptions, Case, attention_case
from pallas_kernels.devices import target_device
from pallas_kernels.gpu.triton_tile import (
    LOG2E,
    NEGATIVE,
    Span,
    TileSpec,
    attend,
    ceil_div,
    head_parts,
    load_queries,
    store_rows,
    tile_bounds,
)
from pallas_kernels.gpu.tuning import DecodeConfig, lookup

MIN_DOT_ROWS = 16
"""Rows of the smallest tensor core product."""


def running_sum(counts: jax.Array) -> jax.Array:
    """Return inclusive sums of a short i32 vector by one reduction: a cumsum is several kernels."""
    n = counts.shape[0]
    earlier = jnp.arange(n)[None, :] <= jnp.arange(n)[:, None]
    return jnp.where(earlier, counts[None, :], 0).sum(axis=1, dtype=jnp.int32)


def owner(ends: jax.Array, items: int) -> jax.Array:
    """Return i32[items]: for each item, the first row whose inclusive end lies beyond it."""
    passed = ends[None, :] <= jnp.arange(items, dtype=jnp.int32)[:, None]
    return passed.sum(axis=1, dtype=jnp.int32)


def split_plan(
    kv_len: jax.Array,
    token: jax.Array,
    take: jax.Array,
    case: Case,
    window: int | None,
    config: DecodeConfig,
) -> tuple[jax.Array, jax.Array]:
    """Divide the rows' blocks into work items.

    Two arrays hold what both kernels need. They are the same for every layer, so XLA computes them
    once a step, where it would compute a plain range of numbers once a layer.

    Returns:
        (items i32[I, 4]: row, first block, last block (exclusive), the row's token;
        rows i32[R+1, 3]: first item, token, take; row r owns items rows[r, 0]:rows[r+1, 0]).
    """
    block, rows = config.block_tokens, kv_len.shape[0]
    most = -(-case.M * case.S // block)
    if window is not None:
        most = min(most, -(-window // block) + 1)
    target = max(1, config.programs_per_sm * max(1, case.device.num_sms) // case.K)
    count = min(rows + target, rows * -(-most // config.min_blocks))
    first = jnp.zeros_like(kv_len)
    if window is not None:
        first = lax.div(jnp.maximum(kv_len - window, 0), jnp.int32(block))
    blocks = ceil_div(kv_len, block) - first
    each = jnp.maximum(ceil_div(blocks.sum(dtype=jnp.int32), target), config.min_blocks)
    splits = ceil_div(blocks, each)
    ends = running_sum(splits)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    row = owner(ends, count)
    is_used = row < rows
    row = jnp.minimum(row, rows - 1)
    index = jnp.arange(count, dtype=jnp.int32) - starts[row]
    parts = jnp.maximum(splits[row], 1)
    begin = first[row] + lax.div(index * blocks[row], parts)
    end = first[row] + lax.div((index + 1) * blocks[row], parts)
    begin, end = jnp.where(is_used, begin, 0), jnp.where(is_used, end, 0)
    items = jnp.stack([row, begin, end, token[row]], axis=1)
    return items, jnp.stack(
        [starts, *(jnp.pad(column, (0, 1)) for column in (token, take))], axis=1
    )


def _split_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    len_ref: Any,
    item_ref: Any,
    *rest: Any,
    spec: TileSpec,
    group: int,
    scaled: bool,
) -> None:
    """Compute one work item of one kv head: partial acc [I,N,H] and stats [I,2,N] (maxima, sums).

    ``rest``: k_scale and v_scale if ``scaled``, then acc and stats.
    """
    scale_refs: Any = rest[:2] if scaled else (None, None)
    k_scale_ref, v_scale_ref = scale_refs
    rest = rest[2:] if scaled else rest
    acc_ref, stats_ref = rest
    item, kv_head = pl.program_id(0), pl.program_id(1)
    row, first_block, last_block = item_ref[item, 0], item_ref[item, 1], item_ref[item, 2]
    live = last_block > first_block
    position = len_ref[row] - 1
    span = Span(*tile_bounds(position, position, spec.window), first_block, last_block)
    index = jnp.arange(spec.tile_rows)
    head = kv_head * group + index
    valid = (index < group) & live
    token = jnp.broadcast_to(item_ref[item, 3], index.shape)
    queries = load_queries(q_ref, token, head, valid, spec)
    positions = jnp.broadcast_to(position, index.shape)
    key_scale = k_scale_ref[kv_head] if scaled else None
    acc, top, total = attend(
        queries, k_ref, v_ref, table_ref, row, kv_head, positions, span, key_scale, spec
    )
    if scaled:
        acc = tuple(part * v_scale_ref[kv_head] for part in acc)
    item_of = jnp.broadcast_to(item, index.shape)
    store_rows(acc_ref, item_of, head, valid, acc, spec)
    plt.store(stats_ref.at[item_of, jnp.zeros_like(index), head], top, mask=valid)
    plt.store(stats_ref.at[item_of, jnp.ones_like(index), head], total, mask=valid)


def _merge_kernel(
    acc_ref: Any,
    stats_ref: Any,
    rows_ref: Any,
    *rest: Any,
    head_dim: int,
    splits: int,
    sinks: bool,
) -> None:
    """Combine one (row, head)'s partial results and write them to the token of the row's query.

    ``rest``: the sinks if ``sinks``, the array that the output aliases if any, and the output.
    """
    sink_ref: Any = rest[0] if sinks else None
    out_ref = rest[-1]
    row, head = pl.program_id(0), pl.program_id(1)
    begin, end = rows_ref[row, 0], rows_ref[row + 1, 0]
    pieces = head_parts(head_dim)

    def step(i: jax.Array, carry: tuple) -> tuple:
        """Add ``splits`` partial results to acc parts [part], the maximum and the sum."""
        acc, top, total = carry
        item = begin + i * splits + jnp.arange(splits)
        valid = item < end
        heads = jnp.broadcast_to(head, item.shape)
        zeros = jnp.zeros_like(item)
        tops = plt.load(stats_ref.at[item, zeros, heads], mask=valid, other=NEGATIVE)
        sums = plt.load(stats_ref.at[item, zeros + 1, heads], mask=valid, other=0.0)
        new_top = jnp.maximum(top, tops.max())
        shrink = jnp.exp2(top - new_top)
        weight = jnp.exp2(tops - new_top)
        new_acc = []
        for part, (start, size) in zip(acc, pieces, strict=True):
            shape = (splits, size)
            address = acc_ref.at[
                jnp.broadcast_to(item[:, None], shape),
                jnp.broadcast_to(head, shape),
                jnp.broadcast_to(start + jnp.arange(size), shape),
            ]
            partial = plt.load(address, mask=jnp.broadcast_to(valid[:, None], shape), other=0.0)
            new_acc.append(part * shrink + (partial * weight[:, None]).sum(axis=0))
        return tuple(new_acc), new_top, total * shrink + (sums * weight).sum()

    carry = (
        tuple(jnp.zeros((size,), jnp.float32) for _, size in pieces),
        jnp.float32(NEGATIVE),
        jnp.float32(0),
    )
    acc, top, total = lax.fori_loop(0, ceil_div(end - begin, splits), step, carry)
    if sinks:
        sink = sink_ref[head] * LOG2E
        new_top = jnp.maximum(top, sink)
        shrink = jnp.exp2(top - new_top)
        acc = tuple(part * shrink for part in acc)
        total = total * shrink + jnp.exp2(sink - new_top)
    token, take = rows_ref[row, 1], rows_ref[row, 2]
    for (start, size), part in zip(pieces, acc, strict=True):
        value = part / jnp.where(total == 0, 1.0, total)
        shape = (size,)
        address = out_ref.at[
            jnp.broadcast_to(token, shape), jnp.broadcast_to(head, shape), start + jnp.arange(size)
        ]
        plt.store(address, value.astype(out_ref.dtype), mask=jnp.broadcast_to(take > 0, shape))


def split_and_merge(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_len: jax.Array,
    token: jax.Array,
    take: jax.Array,
    into: jax.Array | None,
    options: AttentionOptions,
    *,
    case: Case,
    config: DecodeConfig,
    interpret: bool,
) -> jax.Array:
    """Compute attention of the query q[token[r]] of every row r with take[r] > 0.

    Args:
        q: [T,N,H]; token: i32[R] into it; take: i32[R]; kv_len: i32[R], 0 for rows not taken.
        into: [T,N,H] written in place at the tokens of rows taken, and kept elsewhere; None for a
            new array, which is then defined only at those tokens.

    Returns:
        [T,N,H].
    """
    spec = TileSpec.of(case, MIN_DOT_ROWS, config.block_tokens, options)
    items, rows = split_plan(kv_len, token, take, case, options.window, config)
    scaled, count = options.k_scale is not None, items.shape[0]
    acc, stats = pl.pallas_call(
        functools.partial(_split_kernel, spec=spec, group=case.group, scaled=scaled),
        grid=(count, case.K),
        out_shape=(
            jax.ShapeDtypeStruct((count, case.N, case.H), jnp.float32),
            jax.ShapeDtypeStruct((count, 2, case.N), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_decode_split",
    )(
        q,
        k_pages,
        v_pages,
        page_table,
        kv_len,
        items,
        *((options.k_scale, options.v_scale) if scaled else ()),
    )
    operands = [acc, stats, rows]
    if options.sinks is not None:
        operands.append(options.sinks.astype(jnp.float32))
    aliases = {}
    if into is not None:
        aliases = {len(operands): 0}
        operands.append(into)
    return pl.pallas_call(
        functools.partial(
            _merge_kernel,
            head_dim=case.H,
            splits=config.merge_splits,
            sinks=options.sinks is not None,
        ),
        grid=(kv_len.shape[0], case.N),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_decode_merge",
    )(*operands)


def paged_decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_len: jax.Array,
    options: AttentionOptions = NO_OPTIONS,
    *,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute ``pallas_kernels.paged_decode_attention``: [R,N,H].

    Args:
        config: block sizes; None reads the tuning table.
        interpret: run on any device, slowly, as plain JAX operations.
    """
    device = target_device()
    case = attention_case("decode", device, q, k_pages, v_pages, page_table, None, kv_len, options)
    config = config or lookup(DecodeConfig, case)
    config = dataclasses.replace(config, block_tokens=fit_block(config.block_tokens, case))
    rows = jnp.arange(case.R, dtype=jnp.int32)
    return split_and_merge(
        q,
        k_pages,
        v_pages,
        page_table,
        kv_len,
        rows,
        jnp.ones_like(rows),
        None,
        options,
        case=case,
        config=config,
        interpret=interpret,
    )


def fit_block(block_tokens: int, case: Case) -> int:
    """Reduce a block size to what a row's KV can fill, but not below the smallest product's 16."""
    longest = case.M * case.S
    while block_tokens > 16 and block_tokens // 2 >= longest:
        block_tokens //= 2
    return block_tokens
