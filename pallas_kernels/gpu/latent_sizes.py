"""Block sizes of attention over latents, by card and dtypes. They are read while JAX traces.

They compile without spills for every card. They were not timed.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.devices import KIB
from pallas_kernels.latent_arguments import LatentCase


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Block sizes of attention over latents. A tile is query tokens times heads."""

    tile_rows: int  # rows (tokens x heads) of a tile, a power of two from 16 on
    block_tokens: int  # positions per loop step
    num_stages: int  # of the loop over blocks
    widest: int  # most numbers of a part of a cell, a power of two
    num_warps: int = 8
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


def most_rows(case: LatentCase) -> int:
    """Return the most rows of a tile whose sums of values fit the registers of a program."""
    if case.query_dtype.itemsize == 4:  # without tensor cores
        return 16
    # On 10.0 and 11.0, products of 64 rows are in tensor memory, which the sums fill. Without
    # products of warpgroups, conversion of float8 takes registers.
    has_few = case.device.capability[0] in (10, 11)
    has_few |= case.page_dtype.itemsize == 1 and not case.device.has_wgmma
    return 32 if has_few else 64


def latent_config(case: LatentCase, rows: int) -> LatentConfig:
    """Return the block sizes for tiles of `rows` rows: 16, 32 or 64."""
    shared = case.device.shared_memory
    if case.query_dtype.itemsize == 4:  # small tiles, many threads
        return LatentConfig(rows, 16, num_stages=1, widest=128)
    if rows == 64:
        if case.device.has_wgmma:
            return LatentConfig(rows, 32, num_stages=2, widest=64)
        if shared >= 128 * KIB:
            return LatentConfig(rows, 32, num_stages=2, widest=256)
        return LatentConfig(rows, 16, num_stages=2, widest=128)
    # The loop loads page ids one turn before their cells, so 5 stages have two blocks in flight.
    if rows == 32:
        return LatentConfig(rows, 32 if shared >= 128 * KIB else 16, num_stages=5, widest=512)
    if shared >= 192 * KIB:
        return LatentConfig(rows, 32, num_stages=5, widest=512, programs_per_sm=2)
    if shared >= 128 * KIB:
        return LatentConfig(rows, 32, num_stages=4, widest=512, programs_per_sm=2)
    return LatentConfig(rows, 32, num_stages=5, widest=512)
