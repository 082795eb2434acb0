"""Attention over the paged KV cache on CPU: calls of the kernels of `decode.py` and `ragged.py`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import NO_OPTIONS, AttentionArrays, AttentionOptions
from pallas_kernels.cpu.arithmetic import LOG2_E
from pallas_kernels.cpu.decode import PagedDecode
from pallas_kernels.cpu.ffi import registered
from pallas_kernels.cpu.paged import PagedKernel
from pallas_kernels.cpu.ragged import PagedTiles
from pallas_kernels.xla import finished

ENDLESS = 2**31 - 1


def attend(
    kind: type[PagedKernel],
    arrays: AttentionArrays,
    options: AttentionOptions,
    others: jax.Array | None = None,
) -> jax.Array:
    """Compute attention over the paged KV cache with a CPU kernel.

    Args:
        kind: the kernel class, `PagedDecode` (rows of one query) or `PagedTiles` (longer rows).
        arrays: arguments of the call. q is [T,K,G,H], or [R,K,G,H] for decodes without longer rows.
        options: options of the call.
        others: for decodes among longer rows: the results of the longer rows, which are
            overwritten at the decodes. Otherwise None.

    Returns:
        The attention, of the shape and dtype of q.
    """
    q, *kv_pages, page_table, query_start, kv_len = arrays
    rows = [page_table, kv_len] if kind is PagedDecode else [page_table, query_start, kv_len]
    among = [] if others is None else [query_start, others]
    _, K, G, H = q.shape
    scale, window, cap = options.score_scale(H), options.window, options.soft_cap
    page_size, exact = kv_pages[0].shape[2], jnp.promote_types(q.dtype, jnp.float32)
    form = exact.name, kv_pages[0].dtype.name, page_size, G, H, cap is not None, q.dtype.name
    kernel: Any = kind(*form, *([True] if among else []))
    scales = (options.k_scale, options.v_scale) if kernel.is_scaled else ()
    sinks = jnp.full(K * G, -jnp.inf) if options.sinks is None else options.sinks
    # The kernel computes powers of 2, so log2(e) is part of the factor.
    factor = scale * LOG2_E if cap is None else scale / cap
    operands = [
        q,
        *kv_pages,
        *rows,
        sinks.astype(exact) * LOG2_E,
        np.array([ENDLESS if window is None else min(window, ENDLESS)], np.int32),
        np.array([factor, 0.0 if cap is None else cap * LOG2_E], exact),
        *scales,
        *among,
    ]
    return jax.ffi.ffi_call(
        registered(kernel),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={len(operands) - 1: 0} if among else {},
        vmap_method="sequential",
    )(*operands)


def _grouped(arrays: AttentionArrays, k_scale: jax.Array | None) -> AttentionArrays:
    q, exact = arrays.q, jnp.promote_types(arrays.q.dtype, jnp.float32)
    q = q.reshape(len(q), arrays.k_pages.shape[1], -1, q.shape[-1])
    if k_scale is not None and k_scale.ndim == 1:
        q = q.astype(exact) * k_scale[:, None, None].astype(exact)
    elif q.dtype == jnp.float16:
        q = q.astype(exact)
    return arrays._replace(q=q)


def paged_decode_attention(
    arrays: AttentionArrays, options: AttentionOptions = NO_OPTIONS
) -> jax.Array:
    """Compute attention of one query per row over the paged KV cache on CPU: [R,N,H]."""
    out = attend(PagedDecode, _grouped(arrays, options.k_scale), options)
    return finished(out, arrays.q, options.v_scale)


def ragged_paged_attention(
    arrays: AttentionArrays, options: AttentionOptions = NO_OPTIONS
) -> jax.Array:
    """Compute causal attention of rows of any length over the paged KV cache on CPU.

    Rows of one query are computed after the longer rows and written between their results. So in a
    step of prompt chunks and decodes each kind costs the same as alone. Returns [T,N,H] of q's
    dtype, zero for padding tokens.
    """
    by_head = _grouped(arrays, options.k_scale)
    out = attend(PagedDecode, by_head, options, attend(PagedTiles, by_head, options))
    return finished(out, arrays.q, options.v_scale)
