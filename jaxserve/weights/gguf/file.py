"""Read GGUF files that are not trusted.

The format (github.com/ggml-org/ggml, docs/gguf.md) is: counts, metadata with typed keys, a table of
tensors, and their data. The header is parsed here, because the reference reader maps the file (the
process would die if a mapped file were truncated), trusts every count, and creates an array for
each token. Values are unpacked by the functions of the `gguf` package.
"""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.config.strict_json import open_regular
from jaxserve.settings.model_name import MAGIC
from jaxserve.weights.safetensors import MAX_TENSORS, Shard, SharedFile, TensorEntry, identity

VERSIONS = (2, 3)
# A vocabulary of 256 thousand tokens with its merges takes 15 MB.
MAX_HEADER_BYTES = 128 << 20
MAX_KEYS = 1 << 14
MAX_KEY_BYTES = 1 << 16
MAX_STRINGS = 1 << 22  # in one array
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16

# Format letter of `struct` for each type number of a metadata value.
SCALARS: Mapping[int, str] = MappingProxyType(
    dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
)
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Encoding:
    """Storage format of a GGUF tensor: blocks of consecutive values in a row.

    Attributes:
        name: name in the package gguf.
        values: number of values in a block.
        num_bytes: size of a block.
        dtype: dtype of the unpacked values.
    """

    name: str
    values: int
    num_bytes: int
    dtype: np.dtype

    @property
    def is_packed(self) -> bool:
        return self.values > 1


