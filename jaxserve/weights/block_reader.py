"""Read tensors in row blocks, on several threads, into the parameters of a model.

Each row block is read, cast and transposed by one thread, in buffers of that thread. The files are
divided into a few streams of about equal size. Each stream is read sequentially, by one thread at a
time, so that the kernel reads ahead in all of them. Several streams are needed because reading from
a fast disk is mostly kernel time for allocating and copying pages, and one stream would use only
one core for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import prod
from threading import Event
from types import MappingProxyType

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.block_copy import all_finite
from jaxserve.weights.block_targets import BYTES, InPanels, Memory, Strided, TransposedPanels
from jaxserve.weights.fused_parameters import by_path
from jaxserve.weights.layouts import aligned_empty
from jaxserve.weights.panel_rows import PanelPlan
from jaxserve.weights.safetensors import SharedFile, TensorEntry
from pallas_kernels.cpu.panels import PANEL

THREADS = 4
STREAMS = 4
BLOCK_BYTES = 2 << 20  # size of a row block
PANEL_BYTES = 1 << 20  # size of a row block for panels, which are filled from the CPU's cache
AHEAD_BYTES = 256 << 20  # bound on the bytes of each stream that `reading_ahead` reads
SKIM_BYTES = 16 << 20  # smaller reads would spend their time waiting for the interpreter lock
SKIM_MEMORY = 256 << 10  # size of the buffer that `SKIM_BYTES` are read into repeatedly

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]


@dataclass(frozen=True)
class _Job:
    """A row block of a tensor to read into a parameter.

    Attributes:
        parameter: the whole parameter, or its panels.
        ends_part: this is the last row block of its part.
        ends_parameter: this is the last row block of its parameter.
    """

    path: str
    entry: TensorEntry
    file: SharedFile
    into: Strided | InPanels | TransposedPanels
    parameter: np.ndarray
    ends_part: bool
    ends_parameter: bool

    @property
    def num_bytes(self) -> int:
        first, last = self.into.rows
        return self.entry.num_bytes * (last - first) // max(1, self.entry.shape[0])


def read_parameters(
    table: Iterable[WeightName],
    entries: Mapping[str, TensorEntry],
    dims: Mapping[str, int],
    shapes: Shapes,
    report: Callable[[int], None],
    *,
    plans: Mapping[str, PanelPlan] = MappingProxyType({}),
    check_finite: bool = True,
    leave_host: bool = False,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the path and the values (or panels) of each parameter as soon as it is read.

    Each stream holds its current parameter in host memory. With `leave_host`, there are so few
    streams (at least one) that these parameters and a float32 copy of each fit in the memory of the
    largest shard.

    Args:
        table: the tensor of each part of each parameter.
        entries: the tensors of the checkpoint by name.
        dims: sizes of the dimensions that the table names.
        shapes: shapes and dtypes of the parameters, by path.
        report: called after each tensor, or part of one, with the bytes read since its last call.
        plans: plans of the parameters that are read into panels, by path.
        check_finite: refuse NaN and infinity, including overflows of the cast.
        leave_host: the caller copies the parameters to a device, or converts them.

    Raises:
        CheckpointError: a file cannot be read or has changed, or values are not finite.
    """
    groups = _in_order(table, entries)
    done = 0
    window: deque[tuple[_Job, Future[None]]] = deque()
    count = _few_streams(entries, shapes) if leave_host else STREAMS
    memory, files = Memory(), [SharedFile() for _ in range(count)]
    streams = zip(_stretches(groups, entries, count), files, strict=True)
    jobs = _in_step([_jobs(groups, entries, dims, shapes, plans, file) for groups, file in streams])
    pool = ThreadPoolExecutor(THREADS, "read")
    try:
        while True:
            while len(window) < 2 * THREADS and (job := next(jobs, None)) is not None:
                window.append((job, pool.submit(_fill, job, memory, check_finite)))
            if not window:
                return
            job, future = window.popleft()
            future.result()
            done += job.num_bytes
            if job.ends_part:
                report(done)
                done = 0
            if job.ends_parameter:
                # Keep no reference here: the memory is free as soon as the caller drops the array.
                ended = [(job.path, job.parameter)]
                del job
                yield ended.pop()
    finally:
        pool.shutdown(cancel_futures=True)
        for file in files:
            file.close()


@contextmanager
def reading_ahead(
    table: Iterable[WeightName],
    entries: Mapping[str, TensorEntry],
    meanwhile: Callable[[], object],
) -> Iterator[None]:
    """Read the first bytes of each stream into the system's file cache while the body runs.

    The disk thus works while the caller builds the abstract parameters. Errors in a file are not
    raised here, because `read_parameters` raises them later.

    Args:
        table: the tensor of each part of each parameter.
        entries: the tensors of the checkpoint by name.
        meanwhile: function to run on another thread. The context exits after it has returned, and
            raises its exceptions.
    """
    stop = Event()
    pool = ThreadPoolExecutor(STREAMS + 1, "ahead")
    try:
        called = pool.submit(meanwhile)
        for groups in _stretches(_in_order(table, entries), entries, STREAMS):
            names = dict.fromkeys(part.name for parts in groups for part in parts)
            pool.submit(_skim, [entries[name] for name in names], stop)
        yield
        stop.set()
        called.result()
    finally:
        stop.set()
        pool.shutdown()


