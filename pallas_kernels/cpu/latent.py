"""Causal attention over pages of latents, on CPU: tiles of heads and queries, blocks of cells.

The products are as in `ragged.py`. All heads of a token read the same cells, so a tile has the
queries of many heads, and a decode reads each cell once. A block of cells is gathered once, for the
keys and the values. Decodes and prompts have the same form, and every sum runs over the tokens in
blocks that are counted from position 0. So a result is the same to the bit for any other rows and
wherever a prompt was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import AttentionArrays
from pallas_kernels.cpu.arithmetic import LOG2_E
from pallas_kernels.cpu.attention import ENDLESS
from pallas_kernels.cpu.ffi import NAMES, registered
from pallas_kernels.cpu.handler import Field
from pallas_kernels.cpu.ir_builder import I32, LINE, Code, const, element_bytes
from pallas_kernels.cpu.paged import BLOCK
from pallas_kernels.cpu.ragged import PagedTile, PagedTiles
from pallas_kernels.latent_arguments import LatentOptions

MOST_HEADS = 64  # heads of a tile
NEAR = 2  # the cache that the next block is prefetched to


@dataclass(frozen=True)
class LatentTiles(PagedTiles):
    """CPU kernel (generator of LLVM IR) for attention of rows over pages of latents, in tiles.

    Its operands are as in `PagedTiles`. Keys and values are the same pages, of one kv head, and
    the heads of the queries [T, tiles, group, head_dim] are divided into tiles of `group` heads.
    """

    rank: int = 0  # numbers of a value, the first ones of a cell

    prefix = f"{NAMES}latent_"
    fewest = 1
    rows_at_once = 4  # divides most numbers of heads

    @property
    def name(self) -> str:
        return f"{super().name}_{self.rank}"

    @property
    def value_size(self) -> int:
        return self.rank

    @property
    def fields(self) -> Sequence[Field]:
        # Operands and results, then R, M, P, the tiles of heads, and T.
        *others, _, tokens = super().fields
        return (*others, Field(0, 1), tokens)

    def tile(self) -> PagedTile:
        return _LatentTile(self)


class _LatentTile(PagedTile):
    """Generator of the LLVM function that computes attention of queries of one tile of heads."""

    shared = True

    def _ahead(self, code: Code, block: Any, m: Any) -> None:
        """Emit prefetches of a share of the next block of cells, between two products.

        There is a share for each product of the tile. `block` is the position of the first token,
        and `m` the first row of the next product.
        """
        shares = code.sdiv(code.add(self.count, const(self.at_once - 1)), const(self.at_once))
        share = code.sdiv(m, const(self.at_once))
        begin = code.add(block, const(BLOCK))
        end = code.smaller_int(code.add(begin, const(BLOCK)), self.stop)
        after = code.sdiv(code.add(end, const(self.S - 1)), const(self.S))
        line = LINE // element_bytes(self.stored)
        lines = const(-(-self.S * self.H // line))
        low = code.mul(code.sdiv(code.mul(lines, share), shares), const(line))
        high = code.sdiv(code.mul(lines, code.add(share, const(1))), shares)
        high = code.mul(high, const(line))
        with code.loop(code.sdiv(begin, const(self.S)), after) as (column, _):
            page = self.page(code, self.k, code.at(self.table, column, I32))
            with code.loop(low, high, line) as (place, _):
                code.prefetch(code.at(page, place, self.stored), NEAR)


def heads_of_tile(heads: int, rows: int, tokens: int) -> int:
    """Return how many heads form a tile, a divisor of `heads`, at most MOST_HEADS.

    A single decode is divided into two tiles at least, for two threads.
    """
    most = heads // 2 if rows == tokens == 1 and heads > 1 else MOST_HEADS
    return next(size for size in range(min(heads, most), 0, -1) if heads % size == 0)


def latent_attention(arrays: AttentionArrays, options: LatentOptions, one_query: bool) -> jax.Array:
    """Compute causal attention over pages of latents on CPU: [T,N,rank] of q's dtype.

    Args:
        arrays: arrays of the call, from `as_attention`.
        options: options of the call.
        one_query: ignored, because decodes and prompts have the same form.
    """
    q, pages, _, page_table, query_start, kv_len = arrays
    T, N, C = q.shape
    exact, scale = jnp.promote_types(q.dtype, jnp.float32), options.cache_scale
    group = heads_of_tile(N, len(kv_len), T)
    factor = None if scale is None or scale.ndim > 1 else scale.astype(exact)
    if factor is not None:
        q = q.astype(exact) * factor
    elif q.dtype == jnp.float16:
        q = q.astype(exact)
    form = exact.name, pages.dtype.name, pages.shape[2], group, C, False, q.dtype.name
    kernel = LatentTiles(*form, rank=options.rank)
    out = jax.ffi.ffi_call(
        registered(kernel),
        jax.ShapeDtypeStruct((T, N // group, group, options.rank), q.dtype),
        vmap_method="sequential",
    )(
        q.reshape(T, N // group, group, C),
        pages,
        pages,
        page_table,
        query_start,
        kv_len,
        np.full(N, -np.inf, exact),
        np.array([ENDLESS], np.int32),
        np.array([options.scale * LOG2_E, 0.0], exact),
        *([scale, scale] if kernel.is_scaled else []),
    )
    out = out.reshape(T, N, options.rank)
    return (out if factor is None else out * factor).astype(arrays.q.dtype)
