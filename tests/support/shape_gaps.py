"""Comparison of described shapes with the arrays of a placed model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxserve.models import Decoder, ModelConfig
from jaxserve.start.plan.model_shapes import ModelShapes
from jaxserve.weights import GgufFile
from jaxserve.weights.shapes import DeviceLayout, shapes_of_model
from jaxserve.weights.tensors import open_tensors


def gap(
    model: Decoder,
    config: ModelConfig,
    dtype: Any,
    form: str | None,
    layout: DeviceLayout,
    source: Any = None,
) -> str | None:
    """Return how a loaded model differs from its description; None if it does not.

    Args:
        model: as it was loaded, with the settings that the others describe.
        source: folder, GGUF file, converted folder or `RANDOM`; None if it is not known.
    """
    stored = source
    if isinstance(source, Path | GgufFile):
        stored = open_tensors(source, config)
    described = shapes_of_model(config, dtype, form, layout, stored)
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(described)))
    shapes = ModelShapes.of(described)
    arrays = jax.tree.leaves(nnx.state(model))
    held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    difference = shapes.difference(ModelShapes.of(model))
    if difference is None and shapes.num_bytes != held:
        return f"{shapes.num_bytes} bytes are planned and {held} held"
    return difference
