"""Load matrices that stay quantized in the blocks of a GGUF or MXFP4 checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from flax import nnx

from jaxserve.models.placed_weight import PlacedWeight, SplitWeight
from jaxserve.models.transposed_weight import TransposedWeight
from jaxserve.models.weight_table import WeightName
from jaxserve.settings.config import cpu_threads
from jaxserve.weights.block_codes import codes_of
from jaxserve.weights.fused_parameters import (
    by_expert,
    by_path,
    contracted,
    fused,
    holds_experts,
    joined,
    stacked,
)
from jaxserve.weights.gguf.file import GgufTensor
from jaxserve.weights.gguf.joined import JoinedTensor
from jaxserve.weights.heads import are_heads, heads_of
from jaxserve.weights.host_matrix import HostMatrix
from jaxserve.weights.mxfp4 import PackedEntry
from jaxserve.weights.placement import block_inputs
from jaxserve.weights.safetensors import TensorEntry
from jaxserve.weights.stacked_blocks import read_rows, stacked_form, stacked_reader
from pallas_kernels.cpu.blocks import FORMATS

Parameters = Mapping[str, nnx.Param[Any]]


def block_parts(
    table: Iterable[WeightName],
    entries: Mapping[str, TensorEntry],
    parameters: Parameters,
    on_cpu: bool,
) -> dict[str, list[WeightName]]:
    """Return the tensors of each parameter that can stay in its file's blocks, by parameter path.

    All tensors of the parameter must be in formats that the kernels read. On CPU, the embedding may
    stay in blocks too. On a GPU, only matrices of the layers stay quantized.
    """
    parts_by_path: dict[str, list[WeightName]] = {}
    for path, parts in by_path(table).items():
        parameter, tensors = parameters[path], [entries[part.name] for part in parts]
        forms = {_form_that_stays(entry, on_cpu) for entry in tensors}
        if np.dtype(parameter.dtype).itemsize > 4 or None in forms:
            continue
        is_matrix = (block_inputs if on_cpu else contracted)(parameter) is not None
        if is_matrix or (holds_experts(parameter) and len(forms) == 1):
            parts_by_path[path] = parts
    return parts_by_path


@dataclass(frozen=True)
class BlockMatrices:
    """Reader of parameters that stay quantized: GGUF blocks on CPU, codes with scales on a GPU.

    Attributes:
        entries: the tensors by name.
        dims: sizes of the dimensions that the table of weights names.
        on_cpu: keep the blocks.
        is_read: read the tensors. Otherwise matrices are descriptions, and no file is opened.
    """

    entries: Mapping[str, TensorEntry]
    dims: Mapping[str, int]
    on_cpu: bool
    is_read: bool = True

    def parameter(
        self, parts: Sequence[WeightName], parameter: nnx.Param[Any]
    ) -> PlacedWeight | SplitWeight | TransposedWeight:
        """Read one parameter into NumPy arrays, or return its shapes if `is_read` is false.

        Of the matrices of experts only a few are held besides the result.

        Args:
            parts: the tensors of the parameter; see `block_parts`.
            parameter: the parameter of the model.

        Raises:
            CheckpointError: a file cannot be read, or a scale is NaN or infinite.
        """
        shape, dtype = tuple(parameter.shape), np.dtype(parameter.dtype).name
        if are_heads(parts):
            matrix = self._matrix(parts[0].name)
            return heads_of([(part, matrix) for part in parts], parameter, self.dims, dtype)
        contract = (block_inputs if self.on_cpu else contracted)(parameter)
        if contract is None:
            return stacked(self._experts(parts, shape), shape[0], shape[2:], dtype)
        matrices = {name: self._matrix(name) for name in {part.name for part in parts}}
        pairs = [(part, matrices[part.name]) for part in parts]
        outputs = shape[contract:] if contract else shape[:1]
        return fused(pairs, outputs, contract, self.dims, dtype)

    def _matrix(self, name: str) -> HostMatrix:
        entry = self.entries[name]
        if not self.is_read:
            return self._described(entry, entry.shape[1], entry.shape[0])
        assert isinstance(entry, GgufTensor)
        # In the order of outputs of the Hugging Face checkpoint, not of llama.cpp.
        rows = entry.in_order(read_rows(entry))
        return self._converted(HostMatrix(entry.encoding.name, rows, order=entry.input_order))

    def _experts(
        self, parts: Sequence[WeightName], shape: tuple[int, ...]
    ) -> Callable[[int], HostMatrix]:
        """Return a function that reads the matrix of one expert, given the expert's index.

        `shape` is the shape of the parameter, [E, inputs, outputs...].
        """
        first = self.entries[parts[0].name]
        if not self.is_read:
            return lambda _: self._described(first, shape[1], prod(shape[2:]))
        if stacked_form(first) is not None:
            read = stacked_reader(parts[0], first, self.dims)
            return lambda expert: self._converted(read(expert))
        experts = by_expert(parts)

        def matrix_of(expert: int) -> HostMatrix:
            pairs = [(part, self._matrix(part.name)) for part in experts[expert]]
            return joined(pairs, shape[2:], 1, self.dims)

        return matrix_of

    def _described(self, entry: TensorEntry, inputs: int, outputs: int) -> HostMatrix:
        form = _form_that_stays(entry, on_cpu=True)
        assert form is not None  # `block_parts` has found it
        order = entry.input_order if isinstance(entry, GgufTensor) else None
        return self._converted(HostMatrix.described(form, (inputs, outputs), order=order))

    def _converted(self, rows: HostMatrix) -> HostMatrix:
        return rows if self.on_cpu else codes_of(rows)


def read_blocks(
    matrices: BlockMatrices,
    parts: Mapping[str, Sequence[WeightName]],
    parameters: Parameters,
    leave_host: bool,
) -> Iterator[tuple[str, PlacedWeight | SplitWeight | TransposedWeight]]:
    """Read parameters that stay quantized, and yield (path, value) of each in the order of `parts`.

    Args:
        matrices: reader of the tensors.
        parts: the tensors of each parameter, by path (see `block_parts`).
        parameters: the parameters of the model by path.
        leave_host: the caller copies each parameter to a device while only the next one is read.

    Raises:
        CheckpointError: a file cannot be read, or a scale is NaN or infinite.
    """

    def read(path: str) -> Any:
        return matrices.parameter(parts[path], parameters[path])

    # NumPy releases the interpreter lock. Codes for a GPU take 4 bytes a weight while they are
    # converted, so only two threads do that.
    threads = cpu_threads() if matrices.on_cpu else min(2, cpu_threads())
    with ThreadPoolExecutor(threads) as pool:
        yield from _ahead(pool, read, parts, 1 if leave_host else 2 * threads)


def _ahead(
    pool: ThreadPoolExecutor, read: Callable[[str], Any], paths: Iterable[str], count: int
) -> Iterator[tuple[str, Any]]:
    # Yields pairs of path and `read(path)` in order, with up to `count` further reads in progress.
    waiting: deque[tuple[str, Future[Any]]] = deque()
    for path in paths:
        waiting.append((path, pool.submit(read, path)))
        if len(waiting) > count:
            # popleft releases the result here, so that the caller holds the only reference.
            yield waiting[0][0], waiting.popleft()[1].result()
    while waiting:
        yield waiting[0][0], waiting.popleft()[1].result()


def _form_that_stays(entry: TensorEntry, on_cpu: bool) -> str | None:
    """Return the block format of a tensor that can stay quantized in blocks, None for others.

    On a GPU, MXFP4 tensors of Hugging Face checkpoints are widened instead, because float16 would
    round some of their scales.
    """
    if isinstance(entry, PackedEntry):
        return stacked_form(entry) if on_cpu else None
    if isinstance(entry, JoinedTensor):
        return stacked_form(entry)
    if not isinstance(entry, GgufTensor) or len(entry.shape) != 2 or entry.restore:
        return None
    return entry.encoding.name if entry.encoding.name in FORMATS else None