def _skim(entries: Iterable[TensorEntry], stop: Event) -> None:
    memory, remaining = aligned_empty((SKIM_MEMORY,), BYTES), AHEAD_BYTES
    with closing(SharedFile()) as file:
        for entry in entries:
            for start in range(0, entry.num_bytes, SKIM_BYTES):
                size = min(remaining, entry.num_bytes - start, SKIM_BYTES)
                if stop.is_set() or not size:
                    return
                entry.skim(start, size, memory, file)
                remaining -= size


def _in_order(
    table: Iterable[WeightName], entries: Mapping[str, TensorEntry]
) -> list[list[WeightName]]:
    groups = list(by_path(table).values())
    for parts in groups:
        parts.sort(key=lambda part: (_place(entries[part.name]), part.part))
    groups.sort(key=lambda parts: _place(entries[parts[0].name]))
    return groups


def _place(entry: TensorEntry) -> tuple[str, int]:
    return str(entry.shard.path), entry.offset


def _few_streams(entries: Mapping[str, TensorEntry], shapes: Shapes) -> int:
    # See `read_parameters` for the memory bound.
    shards: Counter[str] = Counter()
    for entry in entries.values():
        shards[str(entry.shard.path)] += entry.num_bytes
    largest = max(
        (prod(shape) * (dtype.itemsize + 4) for shape, dtype in shapes.values()), default=1
    )
    return max(1, min(STREAMS, max(shards.values(), default=0) // largest))


def _stretches(
    groups: Sequence[list[WeightName]], entries: Mapping[str, TensorEntry], count: int
) -> list[list[list[WeightName]]]:
    """Divide the parameters, in their order, into `count` lists of about equal bytes.

    Each parameter is the list of its tensors, in `groups` and in the result.
    """
    sizes = [sum(entries[part.name].num_bytes for part in parts) for parts in groups]
    total, before = max(1, sum(sizes)), 0
    streams: list[list[list[WeightName]]] = [[] for _ in range(count)]
    for parts, size in zip(groups, sizes, strict=True):
        # By the middle of the group. A last group of zero bytes would be past the last list.
        streams[min(count - 1, (2 * before + size) * count // (2 * total))].append(parts)
        before += size
    return streams


def _in_step(streams: Iterable[Iterator[_Job]]) -> Iterator[_Job]:
    # Yields all jobs, the next one always from the stream with the fewest bytes so far.
    far = dict.fromkeys(streams, 0)
    while far:
        stream = min(far, key=far.__getitem__)
        job = next(stream, None)
        if job is None:
            del far[stream]
        else:
            far[stream] += job.num_bytes
            yield job


def _jobs(
    groups: Iterable[list[WeightName]],
    entries: Mapping[str, TensorEntry],
    dims: Mapping[str, int],
    shapes: Shapes,
    plans: Mapping[str, PanelPlan],
    file: SharedFile,
) -> Iterator[_Job]:
    """Yield a job for each row block of a stream, and allocate each parameter at its first one.

    `groups` are the tensors of each parameter, and `file` is the reader of the stream.
    """
    for parts in groups:
        path = parts[0].path
        plan = plans.get(path)
        panels = None if plan is None else (plan.weight.values.shape, plan.weight.values.dtype)
        parameter = aligned_empty(*(panels or shapes[path]))
        if plan is not None and prod(plan.weight.outputs) % PANEL:
            parameter[..., -1, :, :] = 0  # padding after the last output
        for part in parts:
            entry = entries[part.name]
            if plan is None:
                goals = list(_strided(part, entry, parameter[part.index], dims))
            else:
                goals = list(_in_panels(plan, part, entry, parameter, dims))
            for into in goals:
                ends = into is goals[-1]
                last = ends and part is parts[-1]
                yield _Job(path, entry, file, into, parameter, ends, last)


def _strided(
    part: WeightName, entry: TensorEntry, whole: np.ndarray, dims: Mapping[str, int]
) -> Iterator[Strided]:
    for block in part.blocks(dims, BLOCK_BYTES // entry.dtype.itemsize):
        yield Strided(block, whole[block.index])


def _in_panels(
    plan: PanelPlan,
    part: WeightName,
    entry: TensorEntry,
    parameter: np.ndarray,
    dims: Mapping[str, int],
) -> Iterator[InPanels | TransposedPanels]:
    dtype = np.dtype(plan.weight.dtype)
    if plan.rows is None:
        for block, panels in zip(part.blocks(dims, 1), parameter, strict=True):
            yield TransposedPanels(block, panels, dtype)
        return
    parameter = parameter.reshape(-1, *parameter.shape[-2:])
    for run in plan.rows[part.name, part.part]:
        for block in run.blocks(entry, PANEL_BYTES):
            end = (block.column or 0) + block.rows[1] - block.rows[0]
            panels = parameter[block.panel : block.panel - (-end // PANEL)]
            yield InPanels(block.rows, panels, dtype, block.column)


def _fill(job: _Job, memory: Memory, check_finite: bool) -> None:
    room = memory.of("read", job.num_bytes)
    rows = job.entry.read_rows(*job.into.rows, room, job.file)
    if not job.into.fill(rows, memory, check_finite):
        raise _not_finite(rows, job.entry, job.into.dtype)


def _not_finite(rows: np.ndarray, entry: TensorEntry, dtype: np.dtype) -> CheckpointError:
    where = f"{entry.shard.path}: tensor {entry.name!r}"
    if all_finite(rows):
        largest = np.abs(rows).max()
        return CheckpointError(f"{where}: its largest value {largest} is too large for {dtype}")
    return CheckpointError(f"{where}: holds NaN or infinity")
