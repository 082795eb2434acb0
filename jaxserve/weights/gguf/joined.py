"""Tensors of a Hugging Face checkpoint that a GGUF file holds in parts, or turned around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.gguf.rules import Join
from jaxserve.weights.gguf.file import GgufTensor
from jaxserve.weights.safetensors import SharedFile, TensorEntry


@dataclass(frozen=True)
class JoinedTensor(TensorEntry):
    """Tensor joined from several parts; `shape` is that of the whole."""

    parts: tuple[GgufTensor, ...]
    join: Join

    @property
    def rows_together(self) -> int:
        """The rows that one row of each part becomes."""
        return self.shape[0] // self.parts[0].shape[0]

    def read_rows(
        self,
        first: int,
        last: int,
        memory: np.ndarray | None = None,
        file: SharedFile | None = None,
    ) -> np.ndarray:
        """Read rows between multiples of `rows_together`, with `TensorEntry.read_rows`'s errors."""
        each = self.rows_together
        first, last = first // each, last // each
        # Only one part may be read into the memory: the others come beside it.
        rooms = [memory, *[None] * (len(self.parts) - 1)]
        rows = [
            part.read_rows(first, last, room, file)
            for part, room in zip(self.parts, rooms, strict=True)
        ]
        return self.join.arrange([part.astype(self.dtype, copy=False) for part in rows])


def joined(name: str, join: Join, parts: Sequence[GgufTensor]) -> JoinedTensor:
    """Join parts into one tensor called `name`.

    Raises:
        CheckpointError: their shapes do not fit.
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
