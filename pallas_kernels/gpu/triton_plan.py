"""Division of a step's attention over programs, by one small kernel.

The KV blocks that the rows' queries see, one row after the other, are cut into equal shares, one
for each program of a kv head: whatever the rows' lengths are, all have the same work. A share
may hold many short rows and parts of two others, and a long row takes many shares (Stream-K, Osama
et al. 2023).

Every program of the kernel works the whole plan out, which is a few operations on as many numbers
as there are tiles, and writes one line of it. The plan is the same for every layer, so a step has
it made once.
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
# And of the program of that number: its first tile, the last one of the program before, and its
# first block.
FIRST, LAST, SHARE = 7, 8, 9
COLUMNS = 10


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """Division of the KV of a step's rows, as far as it is known before their lengths are.

    Attributes:
        rows: R.
        queries: most queries of a tile.
        tiles: most tiles of a row; rows with more queries than these hold have none.
        block_tokens, min_blocks, window: positions of a block, blocks of a share at least, and
            positions that a query sees, or None.
        most_blocks: blocks that a tile may see.
        programs: programs of a kv head.
        longer_than: positions up to which rows are left to another kernel.
    """

    rows: int
    queries: int
    tiles: int
    block_tokens: int
    min_blocks: int
    window: int | None
    most_blocks: int
    programs: int
    longer_than: int = -1

    @classmethod
    def of(
        cls, case: Case, config: DecodeConfig, window: int | None, queries: int = 1, tiles: int = 1
    ) -> SplitPlan:
        """Build the plan of a call."""
        block = config.block_tokens
        most = -(-case.M * case.S // block)
        if window is not None:
            most = min(most, -(-(window + queries - 1) // block) + 1)
        programs = config.programs_per_sm * max(1, case.device.num_sms) // case.K
        programs = min(programs, case.R * tiles * most, ARRIVALS // case.K)
        return cls(case.R, queries, tiles, block, config.min_blocks, window, most, max(1, programs))

    @property
    def few(self) -> int:
        """Queries of a row up to which it is divided."""
        return self.queries * self.tiles

    @property
    def count(self) -> int:
        """Number of tiles, those that no row needs included."""
        return self.rows * self.tiles

    def shares(self, total: jax.Array) -> jax.Array:
        """Return into how many shares so many blocks are cut; share s begins at s / shares."""
        return jnp.minimum(ceil_div(total, self.min_blocks), self.programs)

    @property
    def is_merged(self) -> bool:
        """Whether a tile may lie in several shares."""
        return self.programs > 1


def _plan_kernel(*refs: Any, plan: SplitPlan) -> None:
    """Write one line. ``refs``: kv_len, query_start where rows have several queries, the lines."""
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
    # A tile without positions takes a turn of its own, which stores zeros.
    blocks = jnp.maximum(ceil_div(end, plan.block_tokens) - first, jnp.minimum(size, 1))
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    total = jnp.sum(blocks, dtype=jnp.int32)
    shares = plan.shares(total)
    line = pl.program_id(0)
    cut = lax.div(jnp.minimum(line, shares) * total, jnp.maximum(shares, 1))
    values = {
        name: jnp.sum(jnp.where(tile == line, numbers, 0), dtype=jnp.int32)
        for name, numbers in (
            *((ROW, row), (TOKEN, token), (SIZE, size), (POSITION, position)),
            *((BLOCK, first), (START, ends - blocks), (COUNT, blocks)),
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
    """Divide the blocks of rows of few queries over programs.

    Args:
        kv_len: i32[R] positions of each row.
        query_start: i32[R+1] as in ``ragged_paged_attention``; None where row r has query r alone.
        interpret: run on any device, slowly, as plain JAX operations.

    Returns:
        i32[max(tiles, programs + 1), 10]. Line t has, of tile t, its row, its first token, the
        number of its queries (0 for a tile that is not needed), the position of the first, the
        first block that they see, how many blocks are before these in the plan, and their number.
        Line p has, of program p, its first tile, the last tile of the program before, and its
        first block in the plan; line ``programs`` has all blocks' end.
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
