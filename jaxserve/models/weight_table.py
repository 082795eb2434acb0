"""Tensors of a Hugging Face checkpoint and their places in a model's parameters, as data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType

import numpy as np

from jaxserve.models.config.model_config import ModelConfig

Index = tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True)
class Block:
    """Rows of a tensor, and the part of a parameter that they fill.

    Attributes:
        rows: first and end, along the tensor's first dimension.
        sizes: sizes of the rows' dimensions once those that are fused into one are split.
        order: order of these dimensions in the parameter.
        index: index of the values that these rows fill, within the tensor's part of the parameter.
    """

    rows: tuple[int, int]
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    index: Index

    def arrange(self, rows: np.ndarray) -> np.ndarray:
        """Return a view of the rows in the parameter's order of dimensions."""
        return rows.reshape(self.sizes).transpose(self.order)


@dataclass(frozen=True)
class WeightName:
    """One tensor of a checkpoint and its place in the model.

    Attributes:
        name: the tensor's name in the checkpoint.
        layout: how to rearrange it, "(N H) D -> D N H": the left side is its shape there, with
            the dimensions that are fused into one in brackets; the right side their order here.
            Bars divide a bracket in front into parts that are stacked: "(K G H | K H | K H) D".
        path: the parameter it belongs to.
        index: the part of the parameter that it fills; all of it unless several tensors are fused.
        part: which part of a stacked tensor this is; each has a WeightName of its own.
        other: a layout that some checkpoints have instead, told by the tensor's shape.
    """

    name: str
    layout: str
    path: str
    index: Index = (...,)
    part: int = 0
    other: str = ""

    def stored_as(self, shape: tuple[int, ...] | None, dims: Mapping[str, int]) -> WeightName:
        """Return this tensor with the layout that a shape in the checkpoint tells."""
        if not self.other or shape is None or shape == self.shape(dims):
            return self
        return replace(self, layout=self.other, other="")

    def shape(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Return the tensor's shape in the checkpoint."""
        return tuple(sum(part) for part in self._sizes(dims))

    def arrange(self, tensor: np.ndarray, dims: Mapping[str, int]) -> np.ndarray:
        """Return a view of the tensor, or of its part, in the parameter's order of dimensions."""
        whole = next(self.blocks(dims, tensor.size))
        return whole.arrange(tensor[slice(*whole.rows)])

    def blocks(self, dims: Mapping[str, int], max_values: int) -> Iterator[Block]:
        """Cut the tensor, or its part, along its first dimension.

        Blocks have at most `max_values` values, but at least one entry of the outermost of the
        dimensions that are fused into the first.
        """
        sizes = self._sizes(dims)
        names = [parts[self.part if len(parts) > 1 else 0] for parts in self._source()]
        source = [name for part in names for name in part]
        order = tuple(source.index(name) for name in self._side(1).split())
        shape = tuple(dims[name] for name in source)
        first = sum(sizes[0][: self.part]) if len(sizes[0]) > 1 else 0
        step = prod(dims[name] for name in names[0][1:])  # rows to an entry of the outermost
        count = max(1, max_values // max(1, prod(shape[1:])))
        outer = (slice(None),) * order.index(0)
        for start in range(0, shape[0], count):
            stop = min(start + count, shape[0])
            yield Block(
                rows=(first + start * step, first + stop * step),
                sizes=(stop - start, *shape[1:]),
                order=order,
                index=(*outer, slice(start, stop)),
            )

    def _sizes(self, dims: Mapping[str, int]) -> list[list[int]]:
        """Return the sizes of the parts of each dimension of the tensor."""
        return [[prod(dims[name] for name in part) for part in parts] for parts in self._source()]

    def _source(self) -> list[list[list[str]]]:
        """Return the names that are fused in each part of each dimension of the tensor."""
        dimensions = re.findall(r"\(([^)]*)\)|(\S+)", self._side(0))
        return [
            [part.split() for part in (fused or single).split("|")] for fused, single in dimensions
        ]

    def _side(self, index: int) -> str:
        return self.layout.split("->")[index]


def dimensions(config: ModelConfig) -> dict[str, int]:
    """Return the sizes of the letters in `WeightName.layout`.

    G is the number of query heads per kv head. E experts of width M and a shared one of width S;
    gates and upward projections are a pair P. Latent attention has latents of ranks L (queries) and
    C, joint with the rotated part J; heads of A (queries, keys), B (what keys and values take from
    their latent) and U (values).
    """
    sizes = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "K": config.num_key_value_heads,
        "G": config.num_attention_heads // config.num_key_value_heads,
        "H": config.head_dim,
        "P": 2,
    }
    if (experts := config.experts) is not None:
        sizes |= {"E": experts.count, "M": experts.size, "S": experts.shared}
    if (latent := config.latent) is not None:
        sizes |= {"L": latent.query_rank or 0, "C": latent.rank, "J": latent.rank + latent.rotary}
        sizes |= {"A": latent.key, "B": latent.plain + latent.value, "U": latent.value}
    return sizes
