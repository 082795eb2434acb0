# pyright: reportUnknownMemberType=false
"""Load converted folders on several devices: read each parameter whole, then cut it.

A folder holds the parameters in the forms of a single device, so any number of devices can read it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.models import Decoder, ModelConfig, abstract_model
from jaxserve.weights.converted import (
    WEIGHTS,
    ConvertedModel,
    expected_tree,
    restored,
    verify,
    with_scales,
)
from jaxserve.weights.group_borders import check_groups, stored_groups
from jaxserve.weights.model_weights import parameters_of
from jaxserve.weights.parameter_arrays import named_arrays
from jaxserve.weights.placement import Placement, placed_scales, scales_of

if TYPE_CHECKING:
    from jaxtyping import Array


def load_converted_parts(
    converted: ConvertedModel,
    config: ModelConfig,
    mesh: Mesh,
    *,
    panels: bool,
    kv_scales: bool = False,
) -> Decoder:
    """Load the model of a converted folder on several devices, each array verified.

    Args:
        converted: the folder, from `open_converted`.
        config: configuration that the parameters must match, with its split over the mesh.
        mesh: the devices.
        panels: lay out matrices for our CPU kernels.
        kv_scales: use the folder's scales for an fp8 cache, if it has them.

    Raises:
        CheckpointError: see `load_converted`.
        UnsupportedModel: the split would cut through a group of inputs that share a scale.
    """
    model = abstract_model(config, jnp.dtype(converted.dtype))
    parameters, tree = parameters_of(model), expected_tree(converted, model)
    check_groups(config, parameters, stored_groups(tree))
    placement, of_scales = Placement(config, parameters, None, panels, mesh), scales_of(model)

    def placed(path: str, value: Any) -> Array:
        if path in of_scales:
            layer = int(path.split(".")[1])
            return placed_scales(value, config.for_layer(layer), mesh)
        return placement.placed(path, value)

    def read(_: Any) -> dict[str, Any]:
        return {path: placed(path, whole(converted, path, form)) for path, form in tree.items()}

    return with_scales(model, restored(converted, read), kv_scales)


def whole(converted: ConvertedModel, path: str, form: Any) -> Any:
    """Read one parameter of a converted folder into NumPy arrays, and verify their digests.

    Args:
        converted: the folder.
        path: path of the parameter.
        form: the parameter with shapes in place of arrays.

    Raises:
        CheckpointError: an array differs from its digest.
    """
    orbax: Any = importlib.import_module("orbax.checkpoint")
    expected = named_arrays({path: form})
    arguments = orbax.args.PyTreeRestore(
        item=expected,
        restore_args=dict.fromkeys(expected, orbax.RestoreArgs(restore_type=np.ndarray)),
        partial_restore=True,
    )
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        values = checkpointer.restore(converted.directory.absolute() / WEIGHTS, arguments)
    verify(converted.directory, values, {name: converted.parameters[name] for name in expected})
    return jax.tree.structure(form).unflatten([values[name] for name in expected])