_FLOAT32 = np.dtype(np.float32)
ENCODINGS: Mapping[int, Encoding] = MappingProxyType(
    {
        0: Encoding("F32", 1, 4, _FLOAT32),
        1: Encoding("F16", 1, 2, np.dtype(np.float16)),
        2: Encoding("Q4_0", 32, 18, _FLOAT32),
        3: Encoding("Q4_1", 32, 20, _FLOAT32),
        6: Encoding("Q5_0", 32, 22, _FLOAT32),
        7: Encoding("Q5_1", 32, 24, _FLOAT32),
        8: Encoding("Q8_0", 32, 34, _FLOAT32),
        10: Encoding("Q2_K", 256, 84, _FLOAT32),
        11: Encoding("Q3_K", 256, 110, _FLOAT32),
        12: Encoding("Q4_K", 256, 144, _FLOAT32),
        13: Encoding("Q5_K", 256, 176, _FLOAT32),
        14: Encoding("Q6_K", 256, 210, _FLOAT32),
        # The formats below are widened as they are read, except IQ4_NL, IQ4_XS and MXFP4.
        16: Encoding("IQ2_XXS", 256, 66, _FLOAT32),
        17: Encoding("IQ2_XS", 256, 74, _FLOAT32),
        18: Encoding("IQ3_XXS", 256, 98, _FLOAT32),
        19: Encoding("IQ1_S", 256, 50, _FLOAT32),
        20: Encoding("IQ4_NL", 32, 18, _FLOAT32),
        21: Encoding("IQ3_S", 256, 110, _FLOAT32),
        22: Encoding("IQ2_S", 256, 82, _FLOAT32),
        23: Encoding("IQ4_XS", 256, 136, _FLOAT32),
        29: Encoding("IQ1_M", 256, 56, _FLOAT32),
        30: Encoding("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
        34: Encoding("TQ1_0", 256, 54, _FLOAT32),
        35: Encoding("TQ2_0", 256, 66, _FLOAT32),
        39: Encoding("MXFP4", 32, 17, _FLOAT32),
        40: Encoding("NVFP4", 64, 36, _FLOAT32),
    }
)


@dataclass(frozen=True)
class GgufTensor(TensorEntry):
    """A tensor of a GGUF file, read in the dtype and row order of the Hugging Face checkpoint.

    Attributes:
        encoding: storage format.
        heads: number of heads, if their rows are permuted, otherwise 0. The file stores the rows of
            a head in the order `0, half, 1, half + 1, ...`, because llama.cpp rotates neighbours
            instead of halves.
        restore: computes the checkpoint's values from the file's, or None for equal values.
        rows: for each row of the checkpoint's tensor, its index in the file. None for equal order.
        columns: the same for columns.
    """

    encoding: Encoding
    heads: int = 0
    restore: Callable[[np.ndarray], np.ndarray] | None = None
    rows: np.ndarray | None = field(default=None, compare=False)
    columns: np.ndarray | None = field(default=None, compare=False)

    @property
    def rows_together(self) -> int:
        """Number of rows of a head if the rows of heads are permuted, otherwise 1.

        See `TensorEntry.rows_together`.
        """
        return self.shape[0] // self.heads if self.heads else 1

    def read_rows(
        self,
        first: int,
        last: int,
        memory: np.ndarray | None = None,
        file: SharedFile | None = None,
    ) -> np.ndarray:
        """Read and dequantize the rows [first, last), which are whole heads if rows are permuted.

        For `memory` and `file` see `TensorEntry.read_rows`.

        Raises:
            CheckpointError: the file cannot be read, or changed since its header was read.
        """
        raw = self.read_stored(first, last, memory, file)
        shape = (last - first, *self.shape[1:])
        if self.encoding.is_packed:
            blocks = shape[-1] // self.encoding.values
            raw = raw.reshape(-1, blocks * self.encoding.num_bytes)
            values = unpacked(raw, self.encoding).reshape(shape)
        else:
            values = raw.view(self.dtype).reshape(shape)
        values = self.in_order(values)
        return values if self.restore is None else self.restore(values)

    def read_stored(
        self,
        first: int,
        last: int,
        memory: np.ndarray | None = None,
        file: SharedFile | None = None,
    ) -> np.ndarray:
        """Return the stored bytes of the rows [first, last) of the checkpoint's tensor.

        Rows that are neighbours in the file are read together. See `TensorEntry.read_bytes`
        otherwise.
        """
        if self.rows is None or first == last:
            return self.read_bytes(first, last, memory, file)
        size, source = self.num_bytes // self.shape[0], self.rows[first:last]
        count = len(source) * size
        stored = np.empty(count, np.uint8) if memory is None else memory[:count]
        breaks = np.flatnonzero(np.diff(source) != 1) + 1
        ends = [0, *breaks.tolist(), len(source)]
        with nullcontext(file) if file is not None else closing(SharedFile()) as opened:
            for start, end in pairwise(ends):
                row = int(source[start])
                self.read_bytes(row, row + end - start, stored[start * size : end * size], opened)
        return stored

    @property
    def input_order(self) -> np.ndarray | None:
        """The checkpoint's column of each column of blocks, int32, or None for an equal order.

        It is None if `in_order` moves whole blocks to their places.
        """
        if self.columns is None:
            return None
        blocks = self.columns.reshape(-1, self.encoding.values)
        starts = blocks[:, :1]
        moves_blocks = np.array_equal(blocks, starts + np.arange(self.encoding.values))
        if moves_blocks and not (starts % self.encoding.values).any():
            return None
        return np.argsort(self.columns).astype(np.int32)

    def in_order(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of a GGUF tensor with columns, and rows of heads, in the checkpoint's order.

        Args:
            rows: result of `read_stored`, as values [N, columns] or as blocks [N, blocks, bytes].
                They are whole heads if the file permutes the rows of each head. Blocks keep their
                places if there is an `input_order`.
        """
        if self.columns is not None and rows.ndim == 2:
            rows = rows[:, self.columns]
        elif self.columns is not None and self.input_order is None:
            size = self.encoding.values
            rows = rows[:, self.columns[::size] // size]
        if not self.heads:
            return rows
        half = self.shape[0] // self.heads // 2
        paired = rows.reshape(-1, half, 2, *rows.shape[1:])
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def unpacked(raw: np.ndarray, encoding: Encoding) -> np.ndarray:
    """Dequantize rows of whole GGUF blocks, uint8 [N, bytes], to float32 [N, values]."""
    # Imported here because other checkpoints do not need it.
    gguf: Any = importlib.import_module("gguf")
    kind = gguf.GGMLQuantizationType[encoding.name]
    with np.errstate(all="ignore"):  # the caller reports infinite values with the tensor's name
        return gguf.dequantize(raw, kind)


@dataclass(frozen=True)
class GgufFile:
    """The checked header of a GGUF file: its path, metadata, and tensors by name.

    Attributes:
        metadata: values by key. Arrays of numbers are NumPy's, arrays of text are lists.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: str | Path) -> GgufFile:
    """Read and check the header of one GGUF file. `open_gguf` also reads a model's other parts.

    Raises:
        CheckpointError: the header is malformed, or does not fit the file size. The error names the
            file, and the key or tensor if one is malformed.
    """
    path = Path(path)
    with os.fdopen(open_regular(path), "rb") as file:
        shard = Shard(path, identity(file.fileno()))
        header = _Header(path, file, shard.identity[2])
        num_tensors, num_keys = header.start()
        metadata = header.metadata(num_keys)
        infos = [header.tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment % 8:
            raise CheckpointError(
                f"{path}: general.alignment must be a multiple of 8 up to {MAX_ALIGNMENT}"
            )
        start = -(-header.position // alignment) * alignment
    return GgufFile(path, metadata, _tensors(shard, infos, start, alignment))


@dataclass(frozen=True)
class _Info:
    """A tensor as the header of a GGUF file describes it.

    `offset` is relative to the start of the data.
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.encoding.values * self.encoding.num_bytes


def _tensors(shard: Shard, infos: list[_Info], start: int, alignment: int) -> dict[str, GgufTensor]:
    """Return the tensors of a GGUF file by name, after checking that they tile its data.

    Each must begin at the first multiple of the alignment after the previous one.

    Args:
        shard: the file.
        infos: the tensors of the header.
        start: offset of the data in the file.
        alignment: alignment of tensors in bytes.

    Raises:
        CheckpointError: tensors overlap, leave a gap, have equal names, or exceed the file.
    """
    path, size = shard.path, shard.identity[2]
    tensors: dict[str, GgufTensor] = {}
    end, last = 0, "the header"
    for info in sorted(infos, key=lambda info: (info.offset, info.num_bytes)):
        if info.offset != end:
            what = "overlaps" if info.offset < end else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {info.name!r} {what} {last}")
        entry = GgufTensor(
            info.name,
            shard,
            info.encoding.dtype,
            info.shape,
            start + info.offset,
            info.num_bytes,
            info.encoding,
        )
        if tensors.setdefault(info.name, entry) is not entry:
            raise CheckpointError(f"{path}: describes tensor {info.name!r} twice")
        last, whole = f"tensor {info.name!r}", start + info.offset + info.num_bytes
        if whole > size:
            raise CheckpointError(
                f"{path}: is truncated ({whole - size} bytes short); its header describes {last} "
                f"up to byte {whole}, it has {size}"
            )
        end = -(-(info.offset + info.num_bytes) // alignment) * alignment
    if size > start + end:
        raise CheckpointError(f"{path}: has {size - start - end} bytes after the last tensor")
    return tensors


class _Header:
    """Sequential reader of a GGUF header, limited to the file size and MAX_HEADER_BYTES.

    Its methods raise CheckpointError for malformed data.
    """

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._end = min(size, MAX_HEADER_BYTES)
        self._size = size
        self.position = 0

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}")

    def _beyond(self, count: int, what: str) -> CheckpointError:
        limit = "the file" if self._end == self._size else f"{MAX_HEADER_BYTES} bytes"
        return self.fail(f"{what} would take {count} bytes, beyond the end of {limit}")

    def take(self, count: int, what: str) -> bytes:
        """Read and return the next `count` bytes of the header. Errors name them with `what`."""
        if not 0 <= count <= self._end - self.position:
            raise self._beyond(count, what)
        data = self._file.read(count)
        if len(data) < count:
            raise self.fail("changed while it was being loaded")
        self.position += count
        return data

    def number(self, letter: str, what: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}"), what))[0]

    def text(self, most: int, what: str) -> str:
        length = self.number("Q", what)
        if length > most:
            raise self.fail(f"{what} has {length} bytes; allowed: {most}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def start(self) -> tuple[int, int]:
        """Check magic number and version of a GGUF file.

        Return the numbers of tensors and of metadata keys.
        """
        magic = self._file.read(4)
        self.position = len(magic)
        if magic != MAGIC:
            what = "is empty" if not magic else "is not a GGUF file"
            raise self.fail(f"{what}: it begins with {magic!r}; expected {MAGIC!r}")
        version = self.number("I", "the version")
        if version not in VERSIONS:
            raise self.fail(f"is GGUF version {version}; allowed: {VERSIONS}, little-endian")
        tensors = self.number("Q", "the number of tensors")
        keys = self.number("Q", "the number of keys")
        for count, what, most in ((tensors, "tensors", MAX_TENSORS), (keys, "keys", MAX_KEYS)):
            if count > most:
                raise self.fail(f"claims {count} {what}; allowed: {most}")
        return tensors, keys

    def metadata(self, count: int) -> dict[str, Any]:
        """Read `count` metadata keys and their values, and return the values by key."""
        values: dict[str, Any] = {}
        for index in range(count):
            key = self.text(MAX_KEY_BYTES, f"key {index}")
            if key in values:
                raise self.fail(f"the key {key[:200]!r} appears twice")
            values[key] = self._value(f"the value of {key[:200]!r}")
        return values

    def _value(self, what: str) -> Any:
        kind = self.number("I", what)
        if kind in SCALARS:
            value = self.number(SCALARS[kind], what)
            # Restore the decimal number: 1e-5, where the float32 is 9.99999974e-06.
            return float(str(np.float32(value))) if SCALARS[kind] == "f" else value
        if kind == STRING:
            return self.text(MAX_HEADER_BYTES, what)
        if kind != ARRAY:
            raise self.fail(f"{what} is of type {kind}, which is none of GGUF's")
        kind, count = self.number("I", what), self.number("Q", what)
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
            return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        if kind != STRING:
            raise self.fail(f"{what} is an array of type {kind}; allowed: numbers and text")
        if count > min(MAX_STRINGS, (self._end - self.position) // 8):
            raise self.fail(f"{what} claims {count} texts, more than there can be")
        return self._texts(count, what)

    def _texts(self, count: int, what: str) -> list[str]:
        """Read and return `count` consecutive texts of a metadata array.

        This is faster than `count` calls of `text`: a vocabulary has 100,000s of them.
        """
        read, lengths, texts = self._file.read, struct.Struct("<Q"), []
        for _ in range(count):
            head = read(lengths.size)
            if len(head) < lengths.size:
                raise self._beyond(lengths.size, what)
            length = lengths.unpack(head)[0]
            self.position += lengths.size
            if length > self._end - self.position:
                raise self._beyond(length, what)
            data = read(length)
            if len(data) < length:
                raise self.fail("changed while it was being loaded")
            self.position += length
            try:
                texts.append(data.decode())
            except UnicodeDecodeError:
                raise self.fail(f"{what} is not UTF-8") from None
        return texts

    def tensor_info(self) -> _Info:
        """Read, check and return the description of the next tensor in the header's table."""
        name = self.text(MAX_KEY_BYTES, "a tensor's name")
        where = f"tensor {name[:200]!r}"
        count = self.number("I", where)
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self.fail(f"{where} has {count} dimensions; allowed: 1 to {MAX_DIMENSIONS}")
        shape = tuple(reversed([self.number("Q", where) for _ in range(count)]))
        kind, offset = self.number("I", where), self.number("Q", where)
        if kind not in ENCODINGS:
            allowed = ", ".join(encoding.name for encoding in ENCODINGS.values())
            raise self.fail(f"{where} is of type {kind}, which is not one of {allowed}")
        encoding = ENCODINGS[kind]
        if any(size < 1 for size in shape) or prod(shape) >= 1 << 48 or offset >= 1 << 62:
            raise self.fail(f"{where}: shape {list(shape)} or offset {offset} is out of range")
        if shape[-1] % encoding.values or (encoding.is_packed and count < 2):
            raise self.fail(
                f"{where}: rows of {shape[-1]} values are not whole blocks of {encoding.name} "
                f"({encoding.values})"
            )
        return _Info(name, shape, encoding, offset)
