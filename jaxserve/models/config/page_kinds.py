"""PageLayout: the kinds of cache pages of a model, and the groups of layers that share arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.errors import UnsupportedModel

# Largest part of a kind's memory that groups may leave unused, because its number of layers is not
# a multiple of their size.
_WASTE = 1 / 16


@dataclass(frozen=True)
class PageKind:
    """The layers whose cache pages have equal shapes and are freed at the same time.

    Attributes:
        name: name for reports and metrics.
        layers: numbers of the layers.
        heads: number of kv heads, on all devices together. A head that several devices have counts
            once for each of them.
        key_size: size of a key of a head.
        value_size: size of a value of a head, or 0 if values are a part of the keys (latents).
        window: number of positions that a query sees, its own included, or None for all.
    """

    name: str
    layers: tuple[int, ...]
    heads: int
    key_size: int
    value_size: int
    window: int | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of kv heads, and sizes of a key and of a value."""
        return self.heads, self.key_size, self.value_size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of a head in each array of the pages: keys, and values unless they are latents."""
        return (self.key_size, self.value_size) if self.value_size else (self.key_size,)


class LayerPlace(NamedTuple):
    """The cache pages of a layer.

    Attributes:
        kind: number of the kind of pages.
        group: number of the group of layers, over all kinds.
        array: number of the array that contains the pages.
    """

    kind: int
    group: int
    array: int


@dataclass(frozen=True)
class PageLayout:
    """Kinds of pages in one pool, whose pages all have equally many bytes.

    The layers of each kind form groups of `depth` layers. Layer j of every group has its pages in
    array j, and a page belongs to one group at a time. With one kind there is one group, and each
    layer has an array of its own.

    Attributes:
        kinds: the kinds. The first one has the widest window, or none.
        depth: number of layers of a group, and of arrays.
        places: for each layer its place, or None for a layer without cache pages.
    """

    kinds: tuple[PageKind, ...]
    depth: int
    places: tuple[LayerPlace | None, ...]

    @classmethod
    def of(
        cls, kinds: tuple[PageKind, ...], num_layers: int, sources: tuple[int, ...] = ()
    ) -> PageLayout:
        """Return the layout of kinds of pages in the fewest groups that waste little memory.

        Args:
            kinds: the kinds of pages.
            num_layers: number of layers of the model, with and without cache pages.
            sources: number of the layer whose pages each layer reads. Empty: its own.

        Raises:
            UnsupportedModel: the pages of two kinds cannot have equally many bytes.
        """
        kinds = tuple(sorted(kinds, key=lambda kind: -(kind.window or 1 << 62)))
        counts = [len(kind.layers) for kind in kinds]
        depth = _depth(counts)
        places: list[LayerPlace | None] = [None] * num_layers
        first = 0
        for number, kind in enumerate(kinds):
            for index, layer in enumerate(kind.layers):
                places[layer] = LayerPlace(number, first + index // depth, index % depth)
            first += -(-len(kind.layers) // depth)
        if sources:
            places = [places[source] for source in sources]
        layout = cls(kinds, depth, tuple(places))
        for number in range(len(kinds)):
            layout.splits(number)
        return layout

    def groups(self, kind: int) -> int:
        """Return the number of groups of a kind."""
        return -(-len(self.kinds[kind].layers) // self.depth)

    def splits(self, kind: int) -> int:
        """Return into how many pages of a group the tokens of a block are divided.

        The kind with the fewest bytes per token has one page for all of them.
        """
        numbers = [[kind.heads * size for size in kind.sizes] for kind in self.kinds]
        own, least = numbers[kind], list(map(min, zip(*numbers, strict=False)))
        times = {divmod(number, first) for number, first in zip(own, least, strict=False)}
        if len(set(map(len, numbers))) > 1 or len(times) > 1 or next(iter(times))[1]:
            raise UnsupportedModel(
                f"layers have kv heads and sizes {[k.shape for k in self.kinds]}; allowed: keys "
                "and values of each kind of layer that are the same multiple of the smallest"
            )
        return next(iter(times))[0]

    @property
    def most_splits(self) -> int:
        """Most pages of a group into which the tokens of a block are divided, at least 1."""
        return max(map(self.splits, range(len(self.kinds))), default=1)

    @property
    def is_shared(self) -> bool:
        """Whether an array has the pages of several layers."""
        return len([place for place in self.places if place is not None]) > self.depth

    @property
    def is_uniform(self) -> bool:
        """Whether the pages of all kinds have the same shape."""
        return len({kind.shape for kind in self.kinds}) < 2

    @property
    def parts(self) -> int:
        """Number of pages of a block of each kind together, 1 without kinds."""
        pages = (self.groups(kind) * self.splits(kind) for kind in range(len(self.kinds)))
        return max(1, sum(pages))


def _depth(counts: list[int]) -> int:
    """Return the number of layers of a group, the largest with little waste in each kind."""

    def wastes_little(depth: int) -> bool:
        return all(-(-count // depth) * depth <= count * (1 + _WASTE) for count in counts)

    return next((size for size in range(max(counts, default=0), 1, -1) if wastes_little(size)), 1)
