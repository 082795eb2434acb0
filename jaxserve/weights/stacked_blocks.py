"""Read the quantized blocks of one expert from a tensor that holds all experts' matrices.

gpt-oss stores its experts in this way. A GGUF file has two tensors [E, outputs, inputs], for gate
and up projections. A Hugging Face checkpoint has one tensor, whose outputs alternate between the
two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.gguf.blocks import are_finite, rows_of_blocks
from jaxserve.weights.gguf.file import GgufTensor
from jaxserve.weights.gguf.joined import JoinedTensor
from jaxserve.weights.host_matrix import HostMatrix
from jaxserve.weights.mxfp4 import PackedEntry, rows_of_pairs
from jaxserve.weights.safetensors import SharedFile, TensorEntry
from pallas_kernels.cpu.blocks import FORMATS

PIECE_BYTES = 4 << 20
MXFP4 = "MXFP4"


def stacked_form(entry: TensorEntry) -> str | None:
    """Return the block format of a tensor of all experts' matrices that can stay in blocks.

    The result is None for other tensors, and for formats that the kernels do not read.
    """
    if isinstance(entry, PackedEntry):
        return MXFP4
    if not isinstance(entry, JoinedTensor) or not entry.join.of_experts:
        return None
    forms = {part.encoding.name for part in entry.parts}
    return forms.pop() if len(forms) == 1 and forms <= FORMATS.keys() else None


def stacked_reader(
    part: WeightName, entry: TensorEntry, dims: Mapping[str, int]
) -> Callable[[int], HostMatrix]:
    """Return a function that reads the matrix of one expert, given the expert's index.

    The matrix stays in blocks, with outputs in the model's order. The function raises
    CheckpointError if a file cannot be read, or a scale is NaN or infinite.

    Args:
        part: place of the tensor in the model.
        entry: a tensor for which `stacked_form` returns a format.
        dims: sizes of the dimensions that the table of weights names.
    """
    # Outputs are numbered by taking one from each tensor in turn.
    if isinstance(entry, PackedEntry):
        # The shape is [E, outputs, inputs].
        reads, numbers = [partial(_read_pairs, entry)], np.arange(entry.shape[1])[:, None]
    else:
        # The shape is [E, inputs, outputs].
        assert isinstance(entry, JoinedTensor)
        reads = [partial(_read_expert, tensor) for tensor in entry.parts]
        numbers = np.arange(entry.shape[2])
    one_expert = next(part.blocks(dims, 1))
    order = one_expert.arrange(np.broadcast_to(numbers, (1, *entry.shape[1:])))[0, 0].reshape(-1)
    form, turns = stacked_form(entry), len(reads)
    assert form is not None

    def read(expert: int) -> HostMatrix:
        whole: np.ndarray | None = None
        for turn, read_rows_of in enumerate(reads):
            rows = read_rows_of(expert)
            if whole is None:
                whole = np.empty((len(order), *rows.shape[1:]), np.uint8)
            places = np.flatnonzero(order % turns == turn)
            whole[places] = rows[order[places] // turns]
        assert whole is not None
        return HostMatrix(form, whole)

    return read


def read_rows(entry: GgufTensor) -> np.ndarray:
    """Return a GGUF matrix as blocks in the kernels' field order, uint8 [outputs, blocks, bytes].

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
            raw = entry.read_stored(first, last, None, file)
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
