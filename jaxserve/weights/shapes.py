# pyright: reportUnknownMemberType=false
"""The shapes of a placed model: the one description of its arrays before weights are read.

The description follows the same steps as reading: a parameter is taken as the checkpoint has it or
quantized, laid out for the device's products, and divided over devices. The size of a parameter is
the sum of its leaves. Of a checkpoint that is quantized, zero points and orders of inputs are read,
because their values decide which arrays there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import prod
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.typing import DTypeLike

from jaxserve.models import Decoder, ModelConfig, abstract_model
from jaxserve.models.output_rows import with_output_rows
from jaxserve.models.panels import BlockPanels, PanelWeight, QuantizedPanels
from jaxserve.models.quantized import (
    PROJECTIONS,
    QuantizedExperts,
    QuantizedWeight,
    SplitWeight,
)
from jaxserve.models.shards import AXIS, Part, part_of
from jaxserve.models.token_rounding import TokenRounded, with_weight
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.block_codes import codes_layout
from jaxserve.weights.block_parameters import block_parts, form_of
from jaxserve.weights.block_quantize import block_forms, grouped_form
from jaxserve.weights.codes import CodesLayout
from jaxserve.weights.converted import ConvertedModel, expected_tree
from jaxserve.weights.cutting import cuts_inputs, split_pieces
from jaxserve.weights.fused_parameters import place_of
from jaxserve.weights.model_weights import filled, parameters_of
from jaxserve.weights.pieces import joined_place
from jaxserve.weights.placement import (
    QUANTIZED,
    SCALES_AXES,
    block_inputs,
    contracted,
    holds_experts,
    in_blocks,
    panel_axes,
    scales_of,
    scales_parameter,
)
from jaxserve.weights.quantized_tensors import kv_scale_of
from jaxserve.weights.stacked_blocks import MXFP4
from jaxserve.weights.tensors import StoredTensors
from pallas_kernels.cpu import blocks
from pallas_kernels.cpu.blocks import FORMATS
from pallas_kernels.cpu.panels import PANEL, panel_shape
from pallas_kernels.quantized_codes import codes_a_row

_Parameter = nnx.Param[Any]


@dataclass(frozen=True)
class DeviceLayout:
    """How a device takes a model's matrices.

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
    """Build the structure of a model whose weights are placed, with shapes in place of arrays.

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
        part = part_of(config, SCALES_AXES, value.shape, 0)
        scales_of(model)[path].kv_scales = scales_parameter(
            place.joined(part, _shape(np.float32, *part.own_shape))
        )
    return model


def _scales(model: Decoder, stored: StoredTensors) -> dict[str, Any]:
    """Return the shape of the cache's scales by path, of the layers that have some."""
    layers = {match[0] for name in stored.split.kv_scales if (match := kv_scale_of(name))}
    heads = model.config.num_key_value_heads
    return {
        path: jax.ShapeDtypeStruct((2, heads), np.float32)
        for path in scales_of(model)
        if int(path.split(".")[1]) in layers
    }


def _as_read(
    config: ModelConfig,
    parameters: Mapping[str, _Parameter],
    form: str | None,
    layout: DeviceLayout,
    stored: StoredTensors | Literal["random"] | None,
) -> dict[str, Any]:
    """Return each parameter as it is before it is laid out: quantized with shapes, or a shape."""
    quantized: dict[str, Any] = {}
    if isinstance(stored, StoredTensors):
        quantized = _packed(stored, parameters)
        if form is None and layout.keeps_blocks:
            quantized |= _stored_blocks(stored, parameters, layout.panels)
    elif form is None and stored is None:
        quantized = _declared(config, parameters, layout)
    quantize = partial(_quantized, config, form, layout)
    return {
        path: quantized[path] if path in quantized else quantize(path, parameter)
        for path, parameter in parameters.items()
    }


def _packed(stored: StoredTensors, parameters: Mapping[str, _Parameter]) -> dict[str, Any]:
    """Return the parameters of a checkpoint's quantized tensors, by path."""
    split, quantized = stored.split, dict[str, Any]()
    table = sorted(split.packed_table, key=lambda part: part.path)
    for path, group in groupby(table, key=lambda part: part.path):
        parts = list(group)
        layouts = [split.packed[part.name].codes_layout for part in parts]
        narrow = [layout for layout in layouts if layout is not None]
        value = None
        if len(narrow) == len(parts):
            value = _fused(parts, narrow, parameters[path], stored.dims)
        if value is None:  # it is widened
            value = _full(parameters[path])
        elif split.packed[parts[0].name].stored.rounds_rows:
            value = TokenRounded(value)
        quantized[path] = value
    return quantized


