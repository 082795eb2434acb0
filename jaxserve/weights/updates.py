# pyright: reportUnknownMemberType=false
"""New values for parameters of a model whose weights are placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.errors import CheckpointError
from jaxserve.models import ModelConfig, abstract_model, checkpoint_weights
from jaxserve.models.placed_weight import PlacedWeight
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.block_copy import all_finite
from jaxserve.weights.fused_parameters import by_path, contracted, holds_experts
from jaxserve.weights.layouts import output_major
from jaxserve.weights.memory import NAME, ArrayEntry
from jaxserve.weights.model_weights import (
    parameters_of,
    read_plain,
)
from jaxserve.weights.placement import Placement
from jaxserve.weights.safetensors import read_tensor
from jaxserve.weights.shapes import DeviceLayout
from jaxserve.weights.tensors import StoredTensors, open_arrays
from jaxserve.weights.traced import arranged

HEADER_BYTES = 512
"""Most bytes for the entry of a tensor in headers of safetensors files, on average."""


class ParameterReader:
    """Reads new values of a model's parameters, and places them as the model's own are placed.

    Args:
        config: configuration of the model, with its split over devices.
        dtype: dtype of the parameters that are not quantized.
        form: form that matrices are quantized to, or None.
        layout: layout of matrices on the device.
        mesh: devices over which the model is divided, or None for one device.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        form: str | None,
        layout: DeviceLayout,
        mesh: Mesh | None,
    ) -> None:
        self._config, self._layout = config, layout
        self._parameters = parameters_of(abstract_model(config, dtype))
        self._placement = Placement(config, self._parameters, form, layout.panels, mesh)
        # Panels and quantization pass through the host.
        self._stays_on_device = not (form or layout.panels or mesh)
        self._programs: dict[tuple[str, ...], Any] = {}  # by the names of the tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters before quantization."""
        return sum(p.size * np.dtype(p.dtype).itemsize for p in self._parameters.values())

    @property
    def most_file_bytes(self) -> int:
        """Most bytes that safetensors files of the model need together.

        The values may take twice the bytes of the parameters, for float32 in place of bfloat16.
        """
        return 2 * self.num_bytes + HEADER_BYTES * len([*checkpoint_weights(self._config)])

    def read(self, params: Any, current: Mapping[str, Any]) -> dict[str, Any]:
        """Return the new values of the parameters that arrays belong to, by path.

        A parameter of which only some tensors are given keeps the rest of its current value.

        Args:
            params: a mapping of names in checkpoint files to arrays, an `nnx.State`, or an opened
                checkpoint.
            current: the placed values of all parameters, by path.

        Raises:
            CheckpointError: a name is unknown, an array has another shape or no float dtype, or
                values are not finite in the dtype of the parameter. Or the model's weights are
                stored in a form of which this parameter cannot be replaced in part.
        """
        if (stored_form := self._config.quantization) is not None:
            raise CheckpointError(
                f"{NAME}: the weights of this model are stored as {stored_form.method}; allowed: a "
                "model that is stored in full precision"
            )
        stored = open_arrays(params, self._config, is_part=True)
        whole: list[WeightName] = []
        values: dict[str, Any] = {}
        for path, parts in by_path(stored.table).items():
            if self._is_whole(path, parts):
                whole += parts
            else:
                values[path] = self._replaced(path, parts, stored, current[path])
        if self._stays_on_device and _are_beside(stored, jax.tree.leaves(dict(current))):
            values |= self._copied(whole, stored)
        else:
            values |= dict(read_plain(whole, stored.entries, stored.dims, self._placement))
        if self._layout.output_rows and self._placement.mesh is None:
            values = {path: output_major(value) for path, value in values.items()}
        return jax.block_until_ready(values)

    def _copied(self, table: Sequence[WeightName], stored: StoredTensors) -> dict[str, jax.Array]:
        """Return new values of parameters from arrays on the device, in one program.

        Args:
            table: all tensors of these parameters.
            stored: has the tensors as arrays of JAX on the model's device.

        Raises:
            CheckpointError: values are not finite in the dtype of the parameter.
        """
        names = tuple(dict.fromkeys(part.name for part in table))
        if not names:
            return {}
        dims, parameters = stored.dims, self._parameters

        def copy(arrays: list[jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
            tensors = dict(zip(names, arrays, strict=True))
            cast = [tensors[part.name].astype(parameters[part.path].dtype) for part in table]
            finite = jnp.stack([jnp.isfinite(array).all() for array in cast])
            return arranged(tensors, table, dims, parameters), finite

        program = self._programs.setdefault(names, jax.jit(copy))
        values, finite = program([_array_of(stored, name) for name in names])
        for part, is_finite in zip(table, finite.tolist(), strict=True):
            if not is_finite:
                raise CheckpointError(_not_finite(stored, part, parameters[part.path].dtype))
        return values

    def _is_whole(self, path: str, parts: Sequence[WeightName]) -> bool:
        shape = self._parameters[path].shape
        covered = sum(np.broadcast_to(np.int8(0), shape)[part.index].size for part in parts)
        return covered == prod(shape)

    def _replaced(
        self, path: str, parts: Sequence[WeightName], stored: StoredTensors, current: Any
    ) -> Any:
        """Return a parameter's value with the tensors `parts` replaced, placed.

        The new values and a mask of their bits are placed alike. The result takes the bits of the
        mask from the new value and the others from the current one.
        """
        parameter, placement = self._parameters[path], self._placement
        where = stored.opened.directory
        new = np.zeros(parameter.shape, parameter.dtype)
        mask = np.zeros(parameter.shape, f"u{new.dtype.itemsize}")
        for part in parts:
            tensor = read_tensor(stored.entries[part.name])
            with np.errstate(over="ignore"):
                new[part.index] = part.arrange(tensor, stored.dims)
            mask[part.index] = ~mask.dtype.type(0)
            if not all_finite(np.ascontiguousarray(new[part.index])):
                raise CheckpointError(_not_finite(stored, part, new.dtype))
        value: Any = placement.quantized(path, new)
        if isinstance(value, np.ndarray):
            bits: Any = mask.view(new.dtype)
        elif isinstance(value, PlacedWeight) and value.layout == "input_major":
            bits = _mask_of(value, mask, contracted(parameter) or 1, holds_experts(parameter))
        else:
            raise CheckpointError(
                f"{where}: {parts[0].name!r} is a part of {path!r}, which is quantized in blocks; "
                "allowed: all tensors of the parameter together"
            )
        placed = placement.placed(path, value)
        if jax.tree.structure(placed) != jax.tree.structure(current):
            raise CheckpointError(
                f"{where}: {parts[0].name!r} is a part of {path!r}, which has another form; "
                "allowed: all tensors of the parameter together"
            )
        return jax.tree.map(_merged, current, placed, placement.placed(path, bits))


def _are_beside(stored: StoredTensors, leaves: list[jax.Array]) -> bool:
    """Return whether tensors are arrays of JAX on the one device of a model's arrays."""
    devices = leaves[0].devices() if leaves else None
    arrays = [_array_of(stored, name) for name in stored.entries]
    return all(isinstance(array, jax.Array) and array.devices() == devices for array in arrays)


def _not_finite(stored: StoredTensors, part: WeightName, dtype: DTypeLike) -> str:
    return (
        f"{stored.opened.directory}: tensor {part.name!r} holds NaN or infinity, or values too "
        f"large for {np.dtype(dtype)}"
    )


def _array_of(stored: StoredTensors, name: str) -> Any:
    entry = stored.entries[name]
    return entry.values if isinstance(entry, ArrayEntry) else None


def _mask_of(value: PlacedWeight, mask: np.ndarray, contract: int, has_experts: bool) -> Any:
    """Return a quantized weight whose arrays are masks of the bits of the given outputs.

    Args:
        value: the quantized weight.
        mask: mask of the numbers of the parameter, with all bits of a number equal.
        contract: number of input dimensions.
        has_experts: whether the first dimension is the expert.
    """
    first = 1 if has_experts else 0
    outputs = mask.any(axis=tuple(range(first, first + contract)))
    outputs = outputs.reshape(*outputs.shape[:first], 1, -1)

    def bits(array: np.ndarray) -> np.ndarray:
        whole = np.broadcast_to(outputs, array.shape)
        word = np.dtype(f"u{array.dtype.itemsize}")
        return np.where(whole, ~word.type(0), word.type(0)).view(array.dtype)

    return jax.tree.map(bits, value)


@jax.jit
def _merged(current: jax.Array, new: jax.Array, mask: jax.Array) -> jax.Array:
    word = jnp.dtype(f"u{current.dtype.itemsize}")
    old, other, bits = (jax.lax.bitcast_convert_type(array, word) for array in (current, new, mask))
    return jax.lax.bitcast_convert_type((other & bits) | (old & ~bits), current.dtype)
