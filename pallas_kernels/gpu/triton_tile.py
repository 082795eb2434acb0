"""Attention of one tile of queries of one row to its pages, shared by both Triton kernels.

It is an online softmax over blocks of keys (FlashAttention-2, Dao 2023) that are read through a
page table (PagedAttention, Kwon et al. 2023). Blocks that every query of the tile sees completely
need no masks. In the other blocks (causal edge, window edge, end of the row) scores are masked, and
values too, because zero times a NaN in another row's page is NaN.

A head dim that is not a power of two is split into powers of two (80 = 64 + 16) instead of padded.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import fp8_bits
from pallas_kernels.arguments import FP8, AttentionOptions, Case

LOG2E = math.log2(math.e)
NEGATIVE = -1e30
"""Initial maximum: below every score, and finite so that differences of maxima are finite."""

Parts = tuple[jax.Array, ...]
Softmax = tuple[Parts, jax.Array, jax.Array]
"""Unnormalized attention of a tile: acc parts [rows, part], maxima and sums [rows]."""


def head_parts(head_dim: int) -> tuple[tuple[int, int], ...]:
    """Split a head dim into (start, size) pieces whose sizes are powers of two, largest first."""
    pieces, start = [], 0
    while start < head_dim:
        size = 1 << ((head_dim - start).bit_length() - 1)
        pieces.append((start, size))
        start += size
    return tuple(pieces)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def ceil_div(a: jax.Array | int, b: jax.Array | int) -> jax.Array:
    """Return the ceiling of a / b for non-negative int32 numbers, as int32."""
    a = jnp.asarray(a, jnp.int32)
    return lax.div(a + (b - 1), jnp.int32(b) if isinstance(b, int) else b)


def spread(numbers: jax.Array, shape: tuple[int, ...], *axes: int) -> jax.Array:
    """Broadcast an array to `shape`. Its dimensions become the dimensions `axes` of the result."""
    # After adding axes, `jnp.broadcast_to` takes several times as many operations to trace.
    return lax.broadcast_in_dim(numbers, shape, axes)


def running_sum(counts: jax.Array) -> jax.Array:
    """Return the inclusive cumulative sums of a short i32 vector, in one reduction."""
    n = counts.shape[0]
    earlier = jnp.arange(n)[None, :] <= jnp.arange(n)[:, None]
    return jnp.where(earlier, counts[None, :], 0).sum(axis=1, dtype=jnp.int32)


def owner(ends: jax.Array, items: int) -> jax.Array:
    """Return i32[items]: for each number 0, 1, ..., the first row whose end is greater."""
    passed = ends[None, :] <= jnp.arange(items, dtype=jnp.int32)[:, None]
    return passed.sum(axis=1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class TileSpec:
    """Compile-time sizes and options of a tile of queries of the Triton attention kernels."""

    tile_rows: int  # query rows (tokens x heads of a group) of the tile
    block_tokens: int  # KV positions per loop step
    page_size: int  # positions of a page
    head_dim: int  # numbers of a head
    scale: float  # as in ``AttentionOptions``
    window: int | None
    soft_cap: float | None
    compute_dtype: Any  # dtype of the operands of products
    # whether float8 pages are converted by integer operations, because the card has no instruction
    # for it
    fp8_by_integers: bool

    @classmethod
    def of(
        cls, case: Case, tile_rows: int, block_tokens: int, options: AttentionOptions
    ) -> TileSpec:
        """Return the `TileSpec` of an attention call with tiles of `tile_rows` query rows."""
        compute = case.query_dtype
        # Hopper converts two float8 values to float16 with one instruction, and to bfloat16 with
        # several.
        if case.page_dtype == FP8 and compute.itemsize == 2:
            compute = jnp.dtype(jnp.float16)
        return cls(
            tile_rows=tile_rows,
            block_tokens=block_tokens,
            page_size=case.S,
            head_dim=case.H,
            scale=float(options.score_scale(case.H)),
            window=options.window,
            soft_cap=None if options.soft_cap is None else float(options.soft_cap),
            compute_dtype=compute,
            fp8_by_integers=case.page_dtype == FP8 and not case.device.widens_fp8,
        )

    def widen(self, x: jax.Array) -> jax.Array:
        """Convert keys or values of a page to the dtype of the products, and return them."""
        if not self.fp8_by_integers:
            return x.astype(self.compute_dtype)
        return fp8_bits.widen(lax.bitcast_convert_type(x, jnp.uint8), self.compute_dtype)


@dataclasses.dataclass(frozen=True)
class Span:
    """Positions and blocks of keys that a tile of queries reads, as traced int32 scalars."""

    begin: jax.Array  # the positions [begin, end) that at least one query of the tile sees
    end: jax.Array
    full_begin: jax.Array  # the positions that every query of the tile sees
    full_end: jax.Array
    first_block: jax.Array  # the blocks [first, last) of block_tokens positions to visit
    last_block: jax.Array


def tile_bounds(
    first_position: jax.Array, last_position: jax.Array, window: int | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the bounds (begin, end, full_begin, full_end) of positions that a query tile sees.

    At least one query sees positions [begin, end), and every query [full_begin, full_end).
    """
    zero = jnp.int32(0)
    end = jnp.maximum(last_position + 1, zero)
    full_end = jnp.maximum(first_position + 1, zero)
    if window is None:
        return zero, end, zero, full_end
    begin = jnp.maximum(first_position - (window - 1), zero)
    full_begin = jnp.maximum(last_position - (window - 1), zero)
    return begin, end, full_begin, full_end


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    # The default precision of float32 on the GPU is TF32, which is not float32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, precision=precision)