def _fused(
    parts: Sequence[WeightName],
    layouts: Sequence[CodesLayout],
    parameter: _Parameter,
    dims: Mapping[str, int],
) -> Any:
    """Return the result of `fused` or `fused_experts` with shapes, or None if codes are widened."""
    contract, shape, first = contracted(parameter), parameter.shape, layouts[0]
    kinds = [layout.zeros for layout in layouts if layout.zeros is not None]
    whole = replace(first, zeros=kinds[0] if kinds else None)
    is_one = all(first.joins(layout) for layout in layouts)
    if contract is not None:
        inputs, outputs = prod(shape[:contract]), shape[contract:]
        if is_one:
            return _matrix(whole, inputs, outputs)
        places = [place_of(part, outputs) for part in parts]
        sizes = [prod(size for _, size in place) for place in places]
        weights = [
            _matrix(codes, inputs, (size,)) for codes, size in zip(layouts, sizes, strict=True)
        ]
        return SplitWeight(tuple(weights), tuple(places), outputs)
    if not holds_experts(parameter) or not is_one or first.order is not None:
        return None
    # All experts are one part, or each part names its expert.
    experts = {str(part.index[0]) for part in parts}
    return _experts(whole, shape) if len(experts) in (1, shape[0]) else None


def _stored_blocks(
    stored: StoredTensors, parameters: Mapping[str, _Parameter], on_cpu: bool
) -> dict[str, Any]:
    """Return the parameters that stay in a file's blocks, or become codes on a GPU, by path."""
    quantized: dict[str, Any] = {}
    for path, parts in block_parts(stored.table, stored.entries, parameters, on_cpu).items():
        parameter = parameters[path]
        forms = [form_of(stored.entries[part.name]) for part in parts]
        if on_cpu:
            quantized[path] = _panels_of_blocks(parts, forms, parameter)
        elif holds_experts(parameter):
            quantized[path] = _experts(codes_layout(forms[0]), parameter.shape)
        else:
            layouts = [codes_layout(form) for form in forms]
            quantized[path] = _fused(parts, layouts, parameter, stored.dims)
    return quantized


def _panels_of_blocks(
    parts: Sequence[WeightName], forms: Sequence[str], parameter: _Parameter
) -> BlockPanels | SplitWeight:
    shape, dtype = parameter.shape, np.dtype(parameter.dtype).name
    contract = block_inputs(parameter)
    if contract is None:
        return _block_panels(forms[0], shape[1], shape[2:], dtype, (shape[0],))
    inputs, outputs = _sizes(shape, contract)
    if len(set(forms)) == 1:
        return _block_panels(forms[0], inputs, outputs, dtype)
    places = [place_of(part, outputs) for part in parts]
    weights = [
        _block_panels(form, inputs, (prod(size for _, size in place),), dtype)
        for form, place in zip(forms, places, strict=True)
    ]
    return SplitWeight(tuple(weights), tuple(places), outputs)


def _declared(
    config: ModelConfig, parameters: Mapping[str, _Parameter], layout: DeviceLayout
) -> dict[str, Any]:
    """Return the parameters that are quantized according to config.json, by path."""
    stored, experts, quantized = config.quantization, config.experts, dict[str, Any]()
    for path, parameter in parameters.items():
        shape, is_experts = parameter.shape, holds_experts(parameter)
        if is_experts and experts is not None and experts.packed and layout.panels:
            if layout.keeps_blocks and np.dtype(parameter.dtype).itemsize <= 4:
                dtype = np.dtype(parameter.dtype).name
                quantized[path] = _block_panels(MXFP4, shape[1], shape[2:], dtype, (shape[0],))
            continue
        if stored is None or stored.form == "full":
            continue
        contract = contracted(parameter)
        if contract is None and (not is_experts or (experts is not None and experts.stacked)):
            continue  # experts that lie in one tensor are in full
        inputs = shape[1] if contract is None else prod(shape[:contract])
        group = min(stored.group or (stored.block or (0, inputs))[1], inputs)
        is_int4 = stored.form == "int4"
        scales, zeros = (np.float16, np.dtype(np.uint8)) if is_int4 else (np.float32, None)
        codes = CodesLayout(stored.form, group, np.dtype(scales), zeros)
        if contract is None:
            quantized[path] = _experts(codes, shape)
        else:
            quantized[path] = _matrix(codes, inputs, shape[contract:])
    return quantized


