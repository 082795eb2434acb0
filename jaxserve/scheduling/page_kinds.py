"""PoolKind: the pages that layers with one attention window take from the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PoolKind:
    """The layers with one attention window and one size of keys and values, as the pool sees them.

    A block is the memory that these layers take for `page_size` tokens of a sequence. It consists
    of several pages of the pool, and is allocated, shared and freed as a whole. The layers form
    groups, and each group has pages of its own.

    Attributes:
        window: number of positions that a token attends to, its own included. None for all.
        groups: number of groups of layers.
        splits: number of pages of a group in a block.
    """

    window: int | None = None
    groups: int = 1
    splits: int = 1

    @property
    def num_pages(self) -> int:
        """Number of pages in a block."""
        return self.groups * self.splits

    def num_outside(self, computed: Any, page_size: int) -> Any:
        """Return the number of a sequence's first blocks that are outside the attention window.

        No token after the first `computed` tokens attends to them. Without a window it is 0.

        Args:
            computed: number of computed tokens, or an array of such numbers.
            page_size: number of tokens of a block.
        """
        if self.window is None:
            return 0
        return np.maximum(computed - self.window + 1, 0) // page_size

    def most_blocks(self, length: Any, page_size: int, ahead: int) -> Any:
        """Return the most blocks that a sequence of `length` tokens holds at once.

        Args:
            length: number of tokens of the sequence, or an array of such numbers.
            page_size: number of tokens of a block.
            ahead: number of tokens that may be allocated or computed beyond the window, before
                blocks outside the window are freed.
        """
        blocks = -(-length // page_size)
        if self.window is None:
            return blocks
        most = -(-(self.window + ahead) // page_size) + 1
        return min(blocks, most) if isinstance(blocks, int) else np.minimum(blocks, most)


# At most this part of the pool is reserved for chunks of prompts: one in 32 pages.
RESERVE_DIVISOR = 32
ONE_KIND = (PoolKind(),)
"""The kinds of a model whose layers attend to all positions."""


def most_pages(kinds: Sequence[PoolKind], length: int, page_size: int, chunk: int) -> int:
    """Return the most pages of the pool that a sequence of `length` tokens holds at once.

    Pages outside the attention window are freed when the results of a step are read. The next step
    has then been submitted already, so a sequence holds two chunks in addition to the window.

    Args:
        kinds: the kinds of pages of the model.
        length: number of tokens of the sequence.
        page_size: number of tokens of a block.
        chunk: the most tokens of the sequence that a step computes.
    """
    return sum(kind.num_pages * kind.most_blocks(length, page_size, 2 * chunk) for kind in kinds)


def steady_pages(kinds: Sequence[PoolKind], length: int, page_size: int) -> int:
    """Return the pages that a sequence of `length` tokens holds while no chunk of it is computed.

    The tokens of a launch of decode steps beyond the window fit into the last block or the next.

    Args:
        kinds: the kinds of pages of the model.
        length: number of tokens of the sequence.
        page_size: number of tokens of a block.
    """
    return sum(kind.num_pages * kind.most_blocks(length, page_size, page_size) for kind in kinds)


def chunk_pages(
    kinds: Sequence[PoolKind], length: int, tokens: int, page_size: int, most: int
) -> int:
    """Return the pages to reserve for the tokens of chunks beside the windows of their sequences.

    Args:
        kinds: the kinds of pages of the model.
        length: number of tokens of the longest sequence. Kinds whose window contains it have none.
        tokens: number of tokens of the chunks.
        page_size: number of tokens of a block.
        most: the most pages to reserve. With fewer pages, chunks become shorter.
    """
    blocks = -(-tokens // page_size)
    pages = sum(
        kind.num_pages * blocks
        for kind in kinds
        if kind.window is not None and length > kind.window
    )
    return min(pages, most)


def longest_held(
    kinds: Sequence[PoolKind], num_pages: int, page_size: int, chunk: int, length: int
) -> int:
    """Return the length of the longest sequence that fits into `num_pages` pages of KV cache.

    It is at most `length`. The other arguments are those of `most_pages`.
    """
    if most_pages(kinds, length, page_size, chunk) <= num_pages:
        return length
    low, high = 0, length // page_size + 1  # in blocks: the first number fits, the last does not
    while high - low > 1:
        middle = (low + high) // 2
        if most_pages(kinds, middle * page_size, page_size, chunk) <= num_pages:
            low = middle
        else:
            high = middle
    return low * page_size
