# pyright: reportUnknownMemberType=false
"""Parameters of a model from arrays in memory, by functions that also work inside `jax.jit`.

The arrays have the names of a checkpoint's files, or are the state of a `Decoder`. The results have
the bits that `load_weights` reads from files of the same numbers, and can be differentiated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import Decoder, ModelConfig, abstract_model
from jaxserve.models.placed_weight import FULL, PlacedWeight
from jaxserve.models.weight_table import Index, WeightName
from jaxserve.weights.fused_parameters import by_path
from jaxserve.weights.layouts import PLACED, number_panels, panel_axes
from jaxserve.weights.memory import ArrayEntry, parameters_of_state
from jaxserve.weights.model_weights import filled, parameters_of
from jaxserve.weights.placement import Parameters
from jaxserve.weights.tensors import open_arrays
from pallas_kernels.cpu.panels import panels_of, weight_of

Params = Mapping[str, Any]
# The start and the size along every dimension of a part of a parameter, and the values of the part.
_Piece = tuple[tuple[tuple[int, int], ...], jax.Array]


def leaves_of(
    params: Params | nnx.State, config: ModelConfig, dtype: DTypeLike, panels: bool
) -> list[jax.Array]:
    """Return the arrays of a model in the order and layout in which an engine holds them.

    Args:
        params: see `values_of`.
        config: configuration that the arrays must match, for one device.
        dtype: dtype of the parameters.
        panels: whether matrices are in panels for CPU products, as in an engine on a CPU.

    Raises:
        CheckpointError, UnsupportedModel: see `values_of`.
    """
    model = abstract_model(config, dtype)
    values = values_of(params, config, parameters_of(model))
    model = filled(model, _in_panels(values, model) if panels else values)
    return jax.tree.leaves(nnx.split(model)[1])


def model_of(
    params: Params | nnx.State, config: ModelConfig, dtype: DTypeLike, later_panels: bool
) -> Decoder:
    """Return a model that can be differentiated by `params`.

    Args:
        params, config, dtype: as in `leaves_of`.
        later_panels: whether products are those of weights in panels, as in an engine on a CPU.

    Raises:
        CheckpointError, UnsupportedModel: see `values_of`.
    """
    model = abstract_model(config, dtype)
    values = values_of(params, config, parameters_of(model))
    return filled(model, _in_panels(values, model, later=True) if later_panels else values)


def _in_panels(
    values: Mapping[str, jax.Array], model: Decoder, later: bool = False
) -> dict[str, Any]:
    return {
        path: in_panels(values[path], parameter.get_metadata()["axes"], later)
        for path, parameter in parameters_of(model).items()
    }


def values_of(
    params: Params | nnx.State, config: ModelConfig, parameters: Parameters
) -> dict[str, jax.Array]:
    """Return the parameters of a model as plain arrays, by path, such as "layers.0.mlp.down".

    Args:
        params: arrays by the names of a checkpoint's files, in any float dtype, or `nnx.state` of a
            `Decoder` without quantized parameters. Experts may be stacked, or one array for each.
        config: configuration that the arrays must match, for one device.
        parameters: the parameters of the abstract model, by path, with the dtypes of the results.

    Raises:
        CheckpointError: arrays are missing, unexpected, of a wrong shape or of no float dtype.
        UnsupportedModel: a parameter is quantized.
    """
    if isinstance(params, nnx.State):
        return _of_state(params, parameters)
    stored = open_arrays(params, config, traced=True)
    plain = {name: e for name, e in stored.entries.items() if isinstance(e, ArrayEntry)}
    for name in (*stored.split.packed, *(stored.entries.keys() - plain.keys())):
        raise UnsupportedModel(f"params: {name!r} is quantized; allowed: arrays of floats")
    tensors = {name: _replicated(entry.values) for name, entry in plain.items()}
    return arranged(tensors, stored.table, stored.dims, parameters)


def arranged(
    tensors: Mapping[str, jax.Array],
    table: Sequence[WeightName],
    dims: Mapping[str, int],
    parameters: Parameters,
) -> dict[str, jax.Array]:
    """Return parameters as plain arrays, by path, from the tensors that fill them.

    Args:
        tensors: arrays by the names of a checkpoint's files, of any float dtype.
        table: all tensors of each parameter, next to each other.
        dims: sizes of the dimensions that the table names.
        parameters: the parameters of the abstract model, by path, with the dtypes of the results.
    """
    values: dict[str, jax.Array] = {}
    for path, parts in by_path(table).items():
        parameter = parameters[path]
        pieces: list[_Piece] = []
        for part in parts:
            array: Any = tensors[part.name]
            array = part.arrange(array, dims).astype(parameter.dtype)
            box = _box(part.index, parameter.shape)
            pieces.append((box, array.reshape([size for _, size in box])))
        values[path] = _joined(pieces)
    return values


def in_panels(value: jax.Array, axes: Any, later: bool = False) -> Any:
    """Return a parameter in panels for CPU products, or itself if its axes have no panels.

    This is `layouts.laid_out` for arrays that JAX may trace.

    Args:
        value: a plain parameter.
        axes: logical axes of the parameter.
        later: let each product put the parameter in panels, so that it can be differentiated. An
            embedding table is not changed.
    """
    axes_of_panel = panel_axes(axes, np.dtype(value.dtype))
    if axes_of_panel is None or (later and axes == ("vocab", "embed")):
        return value
    weight = number_panels(tuple(value.shape), np.dtype(value.dtype), axes_of_panel)
    inputs, outputs = axes_of_panel
    order = *range(value.ndim - len(inputs) - len(outputs)), *inputs, *outputs
    matrices = value.transpose(order)
    leading = matrices.shape[: value.ndim - len(inputs) - len(outputs)]
    matrices = matrices.reshape(*leading, weight.inputs, prod(weight.outputs))
    if later:
        return replace(weight, values=matrices, layout="later_panels")
    return replace(weight, values=panels_of(matrices))


def _of_state(state: nnx.State, parameters: Parameters) -> dict[str, jax.Array]:
    """Return the parameters in the state of a `Decoder`, by path, as plain arrays.

    Raises:
        CheckpointError: the state is not that of the model.
        UnsupportedModel: a parameter is quantized.
    """
    given = parameters_of_state(state)
    if given.keys() != parameters.keys():
        names = sorted(given.keys() ^ parameters.keys())
        raise CheckpointError(f"params: {names[0]} is either missing or not in the model")
    values = {path: _plain(path, given[path], leaf) for path, leaf in parameters.items()}
    for path, parameter in parameters.items():
        if values[path].shape != parameter.shape:
            raise CheckpointError(
                f"params: {path} has shape {list(values[path].shape)}; expected "
                f"{list(parameter.shape)}"
            )
    return {path: values[path].astype(leaf.dtype) for path, leaf in parameters.items()}


def _plain(path: str, value: Any, parameter: nnx.Param[jax.Array]) -> jax.Array:
    # The value of a parameter in a state, without panels.
    if not isinstance(value, PLACED):
        return _replicated(value)
    if not isinstance(value, PlacedWeight) or value.form != FULL:
        form = value.form if isinstance(value, PlacedWeight) else type(value).__name__
        raise UnsupportedModel(f"params: {path} is quantized ({form}); allowed: arrays of floats")
    matrices = weight_of(value.values, value.inputs, prod(value.outputs), value.dtype)
    if parameter.get_metadata()["axes"] == ("vocab", "embed"):  # a table, whose rows are outputs
        matrices = matrices.swapaxes(-1, -2)
    return matrices.reshape(parameter.shape)


def _replicated(array: Any) -> jax.Array:
    """Return an array that no explicit mesh axis divides, so that it can be reshaped."""
    array = jnp.asarray(array)
    sharding = jax.typeof(array).sharding
    if not any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types):
        return array
    if all(names is None for names in sharding.spec):
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))


def _box(index: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the start and the size along every dimension of the part `index` of a parameter."""
    missing = len(shape) - sum(entry is not ... for entry in index)
    entries: list[int | slice] = []
    for entry in index if ... in index else (*index, ...):
        entries += [slice(None)] * missing if entry is ... else [entry]
    box: list[tuple[int, int]] = []
    for entry, size in zip(entries, shape, strict=True):
        if isinstance(entry, slice):
            start, stop, _ = entry.indices(size)
            box.append((start, stop - start))
        else:
            box.append((entry % size, 1))
    return tuple(box)


def _joined(pieces: Sequence[_Piece], axis: int = 0) -> jax.Array:
    """Concatenate the pieces of an array, which tile it, along `axis` and the axes after it.

    Unlike an indexed update, this works for arrays on a mesh with explicit axes.
    """
    if len(pieces) == 1:
        return pieces[0][1]
    ordered = sorted(pieces, key=lambda piece: piece[0][axis])
    groups = [
        _joined(list(group), axis + 1)
        for _, group in groupby(ordered, key=lambda piece: piece[0][axis])
    ]
    return groups[0] if len(groups) == 1 else jnp.concatenate(groups, axis=axis)
