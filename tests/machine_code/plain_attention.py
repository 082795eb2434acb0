"""Attention over paged keys and values in numpy, in float64, row by row.

It is `pallas_kernels.reference` without a compiler, which takes a second for each new shape; a test
compares the two.
"""

from __future__ import annotations

import itertools

import numpy as np


def attention(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    page_table: np.ndarray,
    query_start: np.ndarray,
    kv_len: np.ndarray,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
) -> np.ndarray:
    """Compute ``pallas_kernels.ragged_paged_attention``: [T,N,H]."""
    out = np.zeros(q.shape)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for row, (first, end) in enumerate(itertools.pairwise(query_start)):
        length = int(kv_len[row])
        positions = np.arange(length - (end - first), length)
        if length == 0 or not len(positions):
            continue  # padding, or a row without queries in this step
        begin = 0 if window is None else max(0, positions[0] - window + 1)
        seen = np.arange(begin, length)
        keys = gathered(k_pages, page_table[row], seen, k_scale)
        values = gathered(v_pages, page_table[row], seen, v_scale)
        visible = seen <= positions[:, None]
        if window is not None:
            visible &= seen > positions[:, None] - window
        queries = q[first:end].astype(np.float64) * scale
        out[first:end] = attend(queries, keys, values, visible, soft_cap, sinks)
    return out


def gathered(
    pages: np.ndarray, table: np.ndarray, positions: np.ndarray, scale: np.ndarray | None
) -> np.ndarray:
    """Return what a row's pages hold at its positions: [positions, K, H]."""
    size = pages.shape[2]
    cells = pages[table[positions // size], :, positions % size].astype(np.float64)
    return cells if scale is None else cells * scale.astype(np.float64)[:, None]


def attend(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    visible: np.ndarray,
    soft_cap: float | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Compute the attention of scaled queries [Q,N,H] to the positions that each sees."""
    num_queries, heads, size = queries.shape
    grouped = queries.reshape(num_queries, keys.shape[1], -1, size)
    scores = np.einsum("qkgh,ckh->qkgc", grouped, keys)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(visible[:, None, None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(np.float64).reshape(keys.shape[1], -1, 1)
        top = np.maximum(top, sink)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sink - top)
    return np.einsum("qkgc,ckh->qkgh", weights / total, values).reshape(num_queries, heads, size)
