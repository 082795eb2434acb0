"""Attention over a part of the positions of each row, for caches that are sharded over devices.

Positions are dealt round-robin: part p of n holds the positions p, p + n, p + 2n and so on. A page
of a part holds S of its positions, which span S * n positions of the row. A part returns an
unnormalized result: the weighted sum of the values, the greatest score and the sum of the weights.
The exact result follows from the results of all parts (Flash-Decoding, Dao et al. 2023; Ring
Attention, Liu et al. 2023, has the same sum).

The code is plain JAX on every platform, because the causal masks of the other kernels have no gaps
between positions. The queries of a row are cut into tiles that begin at multiples of the tile size,
and the keys into chunks that are counted from position 0. So the order of every sum is independent
of the other rows and of where a prompt was cut.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import NO_OPTIONS, AttentionArrays, AttentionOptions, attention_case
from pallas_kernels.xla import LOWEST, PageRows, capped, gather_chunks, page_rows

QUERIES, CHUNK_TOKENS = 8, 128
"""Positions of a tile of queries, and positions of a part in a chunk of keys."""


@partial(jax.tree_util.register_dataclass, data_fields=["first"], meta_fields=["stride"])
@dataclasses.dataclass(frozen=True, eq=False)
class PartPositions:
    """Positions of the rows that one part of a KV cache holds, if it is sharded by position.

    Attributes:
        first: i32[], the first position of the part.
        stride: number of parts. The part holds positions first, first + stride and so on.
    """

    first: jax.Array
    stride: int

    def count_below(self, position: jax.Array) -> jax.Array:
        """Return how many positions of this part of the KV cache are less than `position`."""
        return jnp.maximum(position - self.first + self.stride - 1, 0) // self.stride


class QueryRows(NamedTuple):
    """Rows (sequences) of a step: the tokens that each row has in the step, and its length.

    Row r has tokens ``query_start[r]:query_start[r+1]`` and ``kv_len[r]`` positions in all parts.
    """

    query_start: jax.Array  # i32[R + 1]
    kv_len: jax.Array  # i32[R]

    def tiles(self) -> tuple[jax.Array, jax.Array]:
        """Return two i32[R]: the position of each row's first query, and its number of query tiles.

        Tiles begin at multiples of QUERIES positions. Rows without queries or positions have no
        tiles.
        """
        lengths = self.query_start[1:] - self.query_start[:-1]
        first = self.kv_len - lengths
        count = (self.kv_len - 1) // QUERIES - first // QUERIES + 1
        return first, jnp.where((lengths > 0) & (self.kv_len > 0), count, 0)


def attention_of_part(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    query_start: jax.Array,
    kv_len: jax.Array,
    positions: PartPositions,
    options: AttentionOptions = NO_OPTIONS,
) -> jax.Array:
    """Compute causal attention over one part of a KV cache that is sharded by position.

    The result lacks the division by the sum of the softmax weights. `merge_parts` combines the
    results of all parts.

    Args:
        q: [T,N,H] queries. They are the last positions of each row, whether the part has them or
            not.
        k_pages, v_pages: [P,K,S,H] keys and values of the part.
        page_table, query_start: as in ``ragged_paged_attention``.
        kv_len: i32[R] positions per row, in all parts together.
        positions: the positions of the part.
        options: as in ``ragged_paged_attention``, without sinks, which `merge_parts` adds.

    Returns:
        [T,N,H+2] in float32 (float64 for float64): the weighted sum of the values, the greatest
        score, and the sum of the weights relative to that score. Zeros for padding tokens.

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """
    arrays = AttentionArrays(q, k_pages, v_pages, page_table, query_start, kv_len)
    attention_case("ragged", arrays, options)
    (T, N, H), K, exact = q.shape, k_pages.shape[1], jnp.promote_types(q.dtype, jnp.float32)
    pages = max(1, CHUNK_TOKENS // k_pages.shape[2])
    cache = page_rows(arrays, pages, options)
    grouped = q.reshape(T, K, N // K, H).astype(exact) * options.score_scale(H)
    k_scale, v_scale = options.k_scale, options.v_scale
    if k_scale is not None and k_scale.ndim == 1:
        grouped *= k_scale[:, None, None].astype(exact)
    result = _all_tiles(grouped, cache, QueryRows(query_start, kv_len), positions, options)
    if v_scale is not None and v_scale.ndim == 1:
        result = result.at[..., :H].multiply(v_scale[:, None, None].astype(exact))
    return result.reshape(T, N, H + 2)


def merge_parts(parts: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Combine the results of `attention_of_part` of all parts into attention over all positions.

    Args:
        parts: [n,T,N,H+2], the results of the n parts of the KV cache.
        sinks: [N] logits that are added to the denominator of the softmax, or None.

    Returns:
        [T,N,H] attention of T tokens and N query heads, of the dtype of `parts`. Zeros for padding
        tokens.
    """
    sums, tops, totals = parts[..., :-2], parts[..., -2], parts[..., -1]
    top = tops.max(axis=0)
    if sinks is not None:
        top = jnp.maximum(top, sinks.astype(top.dtype))
    shares = jnp.exp(tops - top)
    total = (shares * totals).sum(axis=0)
    if sinks is not None:
        total += jnp.exp(sinks.astype(top.dtype) - top)
    return (shares[..., None] * sums).sum(axis=0) / jnp.where(total == 0, 1, total)[..., None]