def load_queries(
    q_ref: Any, token: jax.Array, head: jax.Array, valid: jax.Array, spec: TileSpec
) -> Parts:
    """Load the queries of a tile, zero in rows that are not `valid`: parts [tile_rows, part]."""
    parts = []
    for start, size in head_parts(spec.head_dim):
        shape = (spec.tile_rows, size)
        column = spread(start + jnp.arange(size), shape, 1)
        address = q_ref.at[spread(token, shape, 0), spread(head, shape, 0), column]
        loaded = plt.load(address, mask=spread(valid, shape, 0), other=0.0)
        parts.append(loaded.astype(spec.compute_dtype))
    return tuple(parts)


def store_rows(
    out_ref: Any, token: jax.Array, head: jax.Array, valid: jax.Array, parts: Parts, spec: TileSpec
) -> None:
    """Write the valid rows of a tile's attention `parts` to out_ref[token, head, :]."""
    for (start, _), part in zip(head_parts(spec.head_dim), parts, strict=True):
        shape = part.shape
        column = spread(start + jnp.arange(shape[1]), shape, 1)
        address = out_ref.at[spread(token, shape, 0), spread(head, shape, 0), column]
        mask = spread(valid, shape, 0)
        plt.store(address, part.astype(out_ref.dtype), mask=mask)


def normalized(
    refs: dict[str, Any], softmax: Softmax, kv_head: jax.Array, head: jax.Array, valid: jax.Array
) -> Parts:
    """Return a tile's attention: `softmax` with sinks added, divided by its sum, times v_scale."""
    acc, top, total = softmax
    if "sinks" in refs:
        sink = plt.load(refs["sinks"].at[head], mask=valid, other=0.0) * LOG2E
        new_top = jnp.maximum(top, sink)
        shrink = jnp.exp2(top - new_top)
        acc = tuple(part * spread(shrink, part.shape, 0) for part in acc)
        total = total * shrink + jnp.exp2(sink - new_top)
    inverse = 1.0 / jnp.where(total == 0, 1.0, total)
    if "v_scale" in refs:
        inverse = inverse * refs["v_scale"][kv_head]
    return tuple(part * spread(inverse, part.shape, 0) for part in acc)


@dataclasses.dataclass(frozen=True)
class RowPages:
    """KV cache pages that the queries of a tile read: a row of the page table and a kv head."""

    keys: Any  # refs of the pages [P,K,S,H]
    values: Any
    table: Any  # ref of the page table i32[R,M]
    row: jax.Array  # row of the page table
    kv_head: jax.Array  # head of the pages
    key_scale: jax.Array | None  # f32 scalar that multiplies stored keys, or None

    @classmethod
    def of(cls, refs: dict[str, Any], row: jax.Array, kv_head: jax.Array) -> RowPages:
        """Return the `RowPages` of a row and kv head, from the refs of a kernel by name."""
        scale = refs["k_scale"][kv_head] if "k_scale" in refs else None
        return cls(refs["k"], refs["v"], refs["table"], row, kv_head, scale)


