"""Read safetensors files that are not trusted.

The format is 8 bytes of header length (little-endian), a JSON header that maps each tensor's name
to its dtype, shape and byte range, and the data, which the ranges must tile without gap or overlap
(github.com/huggingface/safetensors). The header is parsed here because the reference library
accepts duplicate keys. The data is read, not mapped, because the process would die (SIGBUS) if a
mapped file were truncated.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.config.strict_json import open_regular, parse_object

# The reference library allows 100 MB; a model of 100 billion parameters needs 0.2 MB, and a parsed
# header takes 20 times its size in memory.
MAX_HEADER_BYTES = 8 << 20
# In one checkpoint. The largest model that a config.json may describe has a tenth of it.
MAX_TENSORS = 1 << 17
READ_BYTES = 16 << 20
T = TypeVar("T")

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "F64": np.dtype(np.float64),
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        # Codes of quantized weights, and their shapes.
        "I64": np.dtype(np.int64),
        "I32": np.dtype(np.int32),
        "I8": np.dtype(np.int8),
        "U8": np.dtype(np.uint8),
    }
)
# Dtypes of a weight that is not quantized.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class Shard:
    """A checkpoint file, with the attributes by which a change during loading is detected."""

    path: Path
    # Device, inode, size in bytes, time of last change in nanoseconds.
    identity: tuple[int, int, int, int]

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file has changed since its header was read."""
        with os.fdopen(open_regular(self.path), "rb") as file:
            _check_unchanged(self, file.fileno())


class SharedFile:
    """A reader of checkpoint files for several threads that keeps the last file open.

    Row blocks that are requested in order are read sequentially, so that the kernel reads ahead.
    That needs less work than explicit prefetching, or than opening the file for each row block. A
    lock admits one reading thread at a time. `close` does not take the lock, so the caller must
    call it after all threads have finished.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._shard: Shard | None = None
        self._file: FileIO | None = None
        self._kept: tuple[Any, Any] = None, None

    def kept(self, key: Any, make: Callable[[Any], T]) -> T:
        """Return `make(key)`, and keep it until the method is called with another key."""
        with self._lock:
            if self._kept[0] is not key:
                self._kept = key, make(key)
            return self._kept[1]

    def close(self) -> None:
        self._kept = None, None
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def read(self, shard: Shard, offset: int, values: np.ndarray) -> bool:
        """Fill `values`, uint8, with the bytes of the file at `offset`.

        Returns:
            False if the file ends before `values` is full, otherwise True.

        Raises:
            CheckpointError: the file cannot be read, or changed since its header was read.
        """
        with self._lock:
            file = self._opened(shard)
            file.seek(offset)
            remaining = values.data
            while remaining:
                count = file.readinto(remaining)
                if not count:
                    return False
                remaining = remaining[count:]
            _check_unchanged(shard, file.fileno())
            return True

    def skim(self, shard: Shard, offset: int, size: int, memory: np.ndarray) -> None:
        """Load `size` bytes at `offset` into the system's file cache. `memory` is overwritten.

        This is one system call, preadv, without the interpreter lock. On systems without preadv,
        this does not read.

        Raises:
            CheckpointError: the file cannot be read, or changed since its header was read.
        """
        if not hasattr(os, "preadv"):  # not on every system
            return
        with self._lock:
            pieces = [memory.data] * (size // len(memory))
            rest = memory.data[: size % len(memory)]
            os.preadv(self._opened(shard).fileno(), [*pieces, rest], offset)

    def _opened(self, shard: Shard) -> FileIO:
        if self._file is None or self._shard != shard:
            self.close()
            self._file = os.fdopen(open_regular(shard.path), "rb", buffering=0)
            self._shard = shard
            if hasattr(os, "posix_fadvise"):  # not on every system
                # The kernel then reads ahead twice as far, so that the disk works between reads.
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        _check_unchanged(shard, self._file.fileno())
        return self._file


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint file: `num_bytes` bytes at `offset` from the start of the file."""

    name: str
    shard: Shard
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def read_rows(
        self,
        first: int,
        last: int,
        memory: np.ndarray | None = None,
        file: SharedFile | None = None,
    ) -> np.ndarray:
        """Read the rows [first, last) of the tensor, in its dtype.

        Args:
            first, last: bounds in the tensor's first dimension.
            memory: aligned uint8 memory that the file may be read into. None allocates it.
            file: open file to read from. None opens the file for this call.

        Raises:
            CheckpointError: the file cannot be read, or changed since its header was read.
        """
        raw = self.read_bytes(first, last, memory, file)
        return raw.view(self.dtype).reshape(last - first, *self.shape[1:])

    def read_bytes(
        self,
        first: int,
        last: int,
        memory: np.ndarray | None = None,
        file: SharedFile | None = None,
    ) -> np.ndarray:
        """Return the stored bytes of rows [first, last), flat uint8. See `read_rows` otherwise."""
        size = self.num_bytes // max(1, self.shape[0] if self.shape else 1)
        count = (last - first) * size
        values = np.empty(count, np.uint8) if memory is None else memory[:count]
        with nullcontext(file) if file is not None else closing(SharedFile()) as opened:
            if not opened.read(self.shard, self.offset + first * size, values):
                raise CheckpointError(f"{self.shard.path}: ends inside tensor {self.name!r}")
        return values

    def skim(self, start: int, size: int, memory: np.ndarray, file: SharedFile) -> None:
        """Load `size` bytes of the tensor from `start` on into the file cache (`SharedFile.skim`).

        Raises:
            CheckpointError: the file cannot be read, or changed since its header was read.
        """
        file.skim(self.shard, self.offset + start, size, memory)

    def chunks(self) -> Iterator[bytes]:
        """Yield the tensor's bytes in chunks of 16 MiB. Errors are as in `read_rows`."""
        with os.fdopen(open_regular(self.shard.path), "rb", buffering=0) as file:
            _check_unchanged(self.shard, file.fileno())
            file.seek(self.offset)
            remaining = self.num_bytes
            while remaining:
                block = file.read(min(remaining, READ_BYTES))
                if not block:
                    raise CheckpointError(f"{self.shard.path}: ends inside tensor {self.name!r}")
                remaining -= len(block)
                yield block
            _check_unchanged(self.shard, file.fileno())

    @property
    def rows_together(self) -> int:
        """Row ranges for `read_rows` must begin and end at multiples of this number."""
        return 1

    @property
    def dtype_name(self) -> str:
        """Name of the tensor's dtype in a safetensors header, such as "BF16"."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)


def read_header(path: Path) -> list[TensorEntry]:
    """Read and check the header of a safetensors file, and return its tensors.

    Raises:
        CheckpointError: the header is malformed, or does not fit the file size. The error names the
            file, and the tensor if one is malformed.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        shard = Shard(path, identity(file.fileno()))
        size = shard.identity[2]
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path}: {_describe(path, size)}")
        text = file.read(length)
    if not text.startswith(b"{"):
        raise CheckpointError(f"{path}: {_describe(path, size)}")
    header = parse_object(text, f"{path}: header")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise CheckpointError(f"{path}: describes {len(header)} tensors; allowed: {MAX_TENSORS}")
    entries = [_entry(name, raw, shard, 8 + length) for name, raw in header.items()]
    end, last = 8 + length, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != end:
            what = "overlaps" if entry.offset < end else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {entry.name!r} {what} {last}")
        end, last = entry.offset + entry.num_bytes, f"tensor {entry.name!r}"
    if end != size:
        what = f"is truncated ({end - size} bytes short)"
        if end < size:
            what = f"has {size - end} bytes after the last tensor"
        raise CheckpointError(f"{path}: {what}; its header describes {end} bytes, it has {size}")
    return entries


