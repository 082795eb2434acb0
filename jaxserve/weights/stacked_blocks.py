"""Read the quantized blocks of one expert from a tensor that holds all experts' matrices.

gpt-oss stores its experts in this way. A GGUF file has two tensors [E, outputs, inputs], for gate
and up projections. A Hugging Face checkpoint has one tensor, whose outputs alternate between the
two.
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
        read: a function for each tensor that reads the rows of an expert, uint8 [outputs, blocks,
            bytes per block]. Outputs are numbered by taking one from each tensor in turn.
        order: number of each output of the model, in this numbering.
    """

    form: str
    count: int
    read: Sequence[Callable[[int], np.ndarray]]
    order: np.ndarray

    def rows_of(self, expert: int) -> np.ndarray:
        """Read an expert's blocks, uint8 [outputs, blocks, bytes], in the model's output order.

        Raises:
            CheckpointError: a file cannot be read, or a scale is NaN or infinite.
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
    """Return the block format of a tensor of all experts, or None for other tensors and formats."""
    if isinstance(entry, PackedEntry):
        return MXFP4
    if not isinstance(entry, JoinedTensor) or not entry.join.of_experts:
        return None
    forms = {part.encoding.name for part in entry.parts}
    return forms.pop() if len(forms) == 1 and forms <= FORMATS.keys() else None


def stacked_blocks(part: WeightName, entry: TensorEntry, dims: Mapping[str, int]) -> StackedBlocks:
    """Return the reader of a tensor for which `stacked_form` returns a format."""
    if isinstance(entry, PackedEntry):
        # The shape is [E, outputs, inputs].
        read, numbers = [partial(_read_pairs, entry)], np.arange(entry.shape[1])[:, None]
    else:
        # The shape is [E, inputs, outputs].
        assert isinstance(entry, JoinedTensor)
        read = [partial(_read_expert, tensor) for tensor in entry.parts]
        numbers = np.arange(entry.shape[2])
    one_expert = next(part.blocks(dims, 1))
    order = one_expert.arrange(np.broadcast_to(numbers, (1, *entry.shape[1:])))[0, 0]
    form = stacked_form(entry)
    assert form is not None
    return StackedBlocks(form, entry.shape[0], read, order.reshape(-1))


def read_rows(entry: GgufTensor) -> np.ndarray:
    """Read a matrix as GGUF blocks in the kernels' field order, uint8 [outputs, blocks, bytes].

    The rows are converted a few at a time, so that the raw bytes take little memory.

    Raises:
        CheckpointError: a file cannot be read, or a scale is NaN or infinite.
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
