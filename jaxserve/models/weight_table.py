"""A data description of the tensors of a Hugging Face checkpoint and their model parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType

import numpy as np

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.recurrent import (
    ChannelDeltaSizes,
    GatedDeltaSizes,
    Mamba2Sizes,
    ShortConvSizes,
)

Index = tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True)
class Block:
    """A range of rows of a checkpoint's tensor, and the part of a parameter that they fill.

    Attributes:
        rows: (first, end) along the tensor's first dimension.
        sizes: shape of the rows after their fused dimensions are split.
        order: permutation of the dimensions `sizes` that gives the parameter's order.
        index: index of these rows' values within the tensor's part of the parameter.
    """

    rows: tuple[int, int]
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    index: Index

    def arrange(self, rows: np.ndarray) -> np.ndarray:
        """Return a view of the tensor's rows `Block.rows` in the parameter's dimension order."""
        return rows.reshape(self.sizes).transpose(self.order)


@dataclass(frozen=True)
class WeightName:
    """One tensor of a checkpoint and the part of a model parameter that it fills.

    Attributes:
        name: the tensor's name in the checkpoint.
        layout: its rearrangement, such as "(N H) D -> D N H". The left side is the tensor's shape
            in the checkpoint, with fused dimensions in brackets, and the right side the order of
            dimensions in the parameter, which may lack a first dimension of 1. Bars divide the
            first bracket into stacked parts: "(K G H | K H | K H) D". The letters are those of
            `dimensions`.
        path: the path of the parameter in the model.
        index: the part of the parameter that the tensor fills: all of it, unless several tensors
            are fused.
        part: the index of this part of a stacked tensor, whose parts have separate WeightNames.
        other: a layout of some checkpoints, recognized by the tensor's shape, or "".
        rows: (first, count) if the layout describes only some consecutive rows of the tensor: the
            first of them, and the number of rows of the tensor. Such parts of a tensor have
            different numbers in `part`.
    """

    name: str
    layout: str
    path: str
    index: Index = (...,)
    part: int = 0
    other: str = ""
    rows: tuple[int, int] | None = None

    def stored_as(self, shape: tuple[int, ...] | None, dims: Mapping[str, int]) -> WeightName:
        """Return this WeightName, or a copy in the layout of its field `other`.

        The copy is returned if `other` is set and `layout` does not fit `shape`.

        Args:
            shape: the tensor's shape in the checkpoint. None, if unknown, keeps `layout`.
            dims: sizes by name, which give the shape that `layout` has.
        """
        if not self.other or shape is None or shape == self.shape(dims):
            return self
        return replace(self, layout=self.other, other="")

    def shape(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor in the checkpoint.

        `dims` gives the size of each letter of the layout (see `dimensions`).
        """
        shape = tuple(sum(part) for part in self._sizes(dims))
        return shape if self.rows is None else (self.rows[1], *shape[1:])

    def arrange(self, tensor: np.ndarray, dims: Mapping[str, int]) -> np.ndarray:
        """Return a view of the tensor, or its stacked part, in the parameter's dimension order."""
        whole = next(self.blocks(dims, tensor.size))
        return whole.arrange(tensor[slice(*whole.rows)])

    def restore(self, values: np.ndarray, dims: Mapping[str, int]) -> np.ndarray:
        """Return the tensor, or its stacked part, whose `arrange` returns the given values.

        Args:
            values: an array of NumPy or JAX in the parameter's dimension order.
            dims: size of each letter of the layout (see `dimensions`).
        """
        whole = next(self.blocks(dims, values.size))
        ordered = values.reshape([whole.sizes[axis] for axis in whole.order])
        ordered = ordered.transpose([whole.order.index(axis) for axis in range(ordered.ndim)])
        return ordered.reshape(whole.rows[1] - whole.rows[0], *self.shape(dims)[1:])

    def blocks(self, dims: Mapping[str, int], max_values: int) -> Iterator[Block]:
        """Yield Blocks that divide the tensor, or its stacked part, along its first dimension.

        Each has at most `max_values` values, but at least one entry of the outermost dimension that
        is fused into the first. `dims` gives the size of each letter of the layout (see
        `dimensions`).
        """
        sizes = self._sizes(dims)
        names = [parts[self.part if len(parts) > 1 else 0] for parts in self._source()]
        source = [name for part in names for name in part]
        if source[0] == "One" and "One" not in self._side(1).split():
            sizes_left = tuple(dims[name] for name in source[1:])
            yield Block((0, 1), sizes_left, tuple(range(len(sizes_left))), (...,))
            return
        order = tuple(source.index(name) for name in self._side(1).split())
        shape = tuple(dims[name] for name in source)
        first = 0 if self.rows is None else self.rows[0]
        first += sum(sizes[0][: self.part]) if len(sizes[0]) > 1 else 0
        step = prod(dims[name] for name in names[0][1:])  # rows of an outermost entry
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
        return [[prod(dims[name] for name in part) for part in parts] for parts in self._source()]

    def _source(self) -> list[list[list[str]]]:
        # For each dimension of the tensor and each of its stacked parts, the names that are fused.
        dimensions = re.findall(r"\(([^)]*)\)|(\S+)", self._side(0))
        return [
            [part.split() for part in (fused or single).split("|")] for fused, single in dimensions
        ]

    def _side(self, index: int) -> str:
        return self.layout.split("->")[index]


