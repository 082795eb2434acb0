"""Describe and read a quantized matrix that a checkpoint stores in several tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.config.stored_quantization import StoredQuantization
from jaxserve.models.placed_weight import FULL
from jaxserve.weights.host_matrix import HostMatrix
from jaxserve.weights.safetensors import TensorEntry, read_tensor

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True)
class MatrixFormat:
    """Names and dtypes of the tensors that hold a quantized matrix `X.weight`, and its reader.

    Attributes:
        codes: name suffix, after X, of the tensor with the codes.
        dtype: dtype of the codes.
        parts: name suffixes of the other tensors.
        unused: name suffixes of tensors with the calibration of activations, which are ignored.
        read: function that reads the matrix.
        describe: function that returns a description of the result of `read`, without reading codes
            and scales.
    """

    codes: str
    dtype: str
    parts: tuple[str, ...]
    unused: tuple[str, ...]
    read: Callable[[PackedTensor], HostMatrix]
    describe: Callable[[PackedTensor], HostMatrix]

    def holds(self, stem: str, tensors: Mapping[str, TensorEntry]) -> bool:
        """Return whether `tensors` has the matrix called `stem` in this quantized format.

        If the codes are called `X.weight`, their dtype tells them from a matrix that is not
        quantized.
        """
        entry = tensors.get(stem + self.codes)
        return entry is not None and (self.codes != ".weight" or entry.dtype.name == self.dtype)


@dataclass(frozen=True)
class PackedTensor:
    """One quantized matrix of a checkpoint: its tensors by suffix, and its unpacked shape."""

    name: str
    entries: Mapping[str, TensorEntry]
    stored: StoredQuantization
    format: MatrixFormat
    shape: tuple[int, int]  # [out, in]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def group(self) -> int:
        """Number of inputs of the matrix that share a scale."""
        return min(self.stored.group or self.shape[1], self.shape[1])

    @property
    def groups(self) -> int:
        """Number of scales for each output of the matrix."""
        return -(-self.shape[1] // self.group)

    def read(self) -> HostMatrix:
        """Read the matrix: codes [in, out] in the checkpoint's order, or dequantized values.

        Raises:
            CheckpointError: a tensor is missing, has another shape or dtype, or is not finite.
        """
        return self.format.read(self)

    def describe(self) -> HostMatrix:
        """Return the HostMatrix that `read` returns, with shapes in place of arrays.

        Only zero points and orders are read from the file.

        Raises:
            CheckpointError: see `read`.
        """
        return self.format.describe(self)

    def described(
        self,
        form: str,
        scales: Any = np.float32,
        zeros: Any = None,
        order: np.ndarray | None = None,
        group: int | None = None,
    ) -> HostMatrix:
        """Return a HostMatrix of this shape with shapes in place of arrays.

        See `HostMatrix.described` for the arguments. `group` is by default that of this matrix.
        """
        outputs, inputs = self.shape
        group = self.group if group is None else group
        return HostMatrix.described(form, (inputs, outputs), group, scales, zeros, order)

    def scales_dtype(self, suffix: str) -> np.dtype:
        """Return the dtype of the scales that `scales(suffix, ...)` returns.

        Raises:
            CheckpointError: the tensor is missing.
        """
        entry = self.entries.get(suffix)
        if entry is None:
            raise self.wrong(suffix, "is missing")
        return entry.dtype if entry.dtype.itemsize == 2 else np.dtype(np.float32)

    def tensor(self, suffix: str, shape: tuple[int, ...], *dtypes: str) -> np.ndarray:
        """Read the tensor with name suffix `suffix`, which must have the given shape and dtype.

        `dtypes` are the allowed dtypes. Without any, all float dtypes are allowed.

        Raises:
            CheckpointError: the tensor is missing, or has another shape or dtype.
        """
        entry = self.entries.get(suffix)
        if entry is None:
            raise self.wrong(suffix, "is missing")
        allowed = dtypes or FLOATS
        if entry.shape != shape or entry.dtype.name not in allowed:
            raise self.wrong(
                suffix,
                f"is {entry.dtype.name}{list(entry.shape)}; expected "
                f"{' or '.join(sorted(allowed))}{list(shape)}, as quantization_config says",
            )
        return read_tensor(entry)

    def scales(self, suffix: str, shape: tuple[int, ...]) -> np.ndarray:
        """Read a tensor of scales: 16-bit floats in their dtype, others converted to float32.

        Raises:
            CheckpointError: the tensor is missing, has another shape, or has NaN or infinity.
        """
        scales = self.tensor(suffix, shape)
        if not np.isfinite(scales.astype(np.float32)).all():
            raise self.wrong(suffix, "holds NaN or infinity")
        return scales if scales.dtype.itemsize == 2 else scales.astype(np.float32)

    def scales_by_output(self, suffix: str) -> np.ndarray:
        """Read scales stored as [out, groups], and return them as [groups, out].

        With one group, the stored shape may also be [out], or one number for all outputs.
        """
        outputs, groups = self.shape[0], self.groups
        entry = self.entries.get(suffix)
        shape = (outputs, groups) if entry is None else entry.shape
        if groups > 1 or shape not in ((), (1,), (1, 1), (outputs,)):
            return np.ascontiguousarray(self.scales(suffix, (outputs, groups)).T)
        return np.broadcast_to(self.scales(suffix, shape).reshape(1, -1), (1, outputs))

    def factor(self, suffix: str) -> np.float32:
        """Read the number, a float32, that scales the whole matrix.

        Raises:
            CheckpointError: it is missing, or not a single positive number.
        """
        shape = (1,) if suffix in self.entries and self.entries[suffix].shape == (1,) else ()
        value = self.tensor(suffix, shape, "float32").item()
        if not 0 < value < np.inf:
            raise self.wrong(suffix, "must be a positive number")
        return np.float32(value)

    def wrong(self, suffix: str, what: str) -> CheckpointError:
        """Return a CheckpointError with the text `what` that names the file and the tensor."""
        path = next(iter(self.entries.values())).shard.path
        name = self.name.removesuffix(".weight") + suffix
        return CheckpointError(f"{path}: tensor {name!r}: {what}")


def _read_plain(packed: PackedTensor) -> HostMatrix:
    return HostMatrix(FULL, packed.tensor(".weight", packed.shape).astype(np.float32).T)


PLAIN = MatrixFormat(".weight", "", (), (), _read_plain, lambda packed: packed.described(FULL))
"""Format of matrices that are not quantized, for parameters that join them with quantized ones."""
