"""Attention and KV writes in plain JAX, optimized for CPU: padding and absent pages cost no time.

`reference.py` is the specification. Decodes are a flat list of (row, chunk of pages) items, so the
cost depends on the total number of cached tokens and not on the longest row (Flash-Decoding, Dao et
al. 2023, with XLA loops instead of programs). Longer rows are cut into tiles of queries, each with
its own number of chunks (FlashAttention-2, Dao 2023). All trip counts are dynamic, so one compiled
program serves every context length.

The code depends on two properties of XLA on CPU. Gathering `[P, K, S, H]` pages as `[P * K, S * H]`
rows collects the tokens of a head during the copy, which the dots would otherwise repeat. XLA
converts a whole 16-bit or 8-bit float array to float32 before a loop gathers from it or a scatter
writes to it, but it does not convert the same bits as integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import (
    INT8,
    NO_OPTIONS,
    AttentionArrays,
    AttentionOptions,
    number_dtype,
)
from pallas_kernels.reference import to_codes

CHUNK_TOKENS = 64
LOWEST = -1e30


class PageRows(NamedTuple):
    """KV cache pages as rows of bits, one row for each (page, kv head), and the page table.

    `gather_chunks` reads chunks of keys and values from it.
    """

    k: jax.Array  # [P * K, S * H]
    v: jax.Array
    page_table: jax.Array  # i32[R, M'], M' a multiple of the pages of a chunk
    shape: tuple[int, int, int]  # K, S, H
    dtype: jnp.dtype  # of the numbers in the pages
    scales: tuple[jax.Array, jax.Array] | None = None  # f32[P * K, S] of keys, and of values


class TileSizes(NamedTuple):
    """Sizes of the tiles in which plain JAX computes attention of rows with two queries or more."""

    queries: int  # queries of a tile
    chunk_tokens: int  # tokens of a chunk of keys and values
    one_chunk: bool = False  # no row is longer than a chunk, so there is no loop over chunks
    # dtype of the operands of products, if it differs from the accumulator's
    dtype: jnp.dtype | None = None


TILE_SIZES = TileSizes(queries=32, chunk_tokens=256)
Attend = Callable[[AttentionArrays, AttentionOptions], jax.Array]
"""Attention of the rows of a step, or of some of them: (arrays, options) -> array like q.

q is [., K, G, H] in the accumulator's dtype. The caller applies `k_scale` and `v_scale`, unless
pages are int8.
"""


def _bits(x: jax.Array) -> jax.Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize)
    return x if unsigned is None or x.dtype == INT8 else lax.bitcast_convert_type(x, unsigned)


def _floats(bits: jax.Array, dtype: jnp.dtype, out: jnp.dtype) -> jax.Array:
    values = bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)
    return values.astype(out)


def page_rows(
    arrays: AttentionArrays, pages: int, options: AttentionOptions = NO_OPTIONS
) -> PageRows:
    """Return the pages and page table of an attention call as `PageRows`, for `gather_chunks`.

    Args:
        arrays: arguments of the call.
        pages: pages of a chunk. The columns of the page table are padded to a multiple of it.
        options: of the call, with the scales of int8 pages.
    """
    _, k_pages, v_pages, page_table, *_ = arrays
    P, K, S, H = k_pages.shape
    scales = None
    if k_pages.dtype == INT8 and options.k_scale is not None and options.v_scale is not None:
        scales = options.k_scale.reshape(P * K, S), options.v_scale.reshape(P * K, S)
    pad = -page_table.shape[1] % pages
    return PageRows(
        _bits(k_pages).reshape(P * K, S * H),
        _bits(v_pages).reshape(P * K, S * H),
        jnp.pad(page_table, ((0, 0), (0, pad))),
        (K, S, H),
        number_dtype(k_pages.dtype),
        scales,
    )


def gather_chunks(cache: PageRows, page: jax.Array, out: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Gather W chunks of keys and values of C tokens each from the KV cache.

    Args:
        cache: the pages, and the scales of int8 pages.
        page: i32[W, pages of a chunk] page ids of each chunk.
        out: dtype of the results.

    Returns:
        Keys and values, two arrays [W, K, C, H]. Codes of int8 pages are multiplied by scales.
    """
    K, S, H = cache.shape
    index = page[:, None, :] * K + jnp.arange(K)[None, :, None]  # [W, K, pages]
    shape = (page.shape[0], K, page.shape[1] * S, H)
    k = cache.k.at[index].get(mode="clip").reshape(shape)
    v = cache.v.at[index].get(mode="clip").reshape(shape)
    keys, values = _floats(k, cache.dtype, out), _floats(v, cache.dtype, out)
    if cache.scales is None:
        return keys, values
    k_scale, v_scale = (
        scale.at[index].get(mode="clip").reshape(*shape[:3], 1).astype(out)
        for scale in cache.scales
    )
    return keys * k_scale, values * v_scale