def dimensions(config: ModelConfig) -> dict[str, int]:
    """Return a dict from each letter in `WeightName.layout` to its size in a model.

    G is the number of query heads of each kv head. If layers differ, G3 is 3 of them, K2 is 2 kv
    heads, H64 is a head of size 64 and F96 a width of 96. A layer has an input of size Own, and all
    layers have All such numbers. There are E experts of width M and a shared one of width S.
    P is the pair of gate and up projections. Latent attention has latents of ranks L (queries) and
    C (keys and values); J is C plus the rotated part. Its heads have sizes A (queries and keys), B
    (the part of keys that is projected from their latent) and U (values). A short
    convolution has W taps for each of Y channels. X is the triple of its projections. One is 1.
    """
    sizes = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "K": config.num_key_value_heads,
        "G": config.num_attention_heads // config.num_key_value_heads,
        "H": config.head_dim,
        "P": 2,
        "One": 1,
    }
    for layer in config.sized if config.has_own_heads else ():
        kv_heads, size = layer.num_key_value_heads, layer.head_dim
        group = layer.num_attention_heads // kv_heads
        sizes |= {f"G{group}": group, f"K{kv_heads}": kv_heads, f"H{size}": size}
        sizes[f"F{layer.intermediate_size}"] = layer.intermediate_size
    sizes |= {"Own": config.layer_inputs, "All": config.layer_inputs * config.num_hidden_layers}
    if config.value_dim is not None:
        sizes["U"] = config.value_dim
    if config.recurrent is not None:
        sizes["W"] = config.recurrent.width
    if isinstance(config.recurrent, ShortConvSizes):
        sizes |= {"X": 3, "Y": config.recurrent.channels}
    if isinstance(mamba := config.recurrent, Mamba2Sizes):
        values = mamba.parts[0]
        sizes |= {"Vals": values, "Xbc": sum(mamba.parts), "Heads": mamba.heads}
        sizes |= {"Groups": mamba.groups, "Size": values // mamba.groups}
    if isinstance(delta := config.recurrent, GatedDeltaSizes):
        channels, values = sum(delta.parts), delta.parts[2]
        sizes |= {"Qkv": channels, "Vals": values, "Fused": channels + values, "Out": delta.outputs}
        sizes |= {"Heads": delta.heads, "Keys": delta.groups, "Per": delta.heads // delta.groups}
        sizes |= {"Query": delta.parts[0]}
    if isinstance(delta, ChannelDeltaSizes):
        sizes |= {"Inputs": delta.inputs, "Rank": delta.rank or 0, "Unit": 1, "Single": 1}
    if (experts := config.experts) is not None:
        sizes |= {"E": experts.count, "M": experts.size, "S": experts.shared, "Lat": experts.latent}
    if (latent := config.latent) is not None:
        sizes |= {"L": latent.query_rank or 0, "C": latent.rank, "J": latent.rank + latent.rotary}
        sizes |= {"A": latent.key, "B": latent.plain, "U": latent.value}
    return sizes