def attend(
    queries: Parts, position: jax.Array, pages: RowPages, span: Span, spec: TileSpec
) -> Softmax:
    """Compute the unnormalized attention of a tile of queries over the blocks of its span.

    Args:
        queries: parts [tile_rows, part] of q, one for each piece of ``head_parts``.
        position: i32[tile_rows] positions of the queries.

    Returns:
        (acc parts [tile_rows, part], maxima [tile_rows], sums [tile_rows]), all float32. The maxima
        are in units of log2, and the attention is acc / sums.
    """
    block, page_size = spec.block_tokens, spec.page_size
    shift = page_size.bit_length() - 1
    pieces = head_parts(spec.head_dim)
    factor = spec.scale * (1.0 if spec.soft_cap else LOG2E)
    factor = factor if pages.key_scale is None else factor * pages.key_scale

    def loader(i: jax.Array, masked: bool):
        """Return a function (ref, start, size) that loads columns of KV block i: [block, size]."""
        if block <= page_size:
            page = pages.table[pages.row, lax.shift_right_logical(i * block, shift)]
            inside = pl.ds(lax.bitwise_and(i * block, page_size - 1), block)
        else:
            key_position = i * block + jnp.arange(block)
            if masked:  # page ids after the row's last page may be invalid
                key_position = jnp.minimum(key_position, span.end - 1)
            page = pages.table[pages.row, lax.shift_right_logical(key_position, shift)]
            inside = lax.bitwise_and(key_position, page_size - 1)
        return lambda ref, start, size: ref[page, pages.kv_head, inside, pl.ds(start, size)]

    def step(i: jax.Array, carry: tuple, masked: bool) -> tuple:
        """Return acc, maxima and sums of the softmax after block i. `masked` hides unseen keys."""
        acc, top, total = carry
        load = loader(i, masked)
        key_position = i * block + jnp.arange(block)
        scores: Any = sum(
            _dot(query, spec.widen(load(pages.keys, *piece)).T)
            for query, piece in zip(queries, pieces, strict=True)
        )
        scores = scores * factor
        if spec.soft_cap is not None:
            # tanh(x) = 1 - 2 / (1 + e^2x), which is cheap and saturates cleanly at both ends.
            grown = jnp.exp2(scores * (2 * LOG2E / spec.soft_cap))
            scores = (spec.soft_cap * LOG2E) * (1.0 - 2.0 / (1.0 + grown))
        if masked:
            key, query = spread(key_position, scores.shape, 1), spread(position, scores.shape, 0)
            visible = key <= query
            if spec.window is not None:
                visible &= key > query - spec.window
            scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - spread(new_top, scores.shape, 0))
        total = total * shrink + weights.sum(axis=1)
        weights = weights.astype(spec.compute_dtype)
        new_acc = []
        for part, piece in zip(acc, pieces, strict=True):
            values = spec.widen(load(pages.values, *piece))
            if masked:
                is_inside = (key_position >= span.begin) & (key_position < span.end)
                is_inside = spread(is_inside, values.shape, 0)
                values = jnp.where(is_inside, values, jnp.zeros_like(values))
            new_acc.append(part * spread(shrink, part.shape, 0) + _dot(weights, values))
        return tuple(new_acc), new_top, total

    full_first = jnp.clip(ceil_div(span.full_begin, block), span.first_block, span.last_block)
    full_last = jnp.clip(lax.div(span.full_end, jnp.int32(block)), full_first, span.last_block)
    before = full_first - span.first_block
    edges = before + span.last_block - full_last

    # The full blocks come first, then the blocks before and after them, which need masks.
    def edge(j: jax.Array, carry: tuple) -> tuple:
        i = jnp.where(j < before, span.first_block + j, full_last + j - before)
        return step(i, carry, masked=True)

    rows = spec.tile_rows
    carry = (
        tuple(jnp.zeros((rows, size), jnp.float32) for _, size in pieces),
        jnp.full((rows,), NEGATIVE, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    carry = lax.fori_loop(full_first, full_last, lambda i, c: step(i, c, masked=False), carry)
    return lax.fori_loop(jnp.int32(0), edges, edge, carry)
