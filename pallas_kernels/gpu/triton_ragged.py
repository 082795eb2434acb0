"""Causal attention of rows of any length over the paged KV cache, in Pallas-Triton.

A tile is a few consecutive query tokens of one row times the query heads of one kv head. So the
heads of a group share every key and value read (grouped-query attention, Ainslie et al. 2023) and
the tensor cores get full tiles. The device computes from ``query_start`` which tile belongs to
which row. The shapes alone bound the number of tiles. A row of few queries would use a fraction of
a tile and read a long context in one program. Such rows are computed by the split-KV kernel, which
writes them into the same output.
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
from pallas_kernels.gpu.triton_decode import fit_block, split_and_merge
from pallas_kernels.gpu.triton_plan import SplitPlan
from pallas_kernels.gpu.triton_tile import (
    LOG2E,
    Span,
    TileSpec,
    attend,
    ceil_div,
    load_queries,
    owner,
    running_sum,
    spread,
    store_rows,
    tile_bounds,
)
from pallas_kernels.gpu.tuning import DecodeConfig, RaggedConfig, defaults, fitted, lookup

MOST_TILES = 4
"""Tiles over which the queries of a row that is split are divided."""


def tile_count(tokens: int, rows: int, tile: int, few: int) -> int:
    """Return the most tiles that `tokens` tokens of `rows` rows and of padding can need.

    Args:
        few: rows of at most this many queries have no tiles.
    """
    return tokens // tile + min(rows, tokens // (few + 1)) + 1


def tiled_counts(
    query_start: jax.Array, kv_len: jax.Array, tokens: int, few: int, longer_than: int = -1
) -> tuple[jax.Array, jax.Array]:
    """Return the number of queries, and of queries in tiles, of each row and of the padding.

    Rows of at most ``few`` queries get no tiles if they have more than ``longer_than`` positions.

    Returns:
        Two i32[R+1].
    """
    starts = jnp.concatenate([query_start, jnp.full((1,), tokens, jnp.int32)])
    counts = jnp.maximum(starts[1:] - starts[:-1], 0)
    if not few:
        return counts, counts
    is_split = (counts[:-1] <= few) & (kv_len > longer_than)
    return counts, jnp.concatenate([jnp.where(is_split, 0, counts[:-1]), counts[-1:]])


def tile_plan(
    query_start: jax.Array,
    kv_len: jax.Array,
    tokens: int,
    tile: int,
    few: int,
    longer_than: int = -1,
) -> jax.Array:
    """Divide the queries of rows into tiles of `tile` tokens.

    `tiled_counts` defines which rows get tiles. Padding tokens are an additional row without keys,
    so their result is zero.

    Returns:
        i32[tiles, 4]: row, first token, number of tokens (0 for unused tiles), position of the
        first token.
    """
    rows = kv_len.shape[0]
    starts = jnp.concatenate([query_start, jnp.full((1,), tokens, jnp.int32)])
    counts, tiled = tiled_counts(query_start, kv_len, tokens, few, longer_than)
    positions = jnp.concatenate([kv_len - counts[:rows], jnp.full((1,), -tokens, jnp.int32)])
    tiles = ceil_div(tiled, tile)
    ends = running_sum(tiles)
    count = tile_count(tokens, rows, tile, few if longer_than < 0 else 0)
    row = owner(ends, count)
    is_used = row <= rows
    row = jnp.minimum(row, rows)
    within = (jnp.arange(count, dtype=jnp.int32) - (ends - tiles)[row]) * tile
    size = jnp.where(is_used, jnp.minimum(counts[row] - within, tile), 0)
    return jnp.stack([row, starts[row] + within, size, positions[row] + within], axis=1)


def _tile_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    tile_ref: Any,
    *rest: Any,
    spec: TileSpec,
    group: int,
    scaled: bool,
    sinks: bool,
) -> None:
    """Compute one tile of one kv head and write it to its tokens of out [T,N,H].

    ``rest``: k_scale and v_scale if ``scaled``, the sinks if ``sinks``, and out.
    """
    scale_refs: Any = rest[:2] if scaled else (None, None)
    k_scale_ref, v_scale_ref = scale_refs
    rest = rest[2:] if scaled else rest
    sink_ref: Any = rest[0] if sinks else None
    out_ref = rest[-1]
    # Late tiles of a long row see the most keys, so they come first: short tiles fill the end.
    tile, kv_head = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1)
    row, first_token = tile_ref[tile, 0], tile_ref[tile, 1]
    size, first = tile_ref[tile, 2], tile_ref[tile, 3]
    begin, end, full_begin, full_end = tile_bounds(first, first + size - 1, spec.window)
    last_block = jnp.where(size > 0, ceil_div(end, spec.block_tokens), 0)
    first_block = jnp.minimum(lax.div(begin, jnp.int32(spec.block_tokens)), last_block)
    span = Span(begin, end, full_begin, full_end, first_block, last_block)

    index = jnp.arange(spec.tile_rows)
    local = lax.div(index, jnp.full_like(index, group))
    token = first_token + local
    head = kv_head * group + lax.rem(index, jnp.full_like(index, group))
    valid = local < size
    queries = load_queries(q_ref, token, head, valid, spec)
    key_scale = k_scale_ref[kv_head] if scaled else None
    acc, top, total = attend(
        queries, k_ref, v_ref, table_ref, row, kv_head, first + local, span, key_scale, spec
    )
    if sinks:
        sink = plt.load(sink_ref.at[head], mask=valid, other=0.0) * LOG2E
        new_top = jnp.maximum(top, sink)
        shrink = jnp.exp2(top - new_top)
        acc = tuple(part * spread(shrink, part.shape, 0) for part in acc)
        total = total * shrink + jnp.exp2(sink - new_top)
    inverse = 1.0 / jnp.where(total == 0, 1.0, total)
    if scaled:
        inverse = inverse * v_scale_ref[kv_head]
    acc = tuple(part * spread(inverse, part.shape, 0) for part in acc)
    store_rows(out_ref, token, head, valid, acc, spec)


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    query_start: jax.Array,
    kv_len: jax.Array,
    options: AttentionOptions = NO_OPTIONS,
    *,
    arrivals: jax.Array | None = None,
    config: RaggedConfig | None = None,
    decode_config: DecodeConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute causal attention of rows of any length with Triton: [T,N,H].

    Implementation "triton" of ``pallas_kernels.ragged_paged_attention``.

    Args:
        config: block sizes. None reads the tuning table.
        decode_config: block sizes for the rows of few queries. None means the defaults.
        interpret: run on any device, slowly, as plain JAX operations.
    """
    device = target_device()
    case = attention_case(
        "ragged", device, q, k_pages, v_pages, page_table, query_start, kv_len, options
    )
    config = config or lookup(RaggedConfig, case)
    arrays = (q, k_pages, v_pages, page_table)
    decode_config, plan = few_query_plan(case, config, decode_config, options)
    out = _tiles(
        *(*arrays, query_start, kv_len, options, plan.few),
        case=case,
        config=config,
        interpret=interpret,
    )
    if not plan.few:
        return out
    return split_and_merge(
        *(*arrays, kv_len, query_start, out, arrivals, options),
        case=case,
        config=decode_config,
        plan=plan,
        tile_rows=config.split_rows,
        interpret=interpret,
    )


