"""Read tensors block by block, on several threads, into the parameters that they fill.

A block is read, cast and transposed by one thread. Threads take turns in reading, so that the disk
sees one reader going from one end to the other, for whom the kernel reads ahead while all threads
compute. Each thread holds one block besides the parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from math import prod
from threading import local

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.weight_table import Block, WeightName
from jaxserve.weights.copying import SCRATCH_BYTES, all_finite, copy_checked
from jaxserve.weights.safetensors import SharedFile, TensorEntry

THREADS = 4
BLOCK_BYTES = 8 << 20  # read at a time
ALIGNMENT = 64  # JAX takes arrays over without a copy where they begin at such an address

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]


class _Memory(local):
    """What one thread reads into and casts in, over and over.

    Fresh memory for each block would cost more than reading it: the kernel clears every page.
    """

    def __init__(self) -> None:
        self._block = aligned_empty((0,), np.dtype(np.uint8))
        self.scratch = aligned_empty((SCRATCH_BYTES,), np.dtype(np.uint8))

    def of(self, size: int) -> np.ndarray:
        """At least so many bytes."""
        if len(self._block) < size:
            self._block = aligned_empty((size,), np.dtype(np.uint8))
        return self._block


@dataclass(frozen=True)
class _Job:
    """A block to be read, and whether it is the last of its part and of its parameter."""

    path: str
    entry: TensorEntry
    block: Block
    parameter: np.ndarray
    target: np.ndarray
    num_bytes: int
    ends_part: bool
    ends_parameter: bool


def read_parameters(
    table: Iterable[WeightName],
    entries: Mapping[str, TensorEntry],
    dims: Mapping[str, int],
    shapes: Shapes,
    report: Callable[[int], None],
    *,
    check_finite: bool = True,
) -> Iterator[tuple[str, np.ndarray]]:
    """Each parameter's path and values, in the order of the files.

    Args:
        table: which tensor fills what.
        entries: where each tensor lies.
        dims: sizes of the letters in the table's layouts.
        shapes: of the parameters by path, and their dtypes.
        report: told the bytes of each tensor, or part of one, that has been read.
        check_finite: refuse NaN and infinity, also where the cast makes them.

    Raises:
        CheckpointError: a file cannot be read or has changed, or values are not finite.
    """
    table = sorted(table, key=lambda part: part.path)
    groups = [list(parts) for _, parts in groupby(table, key=lambda part: part.path)]
    for parts in groups:
        parts.sort(key=lambda part: (_place(entries[part.name]), part.part))
    groups.sort(key=lambda parts: _place(entries[parts[0].name]))
    done = 0
    window: deque[tuple[_Job, Future[None]]] = deque()
    jobs = _jobs(groups, entries, dims, shapes)
    memory, file = _Memory(), SharedFile()
    pool = ThreadPoolExecutor(THREADS, "read")
    try:
        while True:
            while len(window) < 2 * THREADS and (job := next(jobs, None)) is not None:
                window.append((job, pool.submit(_fill, job, file, memory, check_finite)))
            if not window:
                return
            job, future = window.popleft()
            future.result()
            done += job.num_bytes
            if job.ends_part:
                report(done)
                done = 0
            if job.ends_parameter:
                yield job.path, job.parameter
    finally:
        pool.shutdown(cancel_futures=True)
        file.close()


def _place(entry: TensorEntry) -> tuple[str, int]:
    return str(entry.shard.path), entry.offset


def _jobs(
    groups: Iterable[list[WeightName]],
    entries: Mapping[str, TensorEntry],
    dims: Mapping[str, int],
    shapes: Shapes,
) -> Iterator[_Job]:
    """Every block in order; a parameter is allocated with its first one."""
    for parts in groups:
        path = parts[0].path
        parameter = aligned_empty(*shapes[path])
        for part in parts:
            entry, whole = entries[part.name], parameter[part.at]
            blocks = list(part.blocks(dims, BLOCK_BYTES // entry.dtype.itemsize))
            for block in blocks:
                first, last = block.rows
                ends = block is blocks[-1]
                yield _Job(
                    path,
                    entry,
                    block,
                    parameter,
                    whole[block.at],
                    entry.num_bytes * (last - first) // max(1, entry.shape[0]),
                    ends,
                    ends and part is parts[-1],
                )


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array whose memory JAX can use as it is."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _fill(job: _Job, file: SharedFile, memory: _Memory, check_finite: bool) -> None:
    rows = job.entry.read_rows(*job.block.rows, memory.of(job.num_bytes), file)
    source = job.block.arrange(rows)
    if not copy_checked(job.target, source, memory.scratch, check_finite):
        raise _not_finite(rows, job.entry, job.target.dtype)


def _not_finite(rows: np.ndarray, entry: TensorEntry, dtype: np.dtype) -> CheckpointError:
    where = f"{entry.shard.path}: tensor {entry.name!r}"
    if all_finite(rows):
        largest = np.abs(rows).max()
        return CheckpointError(f"{where}: its largest value {largest} is too large for {dtype}")
    return CheckpointError(f"{where}: holds NaN or infinity")
