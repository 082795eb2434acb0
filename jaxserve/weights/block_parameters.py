"""Load matrices that stay quantized in the blocks of a GGUF or MXFP4 checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from flax import nnx

from jaxserve.models.panels import BlockPanels
from jaxserve.models.weight_table import WeightName
from jaxserve.settings.config import cpu_threads
from jaxserve.weights.block_codes import codes_of
from jaxserve.weights.codes import Codes
from jaxserve.weights.expert_codes import fused_experts, stacked_codes
from jaxserve.weights.fused_parameters import fused, fused_blocks, joined_blocks
from jaxserve.weights.gguf.blocks import BlockRows
from jaxserve.weights.gguf.file import GgufTensor
from jaxserve.weights.gguf.joined import JoinedTensor
from jaxserve.weights.mxfp4 import PackedEntry
from jaxserve.weights.placement import Finish, block_inputs, contracted, holds_experts
from jaxserve.weights.safetensors import TensorEntry
from jaxserve.weights.stacked_blocks import (
    StackedBlocks,
    read_rows,
    stacked_blocks,
    stacked_form,
)
from pallas_kernels.cpu.blocks import FORMATS

Parameters = Mapping[str, nnx.Param[Any]]


def block_parts(
    table: Iterable[WeightName],
    entries: Mapping[str, TensorEntry],
    parameters: Parameters,
    on_cpu: bool,
) -> dict[str, list[WeightName]]:
    """Return the parameters that can stay quantized in file blocks, as path to tensor names.

    On CPU, this includes the embedding. On a GPU, only the matrices of the layers stay quantized.
    """
    ordered = sorted(table, key=lambda part: part.path)
    parts_by_path: dict[str, list[WeightName]] = {}
    for path, group in groupby(ordered, key=lambda part: part.path):
        parts = list(group)
        parameter, tensors = parameters[path], [entries[part.name] for part in parts]
        forms = {_form_that_stays(entry, on_cpu) for entry in tensors}
        if np.dtype(parameter.dtype).itemsize > 4 or None in forms:
            continue
        is_matrix = (block_inputs if on_cpu else contracted)(parameter) is not None
        if is_matrix or (holds_experts(parameter) and len(forms) == 1):
            parts_by_path[path] = parts
    return parts_by_path


def read_blocks(
    table: list[WeightName],
    entries: Mapping[str, TensorEntry],
    parameters: Parameters,
    dims: Mapping[str, int],
    report: Callable[[int], None],
    values: dict[str, Any],
    finish: Finish,
    on_cpu: bool,
    leave_host: bool,
) -> list[WeightName]:
    """Read the parameters that stay quantized, and add them to `values` by path.

    On CPU, the blocks are laid out in panels. On a GPU, they become codes with scales. With
    `leave_host`, one parameter is read while the previous one is copied to the devices. Returns
    the rows of `table` for all other parameters.

    Raises:
        CheckpointError: a file cannot be read, or a scale is NaN or infinite.
    """
    parts = block_parts(table, entries, parameters, on_cpu)

    def read_codes(path: str) -> Any:
        parameter, contract = parameters[path], contracted(parameters[path])
        stack = _stack(parts[path], entries, dims)
        if stack is not None:

            def codes_of_expert(expert: int) -> Codes:
                return codes_of(BlockRows(stack.form, stack.rows_of(expert)))

            return stacked_codes(codes_of_expert, stack.count, parameter.shape[2:])
        codes = {name: codes_of(_read(entries[name])) for name in {p.name for p in parts[path]}}
        pairs = [(part, codes[part.name]) for part in parts[path]]
        if contract is None:
            return fused_experts(pairs, parameter.shape, dims)
        return fused(pairs, parameter.shape, contract, dims)

    def read(path: str) -> Any:
        if not on_cpu:
            return read_codes(path)
        parameter, contract = parameters[path], block_inputs(parameters[path])
        if contract is None:
            return _experts(parts[path], entries, parameter, dims)
        rows = {name: _read(entries[name]) for name in {part.name for part in parts[path]}}
        outputs = parameter.shape[contract:] if contract else parameter.shape[:1]
        pairs = [(part, rows[part.name]) for part in parts[path]]
        return fused_blocks(pairs, outputs, contract, dims, np.dtype(parameter.dtype).name)

    # NumPy releases the interpreter lock. Codes for a GPU take 4 bytes a weight while they are
    # converted, so only two threads do that.
    threads = cpu_threads() if on_cpu else min(2, cpu_threads())
    with ThreadPoolExecutor(threads) as pool:
        for path, value in _ahead(pool, read, parts, 1 if leave_host else 2 * threads):
            values[path] = finish(path, value)
            del value
            report(sum(entries[name].num_bytes for name in {part.name for part in parts[path]}))
    return [weight for weight in table if weight.path not in parts]


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


def _experts(
    parts: Sequence[WeightName],
    entries: Mapping[str, TensorEntry],
    parameter: nnx.Param[Any],
    dims: Mapping[str, int],
) -> BlockPanels:
    """Read the matrices of all experts, still in blocks, into the panels of one parameter.

    Only one expert's matrix is held besides the panels.
    """
    outputs, dtype = parameter.shape[2:], np.dtype(parameter.dtype).name
    stack = _stack(parts, entries, dims)
    if stack is not None:
        rows = map(stack.rows_of, range(stack.count))
        return BlockPanels.of_experts(rows, stack.count, stack.form, dtype, outputs)
    by_expert: dict[Any, list[WeightName]] = {}
    for part in parts:
        by_expert.setdefault(part.index[0], []).append(
            replace(part, index=part.index[1:] or (...,))
        )

    def rows_of(expert: int) -> np.ndarray:
        pairs = [(part, _read(entries[part.name])) for part in by_expert[expert]]
        return joined_blocks(pairs, outputs, 1, dims)

    form = form_of(entries[parts[0].name])
    return BlockPanels.of_experts(
        map(rows_of, sorted(by_expert)), len(by_expert), form, dtype, outputs
    )


def _stack(
    parts: Sequence[WeightName], entries: Mapping[str, TensorEntry], dims: Mapping[str, int]
) -> StackedBlocks | None:
    entry = entries[parts[0].name]
    return None if stacked_form(entry) is None else stacked_blocks(parts[0], entry, dims)


def form_of(entry: TensorEntry) -> str:
    """Return the format of a tensor that can stay in blocks, as `block_parts` has found it."""
    form = _form_that_stays(entry, on_cpu=True)
    assert form is not None
    return form


def block_sizes(
    table: Iterable[WeightName],
    entries: Mapping[str, TensorEntry],
    parameters: Parameters,
    on_cpu: bool,
) -> dict[str, int]:
    """Return the inputs per block of the parameters that stay in a file's blocks, by path.

    On a GPU, where blocks become codes, this is the number of inputs that share a scale.
    """
    sizes: dict[str, int] = {}
    for path, parts in block_parts(table, entries, parameters, on_cpu).items():
        formats = [FORMATS[form_of(entries[part.name])] for part in parts]
        sizes[path] = max(format_.size if on_cpu else format_.run for format_ in formats)
    return sizes


def _form_that_stays(entry: TensorEntry, on_cpu: bool) -> str | None:
    """Return the block format of a tensor if it can stay in blocks, otherwise None.

    On a GPU, MXFP4 tensors of Hugging Face checkpoints are widened instead, because float16 would
    round some of their scales.
    """
    if isinstance(entry, PackedEntry):
        return stacked_form(entry) if on_cpu else None
    if isinstance(entry, JoinedTensor):
        return stacked_form(entry)
    if not isinstance(entry, GgufTensor) or len(entry.shape) != 2 or entry.added:
        return None
    return entry.encoding.name if entry.encoding.name in FORMATS else None


def _read(entry: TensorEntry) -> BlockRows:
    # In the order of outputs of the Hugging Face checkpoint, not of llama.cpp.
    assert isinstance(entry, GgufTensor)
    return BlockRows(entry.encoding.name, entry.in_order(read_rows(entry)))