def _entry(name: str, raw: Any, shard: Shard, start: int) -> TensorEntry:
    """Check a tensor's description in a header, and return its entry. Data begin at `start`."""
    where = f"{shard.path}: tensor {name[:200]!r}"
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: must have dtype, shape and data_offsets, and no more")
    dtype, shape, span = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        allowed = ", ".join(DTYPES)
        raise CheckpointError(f"{where}: dtype {str(dtype)[:80]!r} is not one of {allowed}")
    sizes = [*shape, *span] if isinstance(shape, list) and isinstance(span, list) else [None]
    if any(type(size) is not int or not 0 <= size < 1 << 62 for size in sizes):
        raise CheckpointError(f"{where}: shape and data_offsets must be lists of sizes")
    if (
        len(span) != 2
        or len(shape) > 8
        or span[1] - span[0] != prod(shape) * DTYPES[dtype].itemsize
    ):
        raise CheckpointError(
            f"{where}: data_offsets {span[:3]} do not fit shape {shape[:9]} of dtype {dtype}"
        )
    return TensorEntry(name, shard, DTYPES[dtype], tuple(shape), start + span[0], span[1] - span[0])


def read_tensor(entry: TensorEntry) -> np.ndarray:
    """Read a whole tensor, in its shape and dtype. Errors are as in `TensorEntry.read_rows`."""
    if not entry.shape:
        return entry.read_bytes(0, 1).view(entry.dtype).reshape(())
    return entry.read_rows(0, entry.shape[0])


def _check_unchanged(shard: Shard, descriptor: int) -> None:
    if identity(descriptor) != shard.identity:
        raise CheckpointError(f"{shard.path}: changed while it was being loaded")


def identity(descriptor: int) -> tuple[int, int, int, int]:
    """Return `Shard.identity` of an open file: device, inode, size and modification time."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _describe(path: Path, size: int) -> str:
    """Return why a file is not a safetensors file, as the end of an error text."""
    if size == 0:
        return "is empty"
    with os.fdopen(open_regular(path), "rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the file itself; fetch it with `git lfs pull`"
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "is a PyTorch pickle, not safetensors; convert it, it can run code when loaded"
    length = int.from_bytes(start[:8], "little")
    return (
        f"is not a safetensors file, or truncated: its header would take {length} bytes; "
        f"allowed: 2 to {max(2, min(MAX_HEADER_BYTES, size - 8))} in a file of {size} bytes"
    )
