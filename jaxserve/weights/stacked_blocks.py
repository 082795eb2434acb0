"""Blocks of experts whose matrices a file holds as one tensor: an expert's rows at a time.

gpt-oss's lie so: in GGUF files gates and upward projections apart, [E, outputs, inputs] each; in
Hugging Face checkpoints as one tensor, whose outputs they are in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.gguf.blocks import are_finite, rows_of_blocks
from jaxserve.weights.gguf.file import GgufTensor
from jaxserve.weights.gguf.joined import JoinedTensor
from jaxserve.weights.mxfp4 import PackedEntry, rows_of_pairs
from jaxserve.weights.safetensors import SharedFile, TensorEntry
from pallas_kernels.cpu.blocks import FORMATS

PIECE_BYTES = 4 << 20
MXFP4 = "MXFP4"


@dataclass(frozen=True)
class StackedBlocks:
    """The matrices of all experts of a layer, in blocks of one format.

    Attributes:
        form: name of the format.
        count: how many experts there are.
        read: read the rows of an expert, uint8 [outputs, blocks, bytes of one], from each tensor;
            outputs of the whole are those of the tensors in turn.
        order: which output of the whole each of the model's is.
    """

    form: str
    count: int
    read: Sequence[Callable[[int], np.ndarray]]
    order: np.ndarray

    def rows_of(self, expert: int) -> np.ndarray:
        """Read an expert's rows of blocks, in the model's order of outputs.

        Raises:
            CheckpointError: a file that cannot be read, or scales that are no numbers.
        """
        turns, whole = len(self.read), None
        for turn, read in enumerate(self.read):
            rows = read(expert)
            if whole is None:
                whole = np.empty((len(self.order), *rows.shape[1:]), np.uint8)
            places = np.flatnonzero(self.order % turns == turn)
            whole[places] = rows[self.order[places] // turns]
        assert whole is not None
        return whole


def stacked_form(entry: TensorEntry) -> str | None:
    """Return the format of the experts' blocks in a tensor; None if it holds no such."""
    if isinstance(entry, PackedEntry):
        return MXFP4
    if not isinstance(entry, JoinedTensor) or not entry.join.of_experts:
        return None
    forms = {part.encoding.name for part in entry.parts}
    return forms.pop() if len(forms) == 1 and forms <= FORMATS.keys() else None


def stacked_blocks(part: WeightName, entry: TensorEntry, dims: Mapping[str, int]) -> StackedBlocks:
    """Return the blocks of a tensor that `stacked_form` has named the format of."""
    if isinstance(entry, PackedEntry):
        # Of [E, outputs, inputs].
        read, numbers = [partial(_read_pairs, entry)], np.arange(entry.shape[1])[:, None]
    else:
        # Of [E, inputs, outputs].
        assert isinstance(entry, JoinedTensor)
        read = [partial(_read_expert, tensor) for tensor in entry.parts]
        numbers = np.arange(entry.shape[2])
    one_expert = next(part.blocks(dims, 1))
    order = one_expert.arrange(np.broadcast_to(numbers, (1, *entry.shape[1:])))[0, 0]
    form = stacked_form(entry)
    assert form is not None
    return StackedBlocks(form, entry.shape[0], read, order.reshape(-1))


def read_rows(entry: GgufTensor) -> np.ndarray:
    """Read the rows of blocks of a matrix, uint8 [outputs, blocks, bytes of one], a few at a time.

    Raises:
        CheckpointError: a file that cannot be read, or scales that are no numbers.
    """
    form, outputs = entry.encoding.name, entry.shape[0]
    blocks = entry.shape[1] // entry.encoding.values
    whole = np.empty((outputs, blocks, FORMATS[form].num_bytes), np.uint8)
    step = max(1, PIECE_BYTES // (blocks * entry.encoding.num_bytes))
    with closing(SharedFile()) as file:
        for first in range(0, outputs, step):
            last = min(first + step, outputs)
            raw = entry.read_bytes(first, last, None, file)
            whole[first:last] = rows_of_blocks(raw.reshape(last - first, blocks, -1), form)
    return _checked(whole, form, entry)


def _read_expert(entry: GgufTensor, expert: int) -> np.ndarray:
    size = entry.num_bytes // entry.shape[0]
    offset = entry.offset + expert * size
    return read_rows(replace(entry, shape=entry.shape[1:], offset=offset, num_bytes=size))


def _read_pairs(entry: PackedEntry, expert: int) -> np.ndarray:
    with closing(SharedFile()) as file:
        blocks = entry.blocks.read_rows(expert, expert + 1, None, file)[0]
        scales = entry.scales.read_rows(expert, expert + 1, None, file)[0]
    return _checked(rows_of_pairs(blocks, scales), MXFP4, entry)


def _checked(rows: np.ndarray, form: str, entry: TensorEntry) -> np.ndarray:
    if not are_finite(rows, form):
        raise CheckpointError(
            f"{entry.shard.path}: tensor {entry.name!r} has scales that are NaN or infinite"
        )
    return rows