def few_query_plan(
    case: Case, config: RaggedConfig, decode_config: DecodeConfig | None, options: AttentionOptions
) -> tuple[DecodeConfig, SplitPlan]:
    """Return block sizes and `SplitPlan` for the rows of few queries.

    The tuned sizes for decodes do not apply here: tiles of several queries take more registers.
    """
    sizes = decode_config if decode_config is not None else defaults(DecodeConfig, case)
    sizes = dataclasses.replace(sizes, block_tokens=fit_block(sizes.block_tokens, case))
    sizes = fitted(sizes, case, config.split_rows)
    queries = max(1, min(config.split_rows // case.group, config.split_queries))
    tiles = min(-(-config.split_queries // queries), MOST_TILES)
    return sizes, SplitPlan.of(case, sizes, options.window, queries, tiles)


def _tiles(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    query_start: jax.Array,
    kv_len: jax.Array,
    options: AttentionOptions,
    few: int,
    *,
    case: Case,
    config: RaggedConfig,
    interpret: bool,
) -> jax.Array:
    """Compute every tile of the step, except for rows of at most ``few`` queries."""
    block = fit_block(config.block_tokens, case)
    spec = TileSpec.of(case, config.tile_rows, block, options)
    tile = config.tile_rows // case.group
    plan = tile_plan(query_start, kv_len, case.T, tile, few)
    scaled = options.k_scale is not None
    operands = [q, k_pages, v_pages, page_table, plan]
    operands += [options.k_scale, options.v_scale] if scaled else []
    operands += [options.sinks.astype(jnp.float32)] if options.sinks is not None else []
    return pl.pallas_call(
        functools.partial(
            _tile_kernel,
            spec=spec,
            group=case.group,
            scaled=scaled,
            sinks=options.sinks is not None,
        ),
        grid=(plan.shape[0], case.K),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="ragged_attention",
    )(*operands)