def _quantized(
    config: ModelConfig, form: str | None, layout: DeviceLayout, path: str, parameter: _Parameter
) -> Any:
    """Return a parameter that is quantized while it is read, or the shape of one in full."""
    shape, contract = parameter.shape, in_blocks(parameter, form, layout.panels)
    if contract is not None:
        inputs, outputs = _sizes(shape, contract)
        forms = block_forms(path, inputs, config.num_hidden_layers)
        # Which of several formats errs least only values say: nearly always it is the wider one.
        widest = max(forms, key=lambda name: FORMATS[name].num_bytes / FORMATS[name].size)
        return _block_panels(widest, inputs, outputs, np.dtype(parameter.dtype).name)
    contract = contracted(parameter)
    is_experts = holds_experts(parameter)
    if form is None or (contract is None and not is_experts):
        return _full(parameter)
    inputs = shape[1] if contract is None else prod(shape[:contract])
    if form == "int4":
        codes = codes_layout("Q4_1" if is_experts else grouped_form(inputs))
    else:
        codes = CodesLayout(form, inputs, np.dtype(np.float32))
    return _experts(codes, shape) if contract is None else _matrix(codes, inputs, shape[contract:])


def _sizes(shape: tuple[int, ...], contract: int) -> tuple[int, tuple[int, ...]]:
    """Return the inputs and the shape of the outputs. With `contract` 0, rows are outputs."""
    return (prod(shape[:contract]), shape[contract:]) if contract else (prod(shape[1:]), shape[:1])


def _full(parameter: _Parameter) -> Any:
    return jax.ShapeDtypeStruct(tuple(parameter.shape), parameter.dtype)


