"""Matrices of a GGUF file that stay in its blocks."""

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
    """Return, by path, the tensors of the parameters that can stay in blocks.

    On CPU those of the embedding are among them; a GPU multiplies the layers' matrices alone.
    """
    ordered = sorted(table, key=lambda part: part.path)
    found: dict[str, list[WeightName]] = {}
    for path, group in groupby(ordered, key=lambda part: part.path):
        parts = list(group)
        parameter, own = parameters[path], [entries[part.name] for part in parts]
        forms = {_form_that_stays(entry, on_cpu) for entry in own}
        if np.dtype(parameter.dtype).itemsize > 4 or None in forms:
            continue
        is_matrix = (block_inputs if on_cpu else contracted)(parameter) is not None
        if is_matrix or (holds_experts(parameter) and len(forms) == 1):
            found[path] = parts
    return found


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
    """Read the parameters that stay in blocks into `values`, by path; return the rest of the table.

    For a CPU's products they are laid out in panels, for a GPU's they become codes with scales.
    Where what is read is not what stays (`leave_host`), one more is read while one is finished.

    Raises:
        CheckpointError: a file that cannot be read, or scales that are no numbers.
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

    # NumPy lets other threads run meanwhile. Codes take 4 bytes a weight on their way to a GPU.
    threads = cpu_threads() if on_cpu else min(2, cpu_threads())
    with ThreadPoolExecutor(threads) as pool:
        for path, made in _ahead(pool, read, parts, 1 if leave_host else 2 * threads):
            values[path] = finish(path, made)
            del made
            report(sum(entries[name].num_bytes for name in {part.name for part in parts[path]}))
    return [weight for weight in table if weight.path not in parts]


def _ahead(
    pool: ThreadPoolExecutor, read: Callable[[str], Any], paths: Iterable[str], count: int
) -> Iterator[tuple[str, Any]]:
    """Yield each path and what is read of it, in order, while at most `count` more are read."""
    waiting: deque[tuple[str, Future[Any]]] = deque()
    for path in paths:
        waiting.append((path, pool.submit(read, path)))
        if len(waiting) > count:
            yield waiting[0][0], waiting.popleft()[1].result()  # which this keeps no longer
    while waiting:
        yield waiting[0][0], waiting.popleft()[1].result()


def _experts(
    parts: Sequence[WeightName],
    entries: Mapping[str, TensorEntry],
    parameter: nnx.Param[Any],
    dims: Mapping[str, int],
) -> BlockPanels:
    """Read every expert's matrix, one after the other."""
    outputs, dtype = parameter.shape[2:], np.dtype(parameter.dtype).name
    stack = _stack(parts, entries, dims)
    if stack is not None:
        rows = map(stack.rows_of, range(stack.count))
        return BlockPanels.of_experts(rows, stack.count, stack.form, dtype, outputs)
    own: dict[Any, list[WeightName]] = {}
    for part in parts:
        own.setdefault(part.index[0], []).append(replace(part, index=part.index[1:] or (...,)))

    def rows_of(expert: int) -> np.ndarray:
        pairs = [(part, _read(entries[part.name])) for part in own[expert]]
        return joined_blocks(pairs, outputs, 1, dims)

    form = form_of(entries[parts[0].name])
    return BlockPanels.of_experts(map(rows_of, sorted(own)), len(own), form, dtype, outputs)


def _stack(
    parts: Sequence[WeightName], entries: Mapping[str, TensorEntry], dims: Mapping[str, int]
) -> StackedBlocks | None:
    """Return the experts of a parameter that is one tensor; None where each has tensors."""
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
    """Return the inputs of a block, by path, of the parameters that stay in a file's blocks.

    On a GPU those of a scale: blocks become codes.
    """
    sizes: dict[str, int] = {}
    for path, parts in block_parts(table, entries, parameters, on_cpu).items():
        made = [FORMATS[form_of(entries[part.name])] for part in parts]
        sizes[path] = max(format_.size if on_cpu else format_.run for format_ in made)
    return sizes


def _form_that_stays(entry: TensorEntry, on_cpu: bool) -> str | None:
    """Return the format of a tensor that can stay in blocks; None for others.

    On a GPU the MXFP4 of a Hugging Face checkpoint is widened, which no scale of it is rounded in.
    """
    if isinstance(entry, PackedEntry):
        return stacked_form(entry) if on_cpu else None
    if isinstance(entry, JoinedTensor):
        return stacked_form(entry)
    if not isinstance(entry, GgufTensor) or len(entry.shape) != 2 or entry.added:
        return None
    return entry.encoding.name if entry.encoding.name in FORMATS else None


def _read(entry: TensorEntry) -> BlockRows:
    """Read a matrix in blocks, its outputs in the order of the checkpoint."""
    assert isinstance(entry, GgufTensor)
    return BlockRows(entry.encoding.name, entry.in_order(read_rows(entry)))
