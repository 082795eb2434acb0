# pyright: reportUnknownMemberType=false
"""The shapes of a placed model: the one description of its arrays before weights are read.

The description follows the same steps as reading: a parameter is taken as the checkpoint has it or
quantized, laid out for the device's products, and divided over devices. The size of a parameter is
the sum of its leaves. Of a checkpoint that is quantized, zero points and orders of inputs are read,
because their values decide which arrays there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.typing import DTypeLike

from jaxserve.models import Decoder, ModelConfig, abstract_model
from jaxserve.models.placed_weight import EXPERTS, HEAD_KEYS
from jaxserve.models.shards import AXIS, Part, part_of
from jaxserve.models.token_rounding import TokenRounded
from jaxserve.weights.block_codes import described_codes
from jaxserve.weights.block_parameters import BlockMatrices, block_parts
from jaxserve.weights.block_quantize import block_forms, grouped_form
from jaxserve.weights.converted import ConvertedModel, expected_tree
from jaxserve.weights.cutting import cut
from jaxserve.weights.fused_parameters import (
    by_path,
    contracted,
    holds_experts,
    stacked,
)
from jaxserve.weights.heads import quantized_parameter, transposed
from jaxserve.weights.host_matrix import FLOAT16, HostMatrix
from jaxserve.weights.layouts import block_panels, laid_out, output_major
from jaxserve.weights.model_weights import filled, parameters_of
from jaxserve.weights.pieces import joined_place
from jaxserve.weights.placement import (
    SCALES_AXES,
    in_blocks,
    scales_of,
    scales_parameter,
    stacked_form,
)
from jaxserve.weights.quantized_tensors import kv_scale_of
from jaxserve.weights.stacked_blocks import MXFP4
from jaxserve.weights.tensors import StoredTensors
from pallas_kernels.cpu.blocks import FORMATS

_Parameter = nnx.Param[Any]


@dataclass(frozen=True)
class DeviceLayout:
    """The layout of a model's matrices on a device.

    Attributes:
        panels: in panels for a CPU's products.
        output_rows: quantized matrices with a row for each output, for cards without Triton.
        keeps_blocks: GGUF blocks stay quantized. A GPU takes their codes.
        kv_scales: the checkpoint's scales of an fp8 cache are taken over.
    """

    panels: bool = False
    output_rows: bool = False
    keeps_blocks: bool = False
    kv_scales: bool = False


PLAIN = DeviceLayout()
RANDOM = "random"
"""In place of stored tensors: random weights, none of which a checkpoint has quantized."""
Stored = StoredTensors | ConvertedModel | Literal["random"]


def shapes_of_model(
    config: ModelConfig,
    dtype: DTypeLike,
    form: str | None,
    layout: DeviceLayout,
    stored: Stored | None = None,
) -> Decoder:
    """Return a model as it is after its weights are placed, with shapes in place of arrays.

    No JAX backend is needed: of a model that is divided over devices, shapes have a sharding over
    an abstract mesh.

    Args:
        config: of the model, with its split over devices.
        dtype: of the parameters that are not quantized.
        form: "int8", "fp8" or "int4" to quantize to, or None to keep the stored weights.
        layout: of the device.
        stored: the stored tensors, or `RANDOM`. If it is None, all matrices of a quantized
            checkpoint are taken to have the form that `config.quantization` names.

    Raises:
        CheckpointError: a quantized tensor of the checkpoint is malformed.
    """
    model = abstract_model(config, dtype)
    parameters = parameters_of(model)
    scales: dict[str, Any] = {}
    if isinstance(stored, ConvertedModel):
        values = expected_tree(stored, model)
        scales = {path: values.pop(path) for path in list(values) if path in scales_of(model)}
    else:
        values = _as_read(config, parameters, form, layout, stored)
        if layout.kv_scales and isinstance(stored, StoredTensors):
            scales = _scales(model, stored)
    place = _Place(config, layout)
    model = filled(
        model, {path: place(path, parameters[path], value) for path, value in values.items()}
    )
    for path, value in scales.items() if layout.kv_scales else ():
        part = part_of(config, SCALES_AXES, value.shape, 0, path)
        scales_of(model)[path].kv_scales = scales_parameter(
            place.joined(part, jax.ShapeDtypeStruct(part.own_shape, np.float32))
        )
    return model


def _scales(model: Decoder, stored: StoredTensors) -> dict[str, Any]:
    # By path, of the layers that have some.
    layers = {match[0] for name in stored.split.kv_scales if (match := kv_scale_of(name))}
    return {
        path: jax.ShapeDtypeStruct((2, module.kv_heads), np.float32)
        for path, module in scales_of(model).items()
        if int(path.split(".")[1]) in layers
    }


def _as_read(
    config: ModelConfig,
    parameters: Mapping[str, _Parameter],
    form: str | None,
    layout: DeviceLayout,
    stored: StoredTensors | Literal["random"] | None,
) -> dict[str, Any]:
    """Return each parameter, by path, as it is read and before it is laid out for a device.

    A quantized parameter has shapes in place of arrays. Any other one is a single shape.
    """
    quantized: dict[str, Any] = {}
    if isinstance(stored, StoredTensors):
        quantized = _packed(stored, parameters)
        if form is None and layout.keeps_blocks:
            matrices = BlockMatrices(stored.entries, stored.dims, layout.panels, is_read=False)
            parts = block_parts(stored.table, stored.entries, parameters, layout.panels)
            for path in parts:
                quantized[path] = matrices.parameter(parts[path], parameters[path])
    elif form is None and stored is None:
        quantized = _declared(config, parameters, layout)
    quantize = partial(_quantized, config, form, layout)
    return {
        path: quantized[path] if path in quantized else quantize(path, parameter)
        for path, parameter in parameters.items()
    }


def _packed(stored: StoredTensors, parameters: Mapping[str, _Parameter]) -> dict[str, Any]:
    """Return the shapes of the parameters that a checkpoint stores quantized, by path.

    Parameters that jaxserve widens are shapes in their own dtype.
    """
    split, quantized = stored.split, dict[str, Any]()
    for path, weights in by_path(split.packed_table).items():
        parts = [(weight, split.packed[weight.name].describe()) for weight in weights]
        value = quantized_parameter(parts, parameters[path], stored.dims)
        if value is None:  # it is widened
            quantized[path] = _full(parameters[path])
        else:
            rounds = split.packed[weights[0].name].stored.rounds_rows
            quantized[path] = TokenRounded(value) if rounds else value
    return quantized


def _declared(
    config: ModelConfig, parameters: Mapping[str, _Parameter], layout: DeviceLayout
) -> dict[str, Any]:
    """Return the shapes of the parameters that are quantized according to config.json, by path."""
    stored, experts, quantized = config.quantization, config.experts, dict[str, Any]()
    for path, parameter in parameters.items():
        axes = parameter.get_metadata()["axes"]
        is_experts, (inputs, outputs) = axes in EXPERTS, _matrix_shape(parameter)
        of_experts = is_experts and axes[0] == "experts"
        if of_experts and experts is not None and experts.packed and layout.panels:
            if layout.keeps_blocks and np.dtype(parameter.dtype).itemsize <= 4:
                matrix = HostMatrix.described(MXFP4, (inputs, outputs))
                quantized[path] = _weight(matrix, parameter)
            continue
        if stored is None or stored.form == "full":
            continue
        # Experts that lie in one tensor are in full.
        in_one_tensor = of_experts and experts is not None and experts.stacked
        if in_one_tensor or not (is_experts or contracted(parameter) is not None):
            continue
        group = min(stored.group or (stored.block or (0, inputs))[1], inputs)
        is_int4 = stored.form == "int4"
        scales, zeros = (FLOAT16, np.uint8) if is_int4 else (np.float32, None)
        if axes == HEAD_KEYS:  # stored with the latent as input
            inputs, outputs = outputs, parameter.shape[0] * inputs
            group = min(stored.group or (stored.block or (0, inputs))[1], inputs)
        matrix = HostMatrix.described(stored.form, (inputs, outputs), group, scales, zeros)
        if axes == HEAD_KEYS:
            count, size = parameter.shape[:2]
            quantized[path] = transposed(matrix, [size * head for head in range(count)], size)
        else:
            quantized[path] = _weight(matrix, parameter)
    return quantized


def _quantized(
    config: ModelConfig, form: str | None, layout: DeviceLayout, path: str, parameter: _Parameter
) -> Any:
    """Return the shapes of a parameter that is quantized to `form` while it is read.

    A parameter that keeps its dtype is a single shape.
    """
    shape, contract = tuple(parameter.shape), in_blocks(parameter, form, layout.panels)
    if contract is not None:
        outputs = shape[contract:] if contract else shape[:1]
        inputs = prod(shape) // prod(outputs)
        forms = block_forms(path, inputs, config.num_hidden_layers)
        # Which of several formats errs least only values say: nearly always it is the wider one.
        widest = max(forms, key=lambda name: FORMATS[name].num_bytes / FORMATS[name].size)
        return block_panels(widest, inputs, outputs, np.dtype(parameter.dtype).name)
    is_experts = holds_experts(parameter)
    if form is None or (contracted(parameter) is None and not is_experts):
        return _full(parameter)
    inputs, outputs = _matrix_shape(parameter)
    if form == "int4":
        name = stacked_form(parameter) if is_experts else grouped_form(inputs)
        return _weight(described_codes(name, (inputs, outputs)), parameter)
    matrix = HostMatrix.described(form, (inputs, outputs), inputs, np.float32)
    return _weight(matrix, parameter)


def _matrix_shape(parameter: _Parameter) -> tuple[int, int]:
    # The inputs and outputs of a projection, or of the matrix of each expert.
    shape, contract = parameter.shape, contracted(parameter)
    if holds_experts(parameter):
        return shape[1], prod(shape[2:])
    return prod(shape[:contract]), prod(shape[contract:])


def _weight(matrix: HostMatrix, parameter: _Parameter) -> Any:
    # The shapes of a projection, or of experts, whose matrices are like `matrix`.
    shape, dtype = tuple(parameter.shape), np.dtype(parameter.dtype).name
    if holds_experts(parameter):
        return stacked(lambda _: matrix, shape[0], shape[2:], dtype)
    return matrix.as_weight(shape[contracted(parameter) :], dtype)


def _full(parameter: _Parameter) -> Any:
    return jax.ShapeDtypeStruct(tuple(parameter.shape), parameter.dtype)


class _Place:
    """Lays the shapes of parameters out for a device's products, and divides them over devices.

    Args:
        config: of the model, with its split.
        layout: of the device.
    """

    def __init__(self, config: ModelConfig, layout: DeviceLayout) -> None:
        self._config, self._layout = config, layout
        count = config.split.devices
        self._mesh = (
            None if count == 1 else AbstractMesh((count,), (AXIS,), axis_types=(AxisType.Auto,))
        )

    def __call__(self, path: str, parameter: _Parameter, value: Any) -> Any:
        """Return the shapes of a placed parameter, given its shapes as it is read (`value`)."""
        axes = parameter.get_metadata()["axes"]
        part = part_of(self._config, axes, tuple(parameter.shape), 0, path)
        if self._mesh is not None:
            value = cut(value, axes, part, path)
        if self._layout.panels:
            value = laid_out(value, axes)
        return self.joined(part, output_major(value) if self._layout.output_rows else value)

    def joined(self, part: Part, value: Any) -> Any:
        """Return the shapes of a parameter over all devices, given those of one device's part."""
        mesh = self._mesh
        if mesh is None:
            return value

        def join(leaf: Any) -> Any:
            shape, sharding = joined_place(mesh, leaf.shape, part.is_whole)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(join, value)
