"""Numbers of tokens and sequences that a cache with several kinds of pages holds."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.models import ModelConfig
from jaxserve.scheduling.page_kinds import (
    ONE_KIND,
    RESERVE_DIVISOR,
    PoolKind,
    chunk_pages,
    longest_held,
    most_pages,
    steady_pages,
)


@dataclass(frozen=True)
class CacheKind:
    """One kind of cache pages in the report of a plan.

    Attributes:
        name: name of the kind.
        layers: number of layers.
        window: number of positions that a query sees, or None for all.
        token_bytes: bytes of a token in these layers, on each device.
    """

    name: str
    layers: int
    window: int | None
    token_bytes: float


def pool_kinds(model_config: ModelConfig) -> tuple[PoolKind, ...]:
    """Return the kinds of cache pages of a model as the page pool sees them.

    A model without cache pages has one kind, by which the scheduler counts tokens.
    """
    layout = model_config.page_layout
    if not layout.kinds:
        return ONE_KIND
    return tuple(
        PoolKind(kind.window, layout.groups(number), layout.splits(number))
        for number, kind in enumerate(layout.kinds)
    )


def cache_kinds(
    model_config: ModelConfig, page_bytes: float, block_size: int
) -> tuple[CacheKind, ...]:
    """Return the kinds of cache pages of a model, the one with the widest window first.

    Args:
        model_config: configuration of the model.
        page_bytes: bytes of a page in all layers of a group, on each device.
        block_size: number of tokens of a block.
    """
    layout = model_config.page_layout
    layer = page_bytes / layout.depth / block_size
    layers = [len(kind.layers) for kind in layout.kinds]
    return tuple(
        CacheKind(kind.name, count, kind.window, layer * count * layout.splits(number))
        for number, (kind, count) in enumerate(zip(layout.kinds, layers, strict=True))
    )


@dataclass(frozen=True)
class CacheRoom:
    """The pages of a cache, as sequences use them.

    Attributes:
        kinds: the kinds of pages.
        num_pages: number of pages, without the null page.
        block_size: number of tokens of a block.
        chunk: the most tokens of one sequence in a step.
        step: the most tokens of a step.
    """

    kinds: tuple[PoolKind, ...]
    num_pages: int
    block_size: int
    chunk: int
    step: int

    @property
    def tokens(self) -> int:
        """Number of tokens of one long sequence that the cache holds."""
        return self.longest(self.num_pages * self.block_size)

    def longest(self, length: int) -> int:
        """Return the most tokens of one sequence, at most `length`."""
        return longest_held(self.kinds, self.num_pages, self.block_size, self.chunk, length)

    def sequences(self, length: int) -> int:
        """Return the number of sequences of `length` tokens that are in the cache at once."""
        if most_pages(self.kinds, length, self.block_size, self.chunk) > self.num_pages:
            return 0
        each = steady_pages(self.kinds, length, self.block_size)
        most = self.num_pages // RESERVE_DIVISOR
        reserve = chunk_pages(self.kinds, length, 2 * self.step, self.block_size, most)
        return max(1, (self.num_pages - reserve) // each)
