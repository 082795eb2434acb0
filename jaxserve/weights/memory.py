"""Arrays in memory as the tensors of a checkpoint, which are read like the tensors of files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.tree_util import keystr, tree_leaves_with_path

from jaxserve.errors import CheckpointError
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.safetensors import DTYPES, Shard, SharedFile, TensorEntry

NAME = "params"
"""Name of the arrays in error messages, in place of the path of a checkpoint."""


@dataclass(frozen=True)
class _NoFile(Shard):
    def check_unchanged(self) -> None:
        """Do nothing, because arrays in memory are no file."""


_SHARD = _NoFile(Path(NAME), (0, 0, 0, 0))


@dataclass(frozen=True, eq=False)
class ArrayEntry(TensorEntry):
    """A tensor that is an array of NumPy or JAX.

    Attributes:
        values: the array, on the host or on devices.
    """

    values: Any = None

    def read_bytes(
        self,
        first: int,
        last: int,
        memory: np.ndarray | None = None,
        file: SharedFile | None = None,
    ) -> np.ndarray:
        """Return the bytes of rows [first, last), flat uint8. `memory` is not used.

        If `file` is given, it keeps the host's copy of an array of JAX until another is read.
        """
        values = on_host(self.values) if file is None else file.kept(self.values, on_host)
        rows = values[first:last] if values.ndim else values
        return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)

    def skim(self, start: int, size: int, memory: np.ndarray, file: SharedFile) -> None:
        """Do nothing, because the array is in memory."""

    def chunks(self) -> Iterator[bytes]:
        """Yield the tensor's bytes at once."""
        yield on_host(self.values).tobytes()


def on_host(values: Any) -> np.ndarray:
    """Return an array of NumPy or JAX as an array of NumPy, without a copy if it is on the host.

    JAX would keep the copy of an array on a device as long as the array. Arrays of its parts on
    each device are temporary.
    """
    if isinstance(values, np.ndarray):
        return values
    if values.is_fully_replicated:
        return np.asarray(values.addressable_data(0))
    whole = np.empty(values.shape, values.dtype)
    for part in values.addressable_shards:
        whole[part.index] = np.asarray(part.data)
    return whole


def checkpoint_of(params: Any, is_part: bool = False, traced: bool = False) -> Checkpoint:
    """Return arrays as a checkpoint. No values are read.

    Args:
        params: a mapping of names to arrays of NumPy or JAX, or an `nnx.State`, whose names are the
            paths of its parameters. Or an opened checkpoint, all of whose tensors must be used.
        is_part: whether tensors of the model may be missing.
        traced: whether JAX may trace the arrays.

    Raises:
        CheckpointError: a name is no text, or a value is no array, has an unknown dtype, was
            deleted, or is not on devices of this process alone.
    """
    if isinstance(params, Checkpoint):
        return replace(params, whole=True, is_part=is_part)
    params = parameters_of_state(params) if isinstance(params, nnx.State) else params
    if not isinstance(params, Mapping):
        raise CheckpointError(
            f"{NAME} is a {type(params).__name__}; allowed: a mapping of names to arrays, or the "
            "state of a Decoder"
        )
    tensors = {str(name): _entry(name, params[name], traced) for name in params}
    return Checkpoint(Path(NAME), tensors, whole=True, is_part=is_part)


def parameters_of_state(state: nnx.State | Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a module's state, or of nested mappings, by the paths of parameters."""
    leaves = tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return {
        keystr(path, simple=True, separator="."): (
            leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        )
        for path, leaf in leaves
    }


def _entry(name: Any, values: Any, traced: bool) -> ArrayEntry:
    where = f"{NAME}: tensor {str(name)[:200]!r}"
    if not isinstance(name, str):
        raise CheckpointError(f"{where}: its name is a {type(name).__name__}; allowed: text")
    if not isinstance(values, np.ndarray | jax.Array):
        raise CheckpointError(
            f"{where} is a {type(values).__name__}; allowed: an array of NumPy or JAX"
        )
    if values.dtype not in DTYPES.values():
        allowed = ", ".join(str(dtype) for dtype in DTYPES.values())
        raise CheckpointError(f"{where} has the dtype {values.dtype}; allowed: {allowed}")
    if isinstance(values, jax.Array) and not (traced and isinstance(values, Tracer)):
        _check_readable(values, where)
    dtype, shape = np.dtype(values.dtype), tuple(values.shape)
    return ArrayEntry(name, _SHARD, dtype, shape, 0, values.size * dtype.itemsize, values)


def _check_readable(values: jax.Array, where: str) -> None:
    if isinstance(values, Tracer):
        raise CheckpointError(f"{where} is traced; allowed: an array with values, outside of jit")
    if values.is_deleted():
        raise CheckpointError(f"{where} was deleted; allowed: an array that was not donated")
    if not values.is_fully_addressable:
        raise CheckpointError(f"{where} is on devices of several processes; allowed: of this one")
