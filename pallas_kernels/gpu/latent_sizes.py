"""Block sizes of attention over latents, by card and dtypes. They are read while JAX traces.

They compile without spills for every card. They were not timed.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.gpu.triton_tile import power_of_two
from pallas_kernels.latent_arguments import LatentCase


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Block sizes of attention over latents. A tile is query tokens times heads."""

    tile_rows: int  # rows (tokens x heads) of a tile, a power of two from 16 on
    block_tokens: int  # positions per loop step
    num_warps: int
    num_stages: int  # a stage is one block of cells in flight
    widest: int  # most numbers of a part of a cell, a power of two
    programs_per_sm: int = 1  # programs per SM over which all positions of the step are divided
    merged_pieces: int = 16  # parts that a merging program reads at a time


def cell_parts(start: int, stop: int, widest: int) -> tuple[tuple[int, int], ...]:
    """Divide the numbers [start, stop) of a cell into (start, size) parts.

    Sizes are powers of two, the largest first, and at most `widest`.
    """
    parts = []
    while start < stop:
        size = min(widest, 1 << ((stop - start).bit_length() - 1))
        parts.append((start, size))
        start += size
    return tuple(parts)


def heads_of_tile(heads: int, most: int) -> int:
    """Return the largest divisor of the number of heads that is at most `most`."""
    return next(size for size in range(min(heads, most), 0, -1) if heads % size == 0)


def merged_columns(rank: int) -> int:
    """Return how many numbers of a value a merging program computes: a power of two up to 256."""
    return min(256, rank & -rank)


def latent_config(case: LatentCase, one_query: bool) -> LatentConfig:
    """Return the block sizes for a call.

    Args:
        case: shapes, dtypes and device of the call.
        one_query: whether every row has one token at most.
    """
    exact, narrow = case.query_dtype.itemsize == 4, case.page_dtype.itemsize == 1
    if exact:  # without tensor cores: small tiles, many threads
        config = LatentConfig(16, 16, num_warps=8, num_stages=1, widest=64)
    elif case.device.has_wgmma:
        config = LatentConfig(64, 64, num_warps=8, num_stages=2, widest=512)
    else:
        config = LatentConfig(32, 32, num_warps=8, num_stages=2, widest=512)
    if one_query:
        rows = max(16, power_of_two(heads_of_tile(case.N, config.tile_rows)))
        config = dataclasses.replace(config, tile_rows=rows)
    return config
