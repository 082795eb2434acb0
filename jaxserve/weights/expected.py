"""The model that a load will return, before any weight has been read."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models import Decoder, ModelConfig, abstract_model
from jaxserve.models.panels import BlockPanels, PanelWeight
from jaxserve.models.shards import part_of
from jaxserve.weights.pieces import joined_place
from jaxserve.weights.placement import holds_experts, panel_axes
from jaxserve.weights.stacked_blocks import MXFP4
from pallas_kernels.cpu import blocks
from pallas_kernels.cpu.panels import panel_shape


def expected_model(
    config: ModelConfig, dtype: DTypeLike, panels: bool, in_mxfp4: bool = False
) -> Decoder:
    """Build the structure of a model whose weights are placed as read, with shapes for arrays.

    Args:
        config: of the model.
        dtype: of its parameters.
        panels: whether matrices are laid out for the CPU's own products.
        in_mxfp4: whether experts stay in blocks.
    """
    model = abstract_model(config, dtype)
    for _, node in nnx.iter_graph(model) if panels else ():
        if isinstance(node, nnx.Param):
            in_blocks = in_mxfp4 and holds_experts(node)
            expected = _mxfp4_panels(node) if in_blocks else _panels(node)
            if expected is not None:
                node.set_value(expected)
    return model


def divide_shapes(model: Decoder, config: ModelConfig, mesh: Mesh) -> None:
    """Replace the shapes of parameters in full by those of their parts on a mesh, joined.

    Args:
        model: with shapes for arrays.
        config: of the model, with its split over the mesh.
    """
    for _, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Param):
            continue
        part = part_of(config, node.get_metadata()["axes"], node.shape, device=0)
        shape, sharding = joined_place(mesh, part.own_shape, part.is_whole)
        node.set_value(jax.ShapeDtypeStruct(shape, node.dtype, sharding=sharding))


def _panels(parameter: nnx.Param[Any]) -> PanelWeight | None:
    """Return the shape that a parameter has in panels; None where it has none."""
    shape, dtype = parameter.shape, np.dtype(parameter.dtype)
    axes = panel_axes(parameter.get_metadata().get("axes"), dtype)
    if axes is None:
        return None
    inputs, outputs = (tuple(shape[axis] for axis in group) for group in axes)
    leading = shape[: len(shape) - len(inputs) - len(outputs)]
    matrix, stored = panel_shape(prod(inputs), prod(outputs), dtype)
    panels: Any = jax.ShapeDtypeStruct((*leading, *matrix), stored)
    return PanelWeight(panels, dtype.name, outputs, prod(inputs))


def _mxfp4_panels(parameter: nnx.Param[Any]) -> BlockPanels:
    """Return the shape of every expert's matrix in blocks."""
    experts, inputs, *outputs = parameter.shape
    shape = (experts, *blocks.panel_shape(MXFP4, inputs, prod(outputs)))
    panels: Any = jax.ShapeDtypeStruct(shape, np.uint8)
    return BlockPanels(panels, MXFP4, np.dtype(parameter.dtype).name, tuple(outputs))
