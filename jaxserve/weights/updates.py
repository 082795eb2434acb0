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
from jaxserve.models import ModelConfig, abstract_model
from jaxserve.models.placed_weight import PlacedWeight
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.block_copy import all_finite
from jaxserve.weights.fused_parameters import by_path, contracted, holds_experts
from jaxserve.weights.layouts import output_major
from jaxserve.weights.memory import NAME
from jaxserve.weights.model_weights import (
    parameters_of,
    read_plain,
)
from jaxserve.weights.placement import Placement
from jaxserve.weights.safetensors import read_tensor
from jaxserve.weights.shapes import DeviceLayout
from jaxserve.weights.tensors import StoredTensors, open_arrays


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

    def read(self, params: Any, current: Mapping[str, Any]) -> dict[str, Any]:
        """Return the new values of the parameters that arrays belong to, by path.

        A parameter of which only some tensors are given keeps the rest of its current value.

        Args:
            params: a mapping of names in checkpoint files to arrays, or an `nnx.State`.
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
        values |= dict(read_plain(whole, stored.entries, stored.dims, self._placement))
        if self._layout.output_rows and self._placement.mesh is None:
            values = {path: output_major(value) for path, value in values.items()}
        return jax.block_until_ready(values)

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
        new = np.zeros(parameter.shape, parameter.dtype)
        mask = np.zeros(parameter.shape, f"u{new.dtype.itemsize}")
        for part in parts:
            tensor = read_tensor(stored.entries[part.name])
            with np.errstate(over="ignore"):
                new[part.index] = part.arrange(tensor, stored.dims)
            mask[part.index] = ~mask.dtype.type(0)
            if not all_finite(np.ascontiguousarray(new[part.index])):
                raise CheckpointError(
                    f"{NAME}: tensor {part.name!r} holds NaN or infinity, or values too large for "
                    f"{new.dtype}"
                )
        value: Any = placement.quantized(path, new)
        if isinstance(value, np.ndarray):
            bits: Any = mask.view(new.dtype)
        elif isinstance(value, PlacedWeight) and value.layout == "input_major":
            bits = _mask_of(value, mask, contracted(parameter) or 1, holds_experts(parameter))
        else:
            raise CheckpointError(
                f"{NAME}: {parts[0].name!r} is a part of {path!r}, which is quantized in blocks; "
                "allowed: all tensors of the parameter together"
            )
        placed = placement.placed(path, value)
        if jax.tree.structure(placed) != jax.tree.structure(current):
            raise CheckpointError(
                f"{NAME}: {parts[0].name!r} is a part of {path!r}, which has another form; "
                "allowed: all tensors of the parameter together"
            )
        return jax.tree.map(_merged, current, placed, placement.placed(path, bits))


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
