"""Attention in plain JAX for a GPU on which Triton does not compile: before Ampere.

The host drives a loop whose length the device computes, and waits for every turn. So a turn takes
as many tokens as memory allows. If the page table fits one turn, there is no loop, and the step
stays one CUDA graph. Decodes multiply and reduce instead of calling a product: XLA fuses the gather
of the pages, their conversion and the reduction into one kernel, so keys and values are read once
and not written. Rows of more queries are products of large tiles, with 16-bit operands if queries
and pages have the same 16-bit dtype.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import xla
from pallas_kernels.arguments import NO_OPTIONS, AttentionArrays, AttentionOptions


class TurnSizes(NamedTuple):
    """Sizes of a turn of the attention loops over the KV cache, in tokens or bytes."""

    chunk_tokens: int = 64  # tokens of an item of decodes
    # tokens of all items of a turn. Padding items read the same page repeatedly, from the cache.
    turn_tokens: int = 32768
    tile_chunk_tokens: int = 2048  # tokens of a chunk of keys for a tile of queries
    tile_queries: int = 256  # most queries of a tile
    scores_bytes: int = 64 << 20  # most bytes of a tile's scores in float32


SIZES = TurnSizes()


def paged_decode_attention(
    arrays: AttentionArrays, options: AttentionOptions = NO_OPTIONS, *, sizes: TurnSizes = SIZES
) -> jax.Array:
    """Compute attention of one query per row in plain JAX for a GPU without Triton.

    `arrays` and `options` are the arguments of the call, and `sizes` the sizes of a turn of the
    loop over the KV cache. Returns [R,N,H] of q's dtype.
    """
    return xla.paged_decode_attention(arrays, options, decode=partial(_decode, sizes=sizes))


def ragged_paged_attention(
    arrays: AttentionArrays, options: AttentionOptions = NO_OPTIONS, *, sizes: TurnSizes = SIZES
) -> jax.Array:
    """Compute causal attention of rows of any length in plain JAX for a GPU without Triton.

    `arrays` and `options` are the arguments of the call, and `sizes` the sizes of a turn of the
    loops over the KV cache. Returns [T,N,H] of q's dtype.
    """
    q, k_pages = arrays.q, arrays.k_pages
    positions = arrays.page_table.shape[1] * k_pages.shape[2]
    chunk = min(sizes.tile_chunk_tokens, positions)
    queries = sizes.scores_bytes // (4 * q.shape[1] * chunk)
    is_narrow = q.dtype == k_pages.dtype and q.dtype.itemsize == 2
    tile_sizes = xla.TileSizes(
        queries=max(2, min(queries, sizes.tile_queries)),
        chunk_tokens=chunk,
        one_chunk=positions <= chunk,
        dtype=q.dtype if is_narrow else None,
    )
    return xla.ragged_paged_attention(
        arrays,
        options,
        decode=partial(_decode, sizes=sizes),
        tiles=partial(xla.attend_tiles, sizes=tile_sizes),
    )


def _decode(arrays: AttentionArrays, options: AttentionOptions, sizes: TurnSizes) -> jax.Array:
    """Compute attention of one query per row over the KV cache, as an `xla.Attend`: [R,K,G,H].

    Rows without positions are zero.
    """
    q, kv_len = arrays.q, arrays.kv_len
    R, K, G, H = q.shape
    pages = max(1, sizes.chunk_tokens // arrays.k_pages.shape[2])
    cache = xla.page_rows(arrays, pages, options)
    chunk = pages * cache.shape[1]
    most = R * (cache.page_table.shape[1] // pages)
    W = min(most, max(1, sizes.turn_tokens // chunk))
    items = xla.list_items(cache, kv_len, options.window, pages, W)
    q = q * options.score_scale(H)

    def body(turn: jax.Array | int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        owner, page, first, stop = (lax.dynamic_slice_in_dim(x, turn * W, W) for x in items[:4])
        k, v = xla.gather_chunks(cache, page, q.dtype)
        cell = jnp.arange(chunk)
        seen = cell < stop[:, None]
        if options.window is not None:
            seen &= cell >= first[:, None]
        parts = _attend_chunks(q[jnp.minimum(owner, R - 1)], k, v, seen, options)
        return _merge(carry, parts, owner)

    top, total = xla.empty_softmax((R, K, G), options.sinks, q.dtype)
    carry = (jnp.zeros_like(q), total, top)
    if most <= W:
        carry = body(0, carry)
    else:
        carry = lax.fori_loop(0, (items.count + W - 1) // W, body, carry)
    acc, total, _ = carry
    out = acc / jnp.where(total == 0, 1, total)[..., None]
    return jnp.where((kv_len > 0)[:, None, None, None], out, 0)


def _attend_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, options: AttentionOptions
) -> tuple[jax.Array, jax.Array, jax.Array]:
    # The scaled queries [W, K, G, H] of each item attend to its own chunk of keys and values
    # [W, K, C, H]. The results are the weighted sum of values [W, K, G, H], the sum of the weights
    # and the maximum [W, K, G].
    # The heads that share keys come last, so that neighbouring thread blocks read the same keys.
    scores = (k[:, :, :, None] * q[:, :, None]).sum(axis=-1).transpose(0, 1, 3, 2)
    seen = seen[:, None, None]  # [W, 1, 1, C]
    scores = jnp.where(seen, xla.capped(scores, options.soft_cap), xla.LOWEST)
    peak = scores.max(axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0)
    part = (weights[..., None] * jnp.where(seen[..., None], v[:, :, None], 0)).sum(axis=3)
    return part, weights.sum(axis=-1), peak


def _merge(
    carry: tuple[jax.Array, ...], parts: tuple[jax.Array, ...], owner: jax.Array
) -> tuple[jax.Array, ...]:
    """Add the attention of W chunks of KV to the sums, totals and maxima of their R rows.

    A one-hot product sums the chunks of each row, because a scatter adds in any order. Zero times
    NaN is NaN there, so a chunk that is not finite enters as zeros. It makes its own row NaN
    through the maximum, which is selected and not multiplied.

    Args:
        carry: weighted sums of values [R,K,G,H], sums of weights and greatest scores [R,K,G].
        parts: the same of each chunk, with W instead of R.
        owner: i32[W], the row of each chunk.

    Returns:
        The new `carry`.
    """
    acc, total, top = carry
    part, weight, peak = parts
    R = acc.shape[0]
    peak = jnp.where(jnp.isfinite(part.sum(axis=-1)), peak, jnp.nan)
    mine = owner[None, :] == jnp.arange(R)[:, None]  # [R, W]
    peaks = jnp.where(mine[:, :, None, None], peak[None], xla.LOWEST).max(axis=1)
    new_top = jnp.maximum(top, peaks)
    shrink, grow = jnp.exp(top - new_top), jnp.exp(peak - new_top[jnp.minimum(owner, R - 1)])
    is_finite = jnp.isfinite(grow)
    part = jnp.where(is_finite[..., None], part * grow[..., None], 0)
    weight = jnp.where(is_finite, weight * grow, 0)
    if R == 1:  # with a product, XLA would change the layout of the parts and of the values
        summed, weights = part.sum(axis=0)[None], weight.sum(axis=0)[None]
    else:
        share, exact = mine.astype(acc.dtype), lax.Precision.HIGHEST
        summed = jnp.einsum("rw,wkgh->rkgh", share, part, precision=exact)
        weights = jnp.einsum("rw,wkg->rkg", share, weight, precision=exact)
    return acc * shrink[..., None] + summed, total * shrink + weights, new_top
