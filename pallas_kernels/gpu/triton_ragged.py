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

from pallas_kernels.arguments import (
    NO_OPTIONS,
    AttentionArrays,
    AttentionOptions,
    Case,
    attention_case,
)
from pallas_kernels.gpu.triton_decode import KvSplit, split_and_merge
from pallas_kernels.gpu.triton_plan import SplitPlan
from pallas_kernels.gpu.triton_tile import (
    RowPages,
    Span,
    TileSpec,
    attend,
    ceil_div,
    load_queries,
    normalized,
    owner,
    running_sum,
    store_rows,
    tile_bounds,
)
from pallas_kernels.gpu.tuning import (
    DecodeConfig,
    RaggedConfig,
    defaults,
    fit_block,
    fitted,
    lookup,
)

MOST_TILES = 4
"""Most tiles of a row whose KV is split."""


def tile_count(tokens: int, rows: int, tile: int, few: int) -> int:
    """Return an upper limit of the number of tiles of queries of a step, from its shapes alone.

    Args:
        tokens: tokens of all rows and of the padding.
        rows: number of rows.
        tile: tokens of a tile.
        few: rows of at most this many queries have no tiles.
    """
    return tokens // tile + min(rows, tokens // (few + 1)) + 1


def tiled_counts(
    query_start: jax.Array, kv_len: jax.Array, tokens: int, few: int, longer_than: int = -1
) -> tuple[jax.Array, jax.Array]:
    """Return how many queries each row has, and how many of them are computed in tiles.

    A row of at most ``few`` queries and of more than ``longer_than`` positions has no tiles. Its
    second number is 0. All queries of any other row are in tiles.

    Args:
        query_start: i32[R+1] first token of each row.
        kv_len: i32[R] positions of each row.
        tokens: tokens of all rows and of the padding.
        few: most queries of a row without tiles. 0 gives tiles to all rows.
        longer_than: most positions of a row of few queries that has tiles.

    Returns:
        Two i32[R+1]. The last number of each is the number of padding tokens.
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
    """Divide the queries of the rows of a step into tiles of `tile` tokens.

    `tiled_counts` defines which rows get tiles, by `few` and `longer_than`. Padding tokens are an
    additional row without keys, so their result is zero.

    Args:
        query_start: i32[R+1] first token of each row.
        kv_len: i32[R] positions of each row.
        tokens: tokens of all rows and of the padding.
        tile: tokens of a tile.

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


def _tile_kernel(*arrays: Any, names: tuple[str, ...], spec: TileSpec, group: int) -> None:
    """Body of the kernel: compute attention of one tile of queries of one kv head.

    The result is written to the tile's tokens of out [T,N,H]. `arrays` are refs of the operands and
    the output named by `names`, in that order.
    """
    refs = dict(zip(names, arrays, strict=True))
    tile_ref = refs["tiles"]
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
    queries = load_queries(refs["q"], token, head, valid, spec)
    pages = RowPages.of(refs, row, kv_head)
    softmax = attend(queries, first + local, pages, span, spec)
    acc = normalized(refs, softmax, kv_head, head, valid)
    store_rows(refs["out"], token, head, valid, acc, spec)


def ragged_paged_attention(
    arrays: AttentionArrays,
    options: AttentionOptions = NO_OPTIONS,
    *,
    config: RaggedConfig | None = None,
    decode_config: DecodeConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute causal attention of rows of any length over the paged KV cache with Triton.

    Args:
        arrays: arguments of the call, q [T,N,H].
        options: options of the call.
        config: block sizes of the tiles. None reads the tuning table.
        decode_config: block sizes for the rows of few queries. None means the defaults.
        interpret: run the kernels as plain JAX on any device.

    Returns:
        [T,N,H] of q's dtype, zero for padding tokens.
    """
    case = attention_case("ragged", arrays, options)
    config = config or lookup(RaggedConfig, case)
    split = few_query_split(case, config, options, decode_config, interpret)
    out = _tiles(arrays, options, case, config, split.plan.few, interpret)
    return split_and_merge(arrays, options, split, out) if split.plan.few else out


def few_query_split(
    case: Case,
    config: RaggedConfig,
    options: AttentionOptions,
    decode_config: DecodeConfig | None = None,
    interpret: bool = False,
) -> KvSplit:
    """Return how the KV of rows of few queries is split over programs, as a `KvSplit`.

    Args:
        case: shapes and dtypes of the call.
        config: sizes, with the most queries of such a row.
        options: options of the call.
        decode_config: block sizes. None means the defaults, because tiles of several queries take
            more registers than the tuned sizes for decodes allow.
        interpret: run the kernel as plain JAX on any device.
    """
    sizes = decode_config if decode_config is not None else defaults(DecodeConfig, case)
    sizes = dataclasses.replace(sizes, block_tokens=fit_block(sizes.block_tokens, case))
    sizes = fitted(sizes, case, config.split_rows)
    queries = max(1, min(config.split_rows // case.group, config.split_queries))
    tiles = min(-(-config.split_queries // queries), MOST_TILES)
    plan = SplitPlan.of(case, sizes, options.window, queries, tiles)
    spec = TileSpec.of(case, config.split_rows, sizes.block_tokens, options)
    return KvSplit(spec, case, plan, sizes, interpret)


def _tiles(
    arrays: AttentionArrays,
    options: AttentionOptions,
    case: Case,
    config: RaggedConfig,
    few: int,
    interpret: bool,
) -> jax.Array:
    """Compute attention of the rows of more than ``few`` queries in tiles, with Triton: [T,N,H].

    Padding tokens are zero. Tokens of rows of at most ``few`` queries are undefined.
    """
    q, k_pages, v_pages, page_table, _, kv_len = arrays
    block = fit_block(config.block_tokens, case)
    spec = TileSpec.of(case, config.tile_rows, block, options)
    plan = tile_plan(arrays.starts, kv_len, case.T, config.tile_rows // case.group, few)
    operands = {"q": q, "k": k_pages, "v": v_pages, "table": page_table, "tiles": plan}
    if options.k_scale is not None and options.v_scale is not None:
        operands |= {"k_scale": options.k_scale, "v_scale": options.v_scale}
    if options.sinks is not None:
        operands["sinks"] = options.sinks.astype(jnp.float32)
    return pl.pallas_call(
        functools.partial(_tile_kernel, names=(*operands, "out"), spec=spec, group=case.group),
        grid=(plan.shape[0], case.K),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="ragged_attention",
    )(*operands.values())
