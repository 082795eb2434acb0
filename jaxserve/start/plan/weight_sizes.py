"""Sizes of a model's weights in any form, from the shapes of its parameters alone."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from math import prod
from typing import Any

import jax.numpy as jnp

from jaxserve.models import ModelConfig, abstract_model
from jaxserve.models.config.quantization import StoredQuantization
from jaxserve.models.quantized import EXPERTS, PROJECTIONS, flat_shape
from jaxserve.models.shards import Split, part_of
from jaxserve.weights.block_codes import code_bits
from jaxserve.weights.block_quantize import block_forms, grouped_form
from jaxserve.weights.model_weights import parameters_of
from jaxserve.weights.placement import in_blocks
from jaxserve.weights.quantize import GROUP
from pallas_kernels.cpu.blocks import FORMATS


class Weights:
    """Sizes of a model's weights in any form, from their shapes.

    Where the model is divided over devices, they are those of one device's part.

    Args:
        config: of the model, with its split.
        dtype: of weights that are not quantized.
        on_cpu: whether "int4" is blocks, as on CPU.

    Attributes:
        parameters: by path, without their values.
    """

    def __init__(self, config: ModelConfig, dtype: Any, on_cpu: bool = False) -> None:
        self.config, self.dtype = config, jnp.dtype(dtype)
        self._blocks: Mapping[str, int] = {}  # bytes by path
        self._on_cpu = on_cpu
        self._shapes: dict[tuple[Any, tuple[int, ...]], tuple[int, ...]] = {}  # of layers alike
        self.parameters: Mapping[str, Any] = parameters_of(abstract_model(config, dtype))

    def with_blocks(self, blocks: Mapping[str, int]) -> Weights:
        """Return the same weights, some of which stay in a file's blocks."""
        kept = copy(self)
        kept._blocks = blocks
        return kept

    def divided(self, split: Split) -> Weights:
        """Return one device's part of the same weights."""
        part = copy(self)
        part.config, part._shapes = replace(self.config, split=split), {}
        return part

    @property
    def has_blocks(self) -> bool:
        """Return whether parameters stay in a file's blocks."""
        return bool(self._blocks)

    def in_dtype(self, dtype: Any) -> Weights:
        """Return the same weights with another dtype for those that are in full."""
        return Weights(self.config, dtype, self._on_cpu).with_blocks(self._blocks)

    def sizes(self, form: str | None) -> tuple[int, int]:
        """Return the bytes of all weights, and of those that a step of one row reads."""
        held = sum(
            self._bytes(path, parameter, form) for path, parameter in self.parameters.items()
        )
        return held, self.read(form, 1)

    def read(self, form: str | None, tokens: int) -> int:
        """Return the bytes of weights that a step of so many tokens reads.

        Of experts these are the ones that chance chooses for at least one of the tokens.
        """
        experts, read = self.config.experts, 0
        # A replica is read in place of its expert, never beside it.
        count = 0 if experts is None else self.config.split.places or experts.count
        is_tied = "embedding.project" not in self.parameters
        for path, parameter in self.parameters.items():
            size = self._bytes(path, parameter, form)
            if experts is not None and parameter.get_metadata()["axes"] in EXPERTS:
                missed = (1 - experts.chosen / count) ** (tokens - 1)
                chosen = count - (count - experts.chosen) * missed
                size = int(size * chosen / count)
            if path != "embedding.table" or is_tied:
                read += size
        return read

    @property
    def multiplied(self) -> tuple[int, int]:
        """Count the weights multiplied with each token, and those with each row that draws one."""
        experts, each = self.config.experts, 0
        count = 1 if experts is None else self.config.split.places or experts.count
        drawn = self.parameters.get("embedding.project", self.parameters.get("embedding.table"))
        assert drawn is not None
        for path, parameter in self.parameters.items():
            axes, size = parameter.get_metadata()["axes"], prod(self._own_shape(parameter))
            if path.startswith("embedding.") or len(axes) < 2:
                continue
            if experts is not None and axes in EXPERTS:
                size = size * experts.chosen // count
            each += size
        return each, prod(self._own_shape(drawn))

    def _own_shape(self, parameter: Any) -> tuple[int, ...]:
        """Return the shape of the first device's part."""
        axes, shape = parameter.get_metadata()["axes"], tuple(parameter.shape)
        if (axes, shape) not in self._shapes:
            self._shapes[axes, shape] = part_of(self.config, axes, shape, 0).own_shape
        return self._shapes[axes, shape]

    def _bytes(self, path: str, parameter: Any, form: str | None) -> int:
        shape = self._own_shape(parameter)
        if form is None and path in self._blocks:
            return self._blocks[path] * prod(shape) // prod(parameter.shape)
        if (contract := in_blocks(parameter, form, self._on_cpu)) is not None:
            inputs = prod(parameter.shape[:contract] if contract else parameter.shape[1:])
            forms = block_forms(path, inputs, self.config.num_hidden_layers)
            bits = max(FORMATS[name].num_bytes / FORMATS[name].size for name in forms)
            return int(prod(shape) * bits)
        axes, stored = parameter.get_metadata()["axes"], self.config.quantization
        if axes in EXPERTS and self.config.experts is not None and self.config.experts.stacked:
            stored = None  # such files keep these in full
        return _parameter_bytes(parameter, shape, form, stored)


def _parameter_bytes(
    parameter: Any, shape: tuple[int, ...], form: str | None, stored: StoredQuantization | None
) -> int:
    """Return the bytes of a part of `shape`, in a form that the whole parameter decides."""
    axes, whole, count = parameter.get_metadata()["axes"], tuple(parameter.shape), 1
    if axes in EXPERTS:
        count, shape, whole = shape[0], shape[1:], whole[1:]
    elif axes not in PROJECTIONS:
        form, stored = None, None
    if form is None and (stored is None or stored.form == "full"):
        return count * prod(shape) * jnp.dtype(parameter.dtype).itemsize
    inputs, outputs = flat_shape(shape, PROJECTIONS.get(axes, 1))
    if stored is None and form == "int4":
        all_inputs = flat_shape(whole, PROJECTIONS.get(axes, 1))[0]
        bits = code_bits("Q4_1" if axes in EXPERTS else grouped_form(all_inputs))
        return int(count * outputs * -(-inputs // GROUP) * GROUP * bits / 8)
    group = inputs
    if stored is not None:
        form, group = stored.form, stored.group or (stored.block or (0, inputs))[1]
    groups = -(-inputs // group)
    if form != "int4":
        return count * outputs * (inputs + 4 * groups)  # scales in float32
    return count * outputs * groups * (-(-group // 2) + 3)  # 16-bit scales, 8-bit zero points