class Items(NamedTuple):
    """Work list of decode attention: (row, chunk of the row's KV) pairs of all rows of one query.

    The first `count` items are pairs, and the others padding. The list is the same for every layer
    of a step, so XLA computes it once. Inside the loop XLA would inline it into the gathers and
    repeat its index arithmetic for every element of the cache.
    """

    owner: jax.Array  # i32[I], the row; R for padding
    page: jax.Array  # i32[I, pages of a chunk]
    first: jax.Array  # i32[I], cells of the chunk before this number are outside the window
    stop: jax.Array  # i32[I], cells from this number on are beyond the row's last token
    count: jax.Array  # i32[]


def list_items(
    cache: PageRows, kv_len: jax.Array, window: int | None, pages: int, group: int
) -> Items:
    """Return the `Items` of decode attention: each row's KV, cut into chunks of `pages` pages.

    Chunks before the window are omitted.

    Args:
        cache: the page table and page size.
        kv_len: i32[R] positions per row, 0 for rows to omit.
        window: positions that a query sees, or None for all.
        pages: pages of a chunk.
        group: the list is padded to a multiple of this number of items.
    """
    R, columns = kv_len.shape[0], -(-cache.page_table.shape[1] // pages)
    C = pages * cache.shape[1]
    oldest = jnp.zeros_like(kv_len) if window is None else jnp.maximum(kv_len - window, 0)
    skipped = oldest // C
    count = jnp.where(kv_len > 0, -(-kv_len // C) - skipped, 0)
    end = jnp.cumsum(count)
    item = jnp.arange(-(-R * columns // group) * group, dtype=jnp.int32)
    owner = jnp.searchsorted(end, item, side="right", method="scan_unrolled").astype(jnp.int32)
    row = jnp.minimum(owner, R - 1)
    chunk = item - (end - count - skipped)[row]
    missing = columns * pages - cache.page_table.shape[1]
    table = jnp.pad(cache.page_table, ((0, 0), (0, missing))).reshape(R, columns, pages)
    return Items(
        owner,
        table.at[row, chunk].get(mode="clip"),
        oldest[row] - chunk * C,
        jnp.where(owner < R, kv_len[row] - chunk * C, 0),
        end[-1],
    )


def capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _accumulator(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _decode(arrays: AttentionArrays, options: AttentionOptions) -> jax.Array:
    """Compute attention of one query per row over the KV cache, as an `Attend`: [R,K,G,H].

    Row r has the query q[r] at position ``kv_len[r] - 1``. Rows without positions are zero.
    """
    q, kv_len = arrays.q, arrays.kv_len
    R, K, G, H = q.shape
    pages = max(1, CHUNK_TOKENS // arrays.k_pages.shape[2])
    cache = page_rows(arrays, pages, options)
    cell = jnp.arange(pages * cache.shape[1])
    W = min(max(4, R // 2), 32)
    items = list_items(cache, kv_len, options.window, pages, W)
    q = q * options.score_scale(H)

    def body(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        acc, top = carry  # the sums [R, K, G, H + 1] and the maxima [R, K, G]
        owner, page, first, stop = (lax.dynamic_slice_in_dim(x, step * W, W) for x in items[:4])
        row = jnp.minimum(owner, R - 1)
        k, v = gather_chunks(cache, page, q.dtype)
        seen = cell < stop[:, None]
        if options.window is not None:
            seen &= cell >= first[:, None]
        scores = capped(jnp.einsum("wkgh,wkch->wkgc", q[row], k), options.soft_cap)
        scores = jnp.where(seen[:, None, None], scores, LOWEST)
        peak = scores.max(axis=-1)
        weights = jnp.where(seen[:, None, None], jnp.exp(scores - peak[..., None]), 0)
        v = jnp.where(seen[:, None, :, None], v, 0)
        part = jnp.einsum("wkgc,wkch->wkgh", weights, v)
        # A one-hot product sums the items of each row, because a scatter runs on one core. Zero
        # times NaN is NaN there, so an item that is not finite enters as zeros. It makes its own
        # row NaN through the maximum, which is selected and not multiplied.
        peak = jnp.where(jnp.isfinite(part.sum(axis=-1)), peak, jnp.nan)
        mine = owner[None, :] == jnp.arange(R)[:, None]
        peaks = jnp.where(mine[:, :, None, None], peak[None], LOWEST).max(axis=1)
        new_top = jnp.maximum(top, peaks)
        shrink, grow = jnp.exp(top - new_top), jnp.exp(peak - new_top[row])
        part = jnp.concatenate([part, weights.sum(axis=-1)[..., None]], axis=-1)
        part = jnp.where(jnp.isfinite(grow)[..., None], part * grow[..., None], 0)
        summed = jnp.einsum("rw,wkgh->rkgh", mine.astype(q.dtype), part)
        return acc * shrink[..., None] + summed, new_top

    # The last column of `acc` is the sum of the weights, the others are the weighted sum of the
    # values.
    top, total = empty_softmax((R, K, G), options.sinks, q.dtype)
    acc = jnp.concatenate([jnp.zeros_like(q), total[..., None]], axis=-1)
    acc, _ = lax.fori_loop(0, (items.count + W - 1) // W, body, (acc, top))
    total = acc[..., H:]
    out = acc[..., :H] / jnp.where(total == 0, 1, total)
    return jnp.where((kv_len > 0)[:, None, None, None], out, 0)


def empty_softmax(
    shape: tuple[int, ...], sinks: jax.Array | None, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Return the initial state of an online softmax: greatest score and sum of the weights.

    With sinks [N] the state has a weight of 1 at the sink's logit, without sinks no weight.

    Args:
        shape: shape of both results, which ends in K, G (kv heads, query heads per kv head).
        sinks: logits that are added to the denominator of the softmax, or None.
        dtype: dtype of both results.
    """
    if sinks is None:
        return jnp.full(shape, LOWEST, dtype), jnp.zeros(shape, dtype)
    peak = jnp.broadcast_to(sinks.reshape(shape[-2:]).astype(dtype), shape)
    return peak, jnp.ones(shape, dtype)


def attend_tiles(
    arrays: AttentionArrays, options: AttentionOptions, sizes: TileSizes = TILE_SIZES
) -> jax.Array:
    """Compute causal attention of rows of two queries or more, in tiles of queries, as an `Attend`.

    Tiles follow the order of their tokens. Queries that a tile writes past the end of its row are
    overwritten by the next row's tile.

    Args:
        arrays: arguments of the call, with q [T,K,G,H] in the accumulator's dtype.
        options: of the call.
        sizes: queries of a tile, and tokens of a chunk of keys and values.

    Returns:
        [T,K,G,H]. Undefined for padding and for tokens of rows of one query.
    """
    q, kv_len, query_start = arrays.q, arrays.kv_len, arrays.starts
    T, K, G, H = q.shape
    R = kv_len.shape[0]
    S = arrays.k_pages.shape[2]
    pages = max(1, sizes.chunk_tokens // S)
    cache = page_rows(arrays, pages, options)
    C = pages * S
    Q = min(sizes.queries, T)
    product = q.dtype if sizes.dtype is None else sizes.dtype
    lengths = query_start[1:] - query_start[:-1]
    tiles = jnp.where((lengths > 1) & (kv_len > 0), -(-lengths // Q), 0)
    end = jnp.cumsum(tiles)
    q = jnp.pad(q * options.score_scale(H), ((0, Q), (0, 0), (0, 0), (0, 0)))

    def tile_body(tile: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.minimum((end <= tile).sum(), R - 1)
        nth = tile - (end[row] - tiles[row])
        token = query_start[row] + nth * Q
        position_of_query = (
            kv_len[row] - lengths[row] + nth * Q + jnp.arange(Q)
        )  # positions, i32[Q]
        oldest = jnp.zeros_like(position_of_query)
        if options.window is not None:
            oldest = jnp.maximum(position_of_query - options.window + 1, 0)
        stop = jnp.minimum(position_of_query[-1] + 1, kv_len[row])
        here = lax.dynamic_slice_in_dim(q, token, Q).transpose(1, 2, 0, 3).reshape(K, G * Q, H)
        operand = here.astype(product)

        def chunk_body(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = carry  # [K, G * Q, H], maxima and totals [K, G, Q]
            page = lax.dynamic_slice(cache.page_table, (row, chunk * pages), (1, pages))
            k, v = gather_chunks(cache, page, product)
            position = chunk * C + jnp.arange(C)
            real = (position < kv_len[row]) & (position >= oldest[0])
            v = jnp.where(real[:, None], v[0], 0)
            seen = (position <= position_of_query[:, None]) & (
                position >= oldest[:, None]
            )  # [Q, C]
            seen &= position < kv_len[row]
            scores = jnp.einsum("kqh,kch->kqc", operand, k[0], preferred_element_type=q.dtype)
            scores = capped(scores, options.soft_cap).reshape(K, G, Q, C)
            scores = jnp.where(seen, scores, LOWEST)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
            shrink = jnp.exp(top - new_top)
            mixed = weights.astype(product).reshape(K, G * Q, C)
            part = jnp.einsum("kqc,kch->kqh", mixed, v, preferred_element_type=q.dtype)
            acc = acc * shrink.reshape(K, G * Q, 1) + part
            return acc, new_top, total * shrink + weights.sum(axis=-1)

        empty = empty_softmax((Q, K, G), options.sinks, q.dtype)
        top, total = (x.transpose(1, 2, 0) for x in empty)
        carry = (jnp.zeros_like(here), top, total)
        if sizes.one_chunk:
            acc, _, total = chunk_body(jnp.int32(0), carry)
        else:
            acc, _, total = lax.fori_loop(oldest[0] // C, -(-stop // C), chunk_body, carry)
        done = acc / jnp.where(total == 0, 1, total).reshape(K, G * Q, 1)
        done = done.reshape(K, G, Q, H).transpose(2, 0, 1, 3)
        return lax.dynamic_update_slice_in_dim(out, done, token, 0)

    return lax.fori_loop(0, end[-1], tile_body, jnp.zeros_like(q))[:T]


def _grouped(arrays: AttentionArrays, k_scale: jax.Array | None) -> AttentionArrays:
    # Scales per token are applied to scores and weights instead.
    q, K = arrays.q, arrays.k_pages.shape[1]
    q = q.reshape(q.shape[0], K, -1, q.shape[-1]).astype(_accumulator(q.dtype))
    if k_scale is not None and k_scale.ndim == 1:
        q = q * k_scale[:, None, None].astype(q.dtype)
    return arrays._replace(q=q)


def finished(out: jax.Array, q: jax.Array, v_scale: jax.Array | None) -> jax.Array:
    """Convert an attention result [.,K,G,H] to the shape and dtype of the queries q.

    If `v_scale` has one factor per kv head, f32[K], the result is multiplied by it first.
    """
    if v_scale is not None and v_scale.ndim == 1:
        out = out * v_scale[:, None, None].astype(out.dtype)
    return out.reshape(q.shape).astype(q.dtype)


def paged_decode_attention(
    arrays: AttentionArrays, options: AttentionOptions = NO_OPTIONS, *, decode: Attend = _decode
) -> jax.Array:
    """Compute attention of one query per row over the KV cache in plain JAX: [R,N,H] of q's dtype.

    `decode` computes the attention of grouped queries [R,K,G,H], as an `Attend`.
    """
    out = decode(_grouped(arrays, options.k_scale), options)
    return finished(out, arrays.q, options.v_scale)


def ragged_paged_attention(
    arrays: AttentionArrays,
    options: AttentionOptions = NO_OPTIONS,
    *,
    decode: Attend = _decode,
    tiles: Attend = attend_tiles,
) -> jax.Array:
    """Compute causal attention of rows of any length over the KV cache in plain JAX.

    Args:
        arrays: arguments of the call, q [T,N,H].
        options: of the call.
        decode: computes rows of one query.
        tiles: computes longer rows. So in a step of prompt chunks and decodes each kind of row
            costs the same as alone.

    Returns:
        [T,N,H] of q's dtype, zero for padding tokens.
    """
    q, query_start = arrays.q, arrays.starts
    T = q.shape[0]
    grouped = _grouped(arrays, options.k_scale)
    out = tiles(grouped, options)
    single = query_start[1:] - query_start[:-1] == 1
    single_queries = grouped.q.at[query_start[:-1]].get(mode="clip")
    single_len = jnp.where(single, arrays.kv_len, 0)
    decoded = decode(grouped._replace(q=single_queries, kv_len=single_len), options)
    out = out.at[jnp.where(single, query_start[:-1], T)].set(decoded, mode="drop")
    real = jnp.arange(T) < query_start[-1]
    return finished(jnp.where(real[:, None, None, None], out, 0), q, options.v_scale)


def kv_write(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Store the keys and values [T,K,H] of a step in their pages, in plain JAX.

    Arguments are as in ``pallas_kernels.kv_write``. Returns the new (k_pages, v_pages).
    """
    P, K, S, H = k_pages.shape
    cell = _cells(k_pages, slot_mapping)

    def write(x: jax.Array, pages: jax.Array, scale: jax.Array | None) -> jax.Array:
        stored = number_dtype(pages.dtype)
        if stored.itemsize == 1:  # numbers beyond the largest float8 would become NaN
            scaled = x.astype(jnp.float32)
            scaled = scaled if scale is None else scaled / scale[:, None]
            limit = float(jnp.finfo(stored).max)
            x = jnp.clip(scaled, -limit, limit)
        values = _bits(x.astype(stored))
        rows = _bits(pages).reshape(P * K * S, H).at[cell].set(values, mode="drop")
        return _floats(rows.reshape(P, K, S, H), pages.dtype, pages.dtype)

    return write(k, k_pages, k_scale), write(v, v_pages, v_scale)


def quantized_kv_write(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    slot_mapping: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Store the keys and values [T,K,H] of a step as int8 codes and their scales, in plain JAX.

    This is the only implementation of ``pallas_kernels.quantized_kv_write``, whose arguments it
    has. Returns the new (k_pages, v_pages, k_scale, v_scale).
    """
    cell = _cells(k_pages, slot_mapping)

    def write(x: jax.Array, pages: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes, scales = to_codes(x)
        rows = pages.reshape(-1, pages.shape[-1]).at[cell].set(codes, mode="drop")
        cells = scale.reshape(-1).at[cell].set(scales, mode="drop")
        return rows.reshape(pages.shape), cells.reshape(scale.shape)

    (keys, k_scales), (values, v_scales) = write(k, k_pages, k_scale), write(v, v_pages, v_scale)
    return keys, values, k_scales, v_scales


def _cells(pages: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    P, K, S, _ = pages.shape
    inside = (slot_mapping >= 0) & (slot_mapping < P * S)
    page, offset = slot_mapping // S, slot_mapping % S
    cell = (page[:, None] * K + jnp.arange(K)) * S + offset[:, None]
    return jnp.where(inside[:, None], cell, P * K * S)