def _all_tiles(
    q: jax.Array,
    cache: PageRows,
    rows: QueryRows,
    positions: PartPositions,
    options: AttentionOptions,
) -> jax.Array:
    """Compute unnormalized attention of all tokens over one part of the KV cache, tile by tile.

    Args:
        q: [T,K,G,H] scaled queries: G query heads for each of K kv heads.
        cache: pages of the part.
        rows: the tokens and lengths of the rows.
        positions: the positions of the part.
        options: window and soft cap.

    Returns:
        [T,K,G,H+2] of q's dtype: the weighted sum of the values, the greatest score, and the sum of
        the weights relative to that score. Zeros for padding tokens.
    """
    T, K, G, H = q.shape
    first, count = rows.tiles()
    end = jnp.cumsum(count)
    around = ((QUERIES, QUERIES), (0, 0), (0, 0), (0, 0))
    q = jnp.pad(q, around)

    def tile_body(tile: jax.Array, out: jax.Array) -> jax.Array:
        row = (end <= tile).sum()
        start = (first[row] // QUERIES + tile - (end[row] - count[row])) * QUERIES
        position = start + jnp.arange(QUERIES)
        is_query = (position >= first[row]) & (position < rows.kv_len[row])
        # PartPositions outside the row could see NaN of another request.
        position = jnp.clip(position, first[row], rows.kv_len[row] - 1)
        place = rows.query_start[row] + start - first[row] + QUERIES
        here = lax.dynamic_slice_in_dim(q, place, QUERIES)
        table = lax.dynamic_index_in_dim(cache.page_table, row)
        result = _tile(here, cache._replace(page_table=table), position, positions, options)
        before = lax.dynamic_slice_in_dim(out, place, QUERIES)
        result = jnp.where(is_query[:, None, None, None], result, before)
        return lax.dynamic_update_slice_in_dim(out, result, place, 0)

    none = jnp.zeros((T + 2 * QUERIES, K, G, H + 2), q.dtype)
    return lax.fori_loop(0, end[-1], tile_body, none)[QUERIES:-QUERIES]


def _tile(
    q: jax.Array,
    cache: PageRows,
    position: jax.Array,
    positions: PartPositions,
    options: AttentionOptions,
) -> jax.Array:
    """Compute unnormalized attention of a tile of one row's queries over one part of the KV cache.

    Args:
        q: [QUERIES,K,G,H] scaled queries: G query heads for each of K kv heads.
        cache: pages of the part, with a page table of only this row.
        position: i32[QUERIES] positions of the queries.
        positions: the positions of the part.
        options: window and soft cap.

    Returns:
        [QUERIES,K,G,H+2] of q's dtype: the weighted sum of the values, the greatest score, and the
        sum of the weights relative to that score.
    """
    (Q, K, G, H), S = q.shape, cache.shape[1]
    pages = max(1, CHUNK_TOKENS // S)
    C = pages * S
    operand = q.transpose(1, 2, 0, 3).reshape(K, G * Q, H)
    oldest = jnp.zeros_like(position)
    if options.window is not None:
        oldest = jnp.maximum(position - options.window + 1, 0)

    def chunk_body(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        sums, top, total = carry  # [K, G * Q, H], greatest scores and totals [K, G, Q]
        page = lax.dynamic_slice(cache.page_table, (0, chunk * pages), (1, pages))
        k, v = (part[0] for part in gather_chunks(cache, page, q.dtype))
        key = positions.first + (chunk * C + jnp.arange(C)) * positions.stride
        seen = (key <= position[:, None]) & (key >= oldest[:, None])
        # Zero times NaN is NaN, so unwritten values are replaced before the product.
        v = jnp.where(seen.any(axis=0)[:, None], v, 0)
        scores = jnp.einsum("kqh,kch->kqc", operand, k, precision=lax.Precision.HIGHEST)
        scores = capped(scores, options.soft_cap).reshape(K, G, Q, C)
        scores = jnp.where(seen, scores, LOWEST)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
        shrink = jnp.exp(top - new_top)
        mixed = weights.reshape(K, G * Q, C)
        part = jnp.einsum("kqc,kch->kqh", mixed, v, precision=lax.Precision.HIGHEST)
        sums = sums * shrink.reshape(K, G * Q, 1) + part
        return sums, new_top, total * shrink + weights.sum(axis=-1)

    empty = jnp.full((K, G, Q), LOWEST, q.dtype), jnp.zeros((K, G, Q), q.dtype)
    begin = positions.count_below(oldest[0]) // C
    stop = -(-positions.count_below(position[-1] + 1) // C)
    carry = (jnp.zeros_like(operand), *empty)
    sums, top, total = lax.fori_loop(begin, stop, chunk_body, carry)
    sums = sums.reshape(K, G, Q, H)
    result = jnp.concatenate([sums, top[..., None], total[..., None]], axis=-1)
    return result.transpose(2, 0, 1, 3)
