"""The derivatives of attention over whole rows, in blocks (FlashAttention-2, Dao 2023).

Scores are computed again for a block of queries and a block of keys at a time, so memory grows
linearly with the length of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import AttentionArrays, AttentionOptions
from pallas_kernels.gradients import varying_as

BLOCK = 128  # most queries of a block, and most keys
LOWEST = -1e30


class AttentionGradient(NamedTuple):
    """Derivatives by the operands of an attention call. `sinks` is None without sinks."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    sinks: jax.Array | None


class _RowArrays(NamedTuple):
    """The operands of a row, with K kv heads, G query heads for each, and head dim H.

    Attributes:
        q, g: [K,G,L,H] queries, times the scale, and derivatives by the result.
        out: [K,G,L,H] the result.
        k, v: [K,C,H] keys and values.
        length: i32[] tokens of the row.
    """

    q: jax.Array
    g: jax.Array
    out: jax.Array
    k: jax.Array
    v: jax.Array
    length: jax.Array


def attention_gradient(
    arrays: AttentionArrays, options: AttentionOptions, out: jax.Array, g: jax.Array
) -> AttentionGradient:
    """Return the derivatives of ``ragged_paged_attention`` over whole rows.

    The queries of a row must be at all of its positions, from 0 on. No two rows share a page.

    Args:
        arrays: arguments of the call.
        options: of the call, without scales of pages.
        out: [T,N,H] its result.
        g: [T,N,H] derivatives by the result.
    """
    q, k_pages, v_pages, table, _, _ = arrays
    exact = jnp.promote_types(q.dtype, jnp.float32)
    T, K = q.shape[0], k_pages.shape[1]
    most = min(T, table.shape[1] * k_pages.shape[2])  # tokens of a row
    block = min(BLOCK, most)
    length = -(-most // block) * block
    scale = options.score_scale(q.shape[2])
    queries = [_by_head(array.astype(exact), K, length) for array in (q, g, out)]

    def body(row: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dq, dk_pages, dv_pages, dsinks = carry
        start = arrays.starts[row]
        zero = jnp.zeros_like(start)
        own_q, own_g, own_out = (
            lax.dynamic_slice_in_dim(array, start, length, 2) for array in queries
        )
        k, v = (_of_row(pages, table[row], length, exact) for pages in (k_pages, v_pages))
        one = _RowArrays(own_q * scale, own_g, own_out, k, v, arrays.kv_len[row])
        own_dq, dk, dv, own_sinks = _row_gradient(one, options, block)
        # Tokens past the end of the row are zeros, and the next row overwrites them.
        dq = lax.dynamic_update_slice(dq, own_dq * scale, (zero, zero, start, zero))
        dk_pages = _added(dk_pages, dk, table[row])
        return dq, dk_pages, _added(dv_pages, dv, table[row]), dsinks + own_sinks

    start = (
        jnp.zeros_like(queries[0]),
        jnp.zeros(k_pages.shape, exact),
        jnp.zeros(v_pages.shape, exact),
        jnp.zeros(queries[0].shape[:2], exact),
    )
    start = tuple(varying_as(zeros, arrays, out, g, options.sinks) for zeros in start)
    dq, dk_pages, dv_pages, dsinks = lax.fori_loop(0, table.shape[0], body, start)
    dq = dq[:, :, :T].transpose(2, 0, 1, 3).reshape(q.shape).astype(q.dtype)
    sinks = options.sinks
    sinks = None if sinks is None else dsinks.reshape(sinks.shape).astype(sinks.dtype)
    pages = dk_pages.astype(k_pages.dtype), dv_pages.astype(v_pages.dtype)
    return AttentionGradient(dq, *pages, sinks)


def _row_gradient(
    row: _RowArrays, options: AttentionOptions, block: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the derivatives by a row's scaled queries, its keys, its values, and the sinks.

    Their shapes are [K,G,L,H], [K,C,H] twice, and [K,G].
    """
    K, G, _, H = row.q.shape
    shape = K, G, block
    sinks = None if options.sinks is None else options.sinks.astype(row.q.dtype).reshape(K, G)
    delta = (row.g * row.out).sum(axis=-1)  # [K,G,L]

    def scores(first: jax.Array, key: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the scores of a block before the cap, [K,G,Q,C], and whether keys are seen."""
        k = lax.dynamic_slice_in_dim(row.k, key, block, 1)
        products = jnp.einsum("kqh,kch->kqc", q.reshape(K, G * block, H), k)
        query, position = first + jnp.arange(block)[:, None], key + jnp.arange(block)
        seen = (position <= query) & (query < row.length)
        if options.window is not None:
            seen &= position > query - options.window
        return products.reshape(*shape, block), seen

    def capped(raw: jax.Array) -> jax.Array:
        cap = options.soft_cap
        return raw if cap is None else cap * jnp.tanh(raw / cap)

    def queries_body(nth: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dq, dk, dv, dsinks = carry
        first = nth * block
        q, g = (lax.dynamic_slice_in_dim(array, first, block, 2) for array in (row.q, row.g))
        own_delta = lax.dynamic_slice_in_dim(delta, first, block, 2)
        oldest = 0 if options.window is None else jnp.maximum(first - options.window + 1, 0)
        bounds = jnp.asarray(oldest // block, first.dtype), nth + 1

        def totals_body(key: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total = carry
            raw, seen = scores(first, key * block, q)
            raw = jnp.where(seen, capped(raw), LOWEST)
            above = jnp.maximum(top, raw.max(axis=-1))
            weights = jnp.where(seen, jnp.exp(raw - above[..., None]), 0)
            return above, total * jnp.exp(top - above) + weights.sum(axis=-1)

        top, total = jnp.full(shape, LOWEST, q.dtype), jnp.zeros(shape, q.dtype)
        if sinks is not None:
            top, total = jnp.broadcast_to(sinks[..., None], shape), jnp.ones(shape, q.dtype)
        top, total = varying_as(top, q, row.k), varying_as(total, q, row.k, sinks)
        top, total = lax.fori_loop(*bounds, totals_body, (top, total))
        sum_log = top + jnp.log(jnp.where(total == 0, 1, total))
        if sinks is not None:
            real = first + jnp.arange(block) < row.length
            shares = jnp.where(real, jnp.exp(sinks[..., None] - sum_log), 0)
            dsinks -= (shares * own_delta).sum(axis=-1)
        flat = q.reshape(K, G * block, H), g.reshape(K, G * block, H)

        def keys_body(key: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, dk, dv = carry
            raw, seen = scores(first, key * block, q)
            score = capped(raw)
            weights = jnp.where(seen, jnp.exp(score - sum_log[..., None]), 0)
            k, v = (lax.dynamic_slice_in_dim(x, key * block, block, 1) for x in (row.k, row.v))
            by_weight = jnp.einsum("kqh,kch->kqc", flat[1], v).reshape(*shape, block)
            change = weights * (by_weight - own_delta[..., None])
            if options.soft_cap is not None:
                change = change * (1 - jnp.square(score / options.soft_cap))
            mixed, change = (x.reshape(K, G * block, block) for x in (weights, change))
            dq = dq + jnp.einsum("kqc,kch->kqh", change, k)
            dk = _added_at(dk, jnp.einsum("kqc,kqh->kch", change, flat[0]), key * block)
            return dq, dk, _added_at(dv, jnp.einsum("kqc,kqh->kch", mixed, flat[1]), key * block)

        none = varying_as(jnp.zeros_like(flat[0]), dq)
        own_dq, dk, dv = lax.fori_loop(*bounds, keys_body, (none, dk, dv))
        dq = lax.dynamic_update_slice_in_dim(dq, own_dq.reshape(q.shape), first, 2)
        return dq, dk, dv, dsinks

    start = (
        jnp.zeros_like(row.q),
        jnp.zeros_like(row.k),
        jnp.zeros_like(row.v),
        jnp.zeros((K, G), row.q.dtype),
    )
    start = tuple(varying_as(zeros, row, sinks) for zeros in start)
    return lax.fori_loop(0, -(-row.length // block), queries_body, start)


def _by_head(array: jax.Array, kv_heads: int, beyond: int) -> jax.Array:
    """Return an array [T,N,H] as [K,G,T + beyond,H], with zeros after its tokens."""
    tokens, heads, size = array.shape
    grouped = array.reshape(tokens, kv_heads, heads // kv_heads, size).transpose(1, 2, 0, 3)
    return jnp.pad(grouped, ((0, 0), (0, 0), (0, beyond), (0, 0)))


def _of_row(pages: jax.Array, own: jax.Array, length: int, dtype: jnp.dtype) -> jax.Array:
    """Return the keys or values of a row's pages `own`, [K,C,H], in the order of positions."""
    _, K, _, H = pages.shape
    rows = pages.at[own].get(mode="clip").transpose(1, 0, 2, 3).reshape(K, -1, H)
    rows = rows[:, :length].astype(dtype)
    return jnp.pad(rows, ((0, 0), (0, length - rows.shape[1]), (0, 0)))


def _added(pages: jax.Array, change: jax.Array, own: jax.Array) -> jax.Array:
    """Add derivatives [K,C,H] by the keys or values of a row to those by its pages `own`."""
    _, K, S, H = pages.shape
    size = len(own) * S
    change = jnp.pad(change, ((0, 0), (0, max(0, size - change.shape[1])), (0, 0)))[:, :size]
    return pages.at[own].add(change.reshape(K, -1, S, H).transpose(1, 0, 2, 3), mode="drop")


def _added_at(array: jax.Array, part: jax.Array, first: jax.Array) -> jax.Array:
    before = lax.dynamic_slice_in_dim(array, first, part.shape[1], 1)
    return lax.dynamic_update_slice_in_dim(array, before + part, first, 1)
