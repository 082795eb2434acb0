"""Division of the attention of a step over programs, computed by one small kernel.

The KV blocks that the queries of the rows see, one row after the other, are cut into equal shares,
one for each program of a kv head. So all programs have the same work, whatever the lengths of the
rows are. A share can contain many short rows and parts of two others, and a long row covers many
shares (Stream-K, Osama et al. 2023).

Every program of this kernel computes the whole plan, a few operations on one number per tile, and
writes one line of it. The plan is the same for every layer, so a step computes it once.
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

from pallas_kernels.arguments import ARRIVALS, Case
from pallas_kernels.gpu.triton_tile import ceil_div, power_of_two
from pallas_kernels.gpu.tuning import DecodeConfig

# Columns of a tile.
ROW, TOKEN, SIZE, POSITION, BLOCK, START, COUNT = range(7)
# Columns of a program: its first tile, the last tile of the program before, its first block.
FIRST, LAST, SHARE = 7, 8, 9
COLUMNS = 10


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """Division of the KV of rows of few queries over programs, independent of the rows' lengths.

    It holds the sizes that are known when the kernel is compiled. `split_lines` computes the
    shares of a step from the lengths.
    """

    rows: int  # R
    queries: int  # most queries of a tile
    tiles: int  # most tiles of a row. Rows with more queries than these tiles hold get none.
    block_tokens: int  # positions of a block
    min_blocks: int  # fewest blocks of a share
    window: int | None  # positions that a query sees, or None
    most_blocks: int  # most blocks that a tile sees
    programs: int  # programs of a kv head
    longer_than: int = -1  # another kernel computes rows of at most this many positions

    @classmethod
    def of(
        cls, case: Case, config: DecodeConfig, window: int | None, queries: int = 1, tiles: int = 1
    ) -> SplitPlan:
        """Return the `SplitPlan` of an attention call.

        The number of programs is at least 1, and limited by the streaming multiprocessors, by the
        blocks of KV, and by ARRIVALS.

        Args:
            case: shapes and device of the call.
            config: block sizes.
            window: positions that a query sees, which limits the blocks, or None.
            queries: most queries of a tile.
            tiles: most tiles of a row.
        """
        block = config.block_tokens
        most = -(-case.M * case.S // block)
        if window is not None:
            most = min(most, -(-(window + queries - 1) // block) + 1)
        programs = config.programs_per_sm * max(1, case.device.num_sms) // case.K
        programs = min(programs, case.R * tiles * most, ARRIVALS // case.K)
        return cls(case.R, queries, tiles, block, config.min_blocks, window, most, max(1, programs))

    @property
    def few(self) -> int:
        """Most queries of a row whose KV is split over programs."""
        return self.queries * self.tiles

    @property
    def count(self) -> int:
        """Number of tiles of queries of all rows, unused tiles included."""
        return self.rows * self.tiles

    def shares(self, total: jax.Array) -> jax.Array:
        """Return into how many shares the programs of a kv head divide `total` blocks of KV.

        Share s begins at block s * total / shares. The number is at most the number of programs.
        """
        return jnp.minimum(ceil_div(total, self.min_blocks), self.programs)

    @property
    def is_merged(self) -> bool:
        """Whether a tile of queries can be in several shares, whose results must be merged."""
        return self.programs > 1


def _plan_kernel(*refs: Any, plan: SplitPlan) -> None:
    """Body of the kernel: compute the plan of `split_lines` and write one line of it.

    ``refs`` are kv_len, query_start if rows can have several queries, and the lines to write.
    """
    length_ref, out_ref = refs[0], refs[-1]
    tile = jnp.arange(power_of_two(plan.count))
    exists = tile < plan.count
    row = lax.div(tile, jnp.full_like(tile, plan.tiles))
    length = plt.load(length_ref.at[row], mask=exists, other=0)
    if len(refs) == 2:
        token, size, position = row, exists.astype(jnp.int32), length - 1
    else:
        start_ref = refs[1]
        start = plt.load(start_ref.at[row], mask=exists, other=0)
        queries = plt.load(start_ref.at[row + 1], mask=exists, other=0) - start
        within = lax.rem(tile, jnp.full_like(tile, plan.tiles)) * plan.queries
        is_here = (queries <= plan.few) & (length > plan.longer_than)
        size = jnp.where(is_here, queries - within, 0)
        size = jnp.minimum(jnp.maximum(size, 0), plan.queries)
        token, position = start + within, length - queries + within
    end = jnp.where(size > 0, jnp.maximum(position + size, 0), 0)
    first = jnp.zeros_like(end)
    if plan.window is not None:
        first = jnp.maximum(position - (plan.window - 1), 0)
        first = jnp.where(end > 0, lax.div(first, jnp.full_like(first, plan.block_tokens)), 0)
    # A tile without positions takes one turn, which stores zeros.
    blocks = jnp.maximum(ceil_div(end, plan.block_tokens) - first, jnp.minimum(size, 1))
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    total = jnp.sum(blocks, dtype=jnp.int32)
    shares = plan.shares(total)
    line = pl.program_id(0)
    cut = lax.div(jnp.minimum(line, shares) * total, jnp.maximum(shares, 1))
    values = {
        name: jnp.sum(jnp.where(tile == line, numbers, 0), dtype=jnp.int32)
        for name, numbers in (
            (ROW, row),
            (TOKEN, token),
            (SIZE, size),
            (POSITION, position),
            (BLOCK, first),
            (START, ends - blocks),
            (COUNT, blocks),
        )
    }
    begun = (blocks > 0) & (ends - blocks < cut)
    values |= {
        FIRST: jnp.sum((ends <= cut).astype(jnp.int32), dtype=jnp.int32),
        LAST: jnp.max(jnp.where(begun, tile, 0)),
        SHARE: cut,
    }
    column = jnp.arange(power_of_two(COLUMNS))
    numbers = jnp.zeros_like(column)
    for name, value in values.items():
        numbers = jnp.where(column == name, value, numbers)
    lines = jnp.broadcast_to(line, column.shape)
    plt.store(out_ref.at[lines, column], numbers, mask=column < COLUMNS)


def split_lines(
    plan: SplitPlan, kv_len: jax.Array, query_start: jax.Array | None, *, interpret: bool
) -> jax.Array:
    """Divide the KV blocks of rows of few queries over programs.

    A tile is the queries of a row, or `plan.queries` of them. Blocks are numbered over all tiles.

    Args:
        plan: sizes of tiles and blocks.
        kv_len: i32[R] positions of each row.
        query_start: i32[R+1] as in ``ragged_paged_attention``. None if row r has only query r.
        interpret: run the kernel as plain JAX on any device.

    Returns:
        i32[max(tiles, programs + 1), 10]. The first seven columns of line t describe tile t: its
        row, its first token, its number of queries (0 if unused), the position of its first query,
        the first block that its queries see, the number of blocks of earlier tiles, and its number
        of blocks. The last three columns of line p describe program p: its first tile, the last
        tile of the program before, and its first block. Line ``programs`` has the end of all
        blocks.
    """
    operands = [kv_len] if query_start is None else [kv_len, query_start]
    lines = max(plan.count, plan.programs + 1)
    return pl.pallas_call(
        functools.partial(_plan_kernel, plan=plan),
        grid=(lines,),
        out_shape=jax.ShapeDtypeStruct((lines, COLUMNS), jnp.int32),
        compiler_params=plt.CompilerParams(
            num_warps=min(max(power_of_two(plan.count) // 128, 1), 4), num_stages=1
        ),
        interpret=interpret,
        name="split_plan",
    )(*operands)
