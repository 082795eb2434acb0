"""Sizes of a model's weights in any form, from the description of their shapes."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.execution.mesh import local_bytes
from jaxserve.models import ModelConfig, abstract_model
from jaxserve.models.placed_weight import EXPERTS
from jaxserve.models.shards import Split, part_of
from jaxserve.start.plan.model_shapes import ModelShapes
from jaxserve.weights.converted import ConvertedModel
from jaxserve.weights.model_weights import parameters_of
from jaxserve.weights.shapes import PLAIN, DeviceLayout, Stored, shapes_of_model

# Tables of which a step reads the rows of its tokens alone.
TABLES = ("embedding.table", "layer_inputs.table")


class Weights:
    """Shapes and sizes of a model's weights in each form, computed without the arrays.

    The shapes of a form are computed once. Sizes are in bytes on one device.

    Args:
        config: configuration of the model, with its split over devices.
        dtype: dtype of weights that are not quantized.
        layout: layout of the matrices on the device.
        stored: the stored tensors (see `shapes_of_model`).
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: Any,
        layout: DeviceLayout = PLAIN,
        stored: Stored | None = None,
    ) -> None:
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.layout = layout
        self.stored: Stored | None = stored
        self._shapes: dict[str | None, ModelShapes] = {}

    def in_dtype(self, dtype: Any, keeps_blocks: bool | None = None) -> Weights:
        """Return a Weights in which parameters that are not quantized have another dtype.

        Args:
            dtype: the new dtype.
            keeps_blocks: whether matrices of a GGUF file stay in its blocks, or None for no change.
        """
        layout = self.layout
        if keeps_blocks is not None:
            layout = replace(layout, keeps_blocks=keeps_blocks)
        return Weights(self.config, dtype, layout, self.stored)

    def divided(self, split: Split) -> Weights:
        """Return the same Weights for another division over devices, `split`."""
        part = copy(self)
        part.config, part._shapes = replace(self.config, split=split), {}
        return part

    def shapes(self, form: str | None) -> ModelShapes:
        """Return the shapes of the placed model in a form.

        Args:
            form: form that matrices are quantized to, or None for the stored form.
        """
        if form not in self._shapes:
            # The matrices of a converted folder are quantized already.
            target_form = None if isinstance(self.stored, ConvertedModel) else form
            model = shapes_of_model(self.config, self.dtype, target_form, self.layout, self.stored)
            self._shapes[form] = ModelShapes.of(model)
        return self._shapes[form]

    def sizes(self, form: str | None) -> tuple[int, int]:
        """Return the bytes of all weights in a form, and the bytes that a step of one row reads."""
        return self.shapes(form).num_bytes, self.read(form, 1)

    def read(self, form: str | None, tokens: int) -> int:
        """Return the bytes of weights in a form that a step of `tokens` tokens reads."""
        return read_bytes(self.shapes(form), self.config, tokens)

    @property
    def multiplied(self) -> tuple[int, int]:
        """Two numbers of weights on one device: for each token, and for each sampled row.

        Each token is multiplied by the weights of all layers, with the experts that it chooses.
        Each sampled row is multiplied by the output projection.
        """
        config, each = self.config, 0
        experts, parameters = config.experts, parameters_of(abstract_model(config, self.dtype))
        count = 1 if experts is None else config.split.places or experts.count
        name = "project" if "embedding.project" in parameters else "table"
        for path, parameter in parameters.items():
            axes = parameter.get_metadata()["axes"]
            if path.startswith("embedding.") or path == TABLES[1] or len(axes) < 2:
                continue
            size = _own_size(config, parameter, path)
            if experts is not None and axes in EXPERTS and axes[0] == "experts":
                size = size * experts.chosen // count
            each += size
        return each, _own_size(config, parameters[f"embedding.{name}"], "embedding")


def read_bytes(shapes: ModelShapes, config: ModelConfig, tokens: int) -> int:
    """Return the bytes of weights that a step reads on each device.

    Of the experts only the expected number that at least one token chooses at random counts.

    Args:
        shapes: shapes of the placed model.
        config: configuration of the model.
        tokens: number of tokens of the step.
    """
    experts, read = config.experts, 0
    # A replica is read in place of its expert, never beside it.
    count = 0 if experts is None else config.split.places or experts.count
    parameters = shapes.parameters
    is_tied = "embedding.project" not in parameters
    for path, parameter in parameters.items():
        size = sum(map(local_bytes, jax.tree.leaves(parameter)))
        axes = parameter.get_metadata()["axes"]
        if experts is not None and axes in EXPERTS and axes[0] == "experts":
            missed = (1 - experts.chosen / count) ** (tokens - 1)
            chosen = count - (count - experts.chosen) * missed
            size = int(size * chosen / count)
        if path not in TABLES or (path == TABLES[0] and is_tied):
            read += size
    return read


def _own_size(config: ModelConfig, parameter: Any, path: str) -> int:
    # Elements of the parameter on the first device.
    axes = parameter.get_metadata()["axes"]
    return prod(part_of(config, axes, tuple(parameter.shape), 0, path).own_shape)