def _shape(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _matrix(layout: CodesLayout, inputs: int, outputs: tuple[int, ...]) -> QuantizedWeight:
    """Return the shapes that `Codes.as_weight` packs codes into."""
    order: Any = None if layout.order is None else _shape(np.int32, inputs)
    arrays = _arrays(layout, inputs, prod(outputs), ())
    return QuantizedWeight(*arrays, order, layout.form, inputs, tuple(outputs))


def _experts(layout: CodesLayout, shape: tuple[int, ...]) -> QuantizedExperts:
    """Return the shapes that `stacked_codes` lays the codes of experts [E, in, out...] into."""
    count, inputs, *outputs = shape
    arrays = _arrays(layout, inputs, prod(outputs), (count,))
    return QuantizedExperts(*arrays, layout.form, inputs, tuple(outputs))


def _arrays(
    layout: CodesLayout, inputs: int, outputs: int, leading: tuple[int, ...]
) -> tuple[Any, Any, Any]:
    rows, groups = layout.rows(inputs)
    codes = np.int8 if layout.form == "int8" else np.uint8
    zeros = None if layout.zeros is None else _shape(layout.zeros, *leading, groups, outputs)
    scales = _shape(layout.scales, *leading, groups, outputs)
    return _shape(codes, *leading, rows, outputs), scales, zeros


def _block_panels(
    form: str, inputs: int, outputs: tuple[int, ...], dtype: str, leading: tuple[int, ...] = ()
) -> BlockPanels:
    panels = _shape(np.uint8, *leading, *blocks.panel_shape(form, inputs, prod(outputs)))
    return BlockPanels(panels, form, dtype, tuple(outputs))


class _Place:
    """Lays parameters out for a device's products, and divides them over devices.

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
        """Return the shapes of a placed parameter, given its shapes as it is read."""
        axes = parameter.get_metadata()["axes"]
        part = part_of(self._config, axes, tuple(parameter.shape), 0)
        if self._mesh is not None:
            value = _cut(value, axes, part, path)
        return self.joined(part, self._laid_out(axes, value))

    def joined(self, part: Part, value: Any) -> Any:
        """Return the shapes of the arrays that all devices' parts make together."""
        mesh = self._mesh
        if mesh is None:
            return value

        def join(leaf: Any) -> Any:
            shape, sharding = joined_place(mesh, leaf.shape, part.is_whole)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(join, value)

    def _laid_out(self, axes: Any, value: Any) -> Any:
        if isinstance(value, QUANTIZED):
            if self._layout.panels:
                value = with_weight(value, _codes_in_panels)
            if self._layout.output_rows:
                value = with_weight(value, partial(jax.eval_shape, with_output_rows))
            return value
        return (_in_panels(axes, value) if self._layout.panels else None) or value


def _in_panels(axes: Any, value: Any) -> PanelWeight | None:
    """Return the shape of an unquantized matrix in panels, or None if it has no panels."""
    shape, dtype = value.shape, np.dtype(value.dtype)
    axes_of_panel = panel_axes(axes, dtype)
    if axes_of_panel is None:
        return None
    inputs, outputs = (tuple(shape[axis] for axis in group) for group in axes_of_panel)
    leading = shape[: len(shape) - len(inputs) - len(outputs)]
    matrix, kind = panel_shape(prod(inputs), prod(outputs), dtype)
    return PanelWeight(_shape(kind, *leading, *matrix), dtype.name, outputs, prod(inputs))


def _codes_in_panels(value: Any) -> Any:
    """Return the shapes that `with_panels` lays codes out in."""
    if isinstance(value, SplitWeight):
        return replace(value, weights=tuple(map(_codes_in_panels, value.weights)))
    if not isinstance(value, QuantizedWeight | QuantizedExperts):
        return value
    order = getattr(value, "order", None)
    *leading, rows, _ = value.values.shape
    inputs = rows * codes_a_row(value.form)
    form = blocks.format_of(value.form, inputs, value.scales, value.zeros)
    if form is not None and order is None:
        return _block_panels(form, inputs, value.outputs, "float32", tuple(leading))

    def laid_out(array: Any, kind: Any) -> Any:
        *many, rows, outputs = array.shape
        return _shape(kind, *many, -(-outputs // PANEL), rows, PANEL)

    scales = np.dtype(value.scales.dtype)
    return QuantizedPanels(
        laid_out(value.values, value.values.dtype),
        laid_out(value.scales, np.uint16 if scales.itemsize == 2 else scales),
        None if value.zeros is None else laid_out(value.zeros, value.zeros.dtype),
        order,
        value.form,
        scales.name,
        value.inputs,
        value.outputs,
    )


def _cut(value: Any, axes: Any, part: Part, path: str) -> Any:
    """Return the shapes of one device's part of a parameter, as `cutting.cut` makes it."""
    if isinstance(value, TokenRounded):
        axis = AXIS if cuts_inputs(axes, part) else None
        return replace(value, weight=_cut(value.weight, axes, part, path), axis=axis)
    own_shape = part.own_shape
    if isinstance(value, QuantizedExperts):
        return _cut_codes(value, own_shape[1], own_shape[2:], own_shape[:1])
    if isinstance(value, QuantizedWeight):
        contract = PROJECTIONS[axes]
        return _cut_codes(value, prod(own_shape[:contract]), own_shape[contract:], ())
    if isinstance(value, BlockPanels):
        if value.panels.ndim > 3:
            return _block_panels(
                value.form, own_shape[1], own_shape[2:], value.dtype, own_shape[:1]
            )
        contract = PROJECTIONS.get(axes, 0 if axes == ("vocab", "embed") else 1)
        return _block_panels(value.form, *_sizes(own_shape, contract), value.dtype)
    if isinstance(value, SplitWeight):
        contract = PROJECTIONS[axes]
        inputs, pieces = prod(own_shape[:contract]), list(split_pieces(value, contract, part))
        weights = [
            _block_panels(matrix.form, inputs, (len(order),), matrix.dtype)
            if isinstance(matrix, BlockPanels)
            else _cut_codes(matrix, inputs, (len(order),), ())
            for matrix, order, _ in pieces
        ]
        return SplitWeight(
            tuple(weights), tuple(place for *_, place in pieces), own_shape[contract:]
        )
    return jax.ShapeDtypeStruct(own_shape, value.dtype)


def _cut_codes(value: Any, inputs: int, outputs: tuple[int, ...], leading: tuple[int, ...]) -> Any:
    """Return codes of fewer inputs and outputs, and of as many experts as `leading` says."""
    rows, groups = value.values.shape[-2], value.scales.shape[-2]
    if inputs < value.inputs:
        group = rows * codes_a_row(value.form) // groups
        rows = inputs // codes_a_row(value.form)
        groups = inputs // group if groups > 1 else 1

    def taken(array: Any, size: int) -> Any:
        return None if array is None else _shape(array.dtype, *leading, size, prod(outputs))

    return replace(
        value,
        values=taken(value.values, rows),
        scales=taken(value.scales, groups),
        zeros=taken(value.zeros, groups),
        inputs=inputs,
        outputs=tuple(outputs),
    )
