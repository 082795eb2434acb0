"""Tensors of Hugging Face files that a GGUF file has in parts, maybe transposed, or as metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.gguf.rules import Join
from jaxserve.weights.gguf.file import GgufTensor
from jaxserve.weights.safetensors import Shard, SharedFile, TensorEntry


@dataclass(frozen=True)
class JoinedTensor(TensorEntry):
    """A tensor joined from several GGUF tensors by the rule `join`; `shape` is the joined shape."""

    parts: tuple[GgufTensor, ...]
    join: Join

    @property
    def rows_together(self) -> int:
        """Number of rows of the joined tensor for each row of a part."""
        return self.shape[0] // self.parts[0].shape[0]

    def read_rows(
        self,
        first: int,
        last: int,
        memory: np.ndarray | None = None,
        file: SharedFile | None = None,
    ) -> np.ndarray:
        """Read the rows [first, last) of the parts, and return them joined.

        Both bounds are multiples of `rows_together`. Arguments and errors are as in
        `TensorEntry.read_rows`.
        """
        each = self.rows_together
        first, last = first // each, last // each
        # `memory` has room for one part. The other parts allocate their own.
        rooms = [memory, *[None] * (len(self.parts) - 1)]
        rows = [
            part.read_rows(first, last, room, file)
            for part, room in zip(self.parts, rooms, strict=True)
        ]
        return self.join.arrange([part.astype(self.dtype, copy=False) for part in rows])


@dataclass(frozen=True)
class ValueTensor(TensorEntry):
    """A tensor with the numbers `values` of a GGUF file's metadata."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, name: str, values: np.ndarray, shard: Shard) -> ValueTensor:
        """Return a tensor entry for a vector `values` in float32 out of the file `shard`."""
        dtype = np.dtype(np.float32)
        size = dtype.itemsize * values.size
        return cls(name, shard, dtype, values.shape, 0, size, tuple(map(float, values)))

    def read_bytes(
        self,
        first: int,
        last: int,
        memory: np.ndarray | None = None,
        file: SharedFile | None = None,
    ) -> np.ndarray:
        """Return the bytes of the numbers [first, last), flat uint8."""
        return np.array(self.values[first:last], self.dtype).view(np.uint8)


def joined(name: str, join: Join, parts: Sequence[GgufTensor]) -> JoinedTensor:
    """Return a tensor entry called `name` that joins GGUF tensors by the rule `join` when read.

    Raises:
        CheckpointError: the shapes of the parts do not fit the rule.
    """
    shapes = [part.shape for part in parts]
    try:
        shape = join.shape(shapes)
    except ValueError:
        names = " and ".join(repr(part.name) for part in parts)
        raise CheckpointError(
            f"{parts[0].shard.path}: {names} have the shapes {[list(size) for size in shapes]}, "
            f"which do not make a {name!r}"
        ) from None
    return JoinedTensor(
        name,
        parts[0].shard,
        np.result_type(*(part.dtype for part in parts)),
        shape,
        parts[0].offset,
        sum(part.num_bytes for part in parts),
        tuple(parts),
        join,
    )
