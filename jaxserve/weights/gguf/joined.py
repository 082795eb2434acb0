"""Tensors of a Hugging Face checkpoint that a GGUF file holds in parts, or turned around."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights.gguf.file import GgufTensor
from jaxserve.weights.safetensors import SharedFile, TensorEntry

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Join:
    """How parts that have equally many rows become one tensor.

    Attributes:
        name: of the tensor, after its layer.
        parts: their names, after the block.
        shape: of the tensor, given those of its parts; raises ValueError where they do not fit.
        arrange: rows of the parts as the tensor's rows.
    """

    name: str
    parts: tuple[str, ...]
    shape: Callable[[Sequence[Shape]], Shape]
    arrange: Callable[[Sequence[np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class JoinedTensor(TensorEntry):
    """Parts as one tensor; `shape` is that of the whole."""

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
        """Rows from and to multiples of `rows_together`. Raises as `TensorEntry.read_rows`."""
        each = self.rows_together
        first, last = first // each, last // each
        # Only one part may be read into the memory: the others come beside it.
        rooms = [memory, *[None] * (len(self.parts) - 1)]
        rows = [
            part.read_rows(first, last, room, file)
            for part, room in zip(self.parts, rooms, strict=True)
        ]
        return self.join.arrange([one.astype(self.dtype, copy=False) for one in rows])


def joined(name: str, join: Join, parts: Sequence[GgufTensor]) -> JoinedTensor:
    """Parts as one tensor called `name`.

    Raises:
        CheckpointError: their shapes do not fit.
    """
    shapes = [part.shape for part in parts]
    try:
        shape = join.shape(shapes)
    except ValueError:
        names = " and ".join(repr(part.name) for part in parts)
        raise CheckpointError(
            f"{parts[0].shard.path}: {names} have the shapes {[list(one) for one in shapes]}, "
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


def _alternating_shape(shapes: Sequence[Shape]) -> Shape:
    (experts, size, *rest), other = shapes
    if len(rest) > 1 or other != shapes[0]:
        raise ValueError
    return (experts, *rest, 2 * size)


def _alternating(parts: Sequence[np.ndarray]) -> np.ndarray:
    """[E, M, D] of gates and of upward projections as [E, D, 2 M]; biases, [E, M], as [E, 2 M]."""
    stacked = np.stack(list(parts), axis=2)
    return stacked.reshape(len(stacked), -1, *stacked.shape[3:]).swapaxes(1, -1)


def _turned_shape(shapes: Sequence[Shape]) -> Shape:
    [(experts, outputs, inputs)] = shapes
    return experts, inputs, outputs


def _turned(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0].swapaxes(1, 2)


def _latent_shape(shapes: Sequence[Shape]) -> Shape:
    (heads, rank, plain), (others, value, width) = shapes
    if others != heads or width != rank:
        raise ValueError
    return heads * (plain + value), rank


def _latent(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Each head's keys, [N, C, A], and values, [N, U, C], as [N (A + U), C]."""
    keys, values = parts
    rows = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return rows.reshape(-1, rows.shape[-1])


GATE_UP = Join(
    "mlp.experts.gate_up_proj",
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    _alternating_shape,
    _alternating,
)
GATE_UP_BIAS = Join(
    "mlp.experts.gate_up_proj_bias",
    ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    _alternating_shape,
    _alternating,
)
DOWN = Join("mlp.experts.down_proj", ("ffn_down_exps.weight",), _turned_shape, _turned)
KEYS_AND_VALUES = Join(
    "self_attn.kv_b_proj.weight",
    ("attn_k_b.weight", "attn_v_b.weight"),
    _latent_shape,
    _latent,
)
