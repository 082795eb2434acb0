"""Quantize parameters, lay them out for the kernels, and place them on devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.errors import CheckpointError
from jaxserve.models import Decoder, ModelConfig
from jaxserve.models.attention import Attention
from jaxserve.models.placed_weight import PROJECTIONS, flat_shape
from jaxserve.models.shards import parts_of
from jaxserve.models.token_rounding import TokenRounded
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.block_quantize import best_rows, block_forms, grouped_form
from jaxserve.weights.cutting import cut
from jaxserve.weights.fused_parameters import (
    by_path,
    contracted,
    dequantized,
    holds_experts,
    quantized_experts,
)
from jaxserve.weights.heads import quantized_parameter
from jaxserve.weights.layouts import PLACED, laid_out, output_major
from jaxserve.weights.pieces import placed_parts
from jaxserve.weights.quantize import in_groups, quantize
from jaxserve.weights.quantized_tensors import SplitCheckpoint, kv_scale_of
from jaxserve.weights.safetensors import TensorEntry, read_tensor
from pallas_kernels.cpu.blocks import FORMATS
from pallas_kernels.devices import DeviceLimits, target_device

Parameters = Mapping[str, nnx.Param[Any]]
# Places an array on JAX's default device, given the path of its parameter.
Place = Callable[[str, np.ndarray], Any]

SCALES_AXES = ("key_value", "kv_heads")
# Number of input dimensions of the embedding matrices that may stay in blocks, by axes. A table has
# 0, because its rows are looked up.
_EMBEDDINGS = {("embed", "vocab"): 1, ("vocab", "embed"): 0}


def block_inputs(parameter: nnx.Param[Any]) -> int | None:
    """Return the number of input dimensions of a parameter that may be stored in GGUF blocks.

    This is 0 for an embedding table, whose rows are outputs, and None for parameters that are never
    in blocks.
    """
    axes = parameter.get_metadata()["axes"]
    return PROJECTIONS.get(axes, _EMBEDDINGS.get(axes))


def place_on_default(path: str, values: np.ndarray) -> jax.Array:
    """Return values as an array on JAX's default device, on CPU without a copy."""
    return jax.device_put(values)


@dataclass(frozen=True)
class Placement:
    """Quantizes parameters, divides them over devices, lays them out, and places them.

    Attributes:
        config: configuration of the model, with its split over the mesh.
        parameters: the model's parameters by path.
        form: form of the layers' matrices, "int8", "fp8" or "int4", or None for no quantization.
        panels: lay matrices out for our CPU kernels. "int4" is then GGUF blocks.
        mesh: the devices, or None for one device.
        put: places an array that is not quantized.
    """

    config: ModelConfig
    parameters: Parameters
    form: str | None
    panels: bool
    mesh: Mesh | None
    put: Place = place_on_default

    def quantized(self, path: str, values: np.ndarray) -> Any:
        """Return a parameter quantized on the host, or `values` if it is not to be quantized."""
        parameter, form = self.parameters[path], self.form
        blocked = in_blocks(parameter, form, self.panels)
        if blocked is not None:
            outputs = values.shape[blocked:] if blocked else values.shape[:1]
            rows = values.reshape(-1, prod(outputs)).T if blocked else values
            forms = block_forms(path, rows.shape[1], self.config.num_hidden_layers)
            return best_rows(rows, forms).as_weight(outputs, values.dtype.name)
        contract = contracted(parameter)
        if form is not None and holds_experts(parameter):
            return quantized_experts(values, form, stacked_form(parameter))
        if form is None or contract is None:
            return values
        flat = values.reshape(flat_shape(values.shape, contract)).astype(np.float32, copy=False)
        is_int4 = form == "int4"
        codes = in_groups(flat, grouped_form(len(flat))) if is_int4 else quantize(flat, form)
        return codes.as_weight(values.shape[contract:])

    def placed(self, path: str, value: Any) -> Any:
        """Divide a parameter over the devices, lay each part out, and return the parameter placed.

        Args:
            path: path of the parameter.
            value: its array, or its quantized form on the host.
        """
        if self.mesh is None:
            return self._on_default(path, value)
        parameter = self.parameters[path]
        axes = parameter.get_metadata()["axes"]
        parts = parts_of(self.config, axes, tuple(parameter.shape), path)

        def part_on(device: int) -> Any:
            piece = self._on_default(path, cut(value, axes, parts[device], path))
            return piece if multiplies_input_major(target_device()) else output_major(piece)

        return placed_parts(self.mesh, parts, part_on)

    def _on_default(self, path: str, value: Any) -> Any:
        if self.panels:
            value = laid_out(value, self.parameters[path].get_metadata()["axes"])
        if isinstance(value, PLACED):
            return jax.tree.map(jax.device_put, value)
        return self.put(path, value)


def multiplies_input_major(device: DeviceLimits) -> bool:
    """Return whether a device's kernels read quantized matrices with inputs as rows."""
    return not device.is_gpu or device.runs_triton


def use_panels(model: Decoder) -> None:
    """Convert the matrices of a model to panels for CPU products, in place and one at a time."""
    for parameter in _parameters(model):
        value = parameter[...]
        axes = parameter.get_metadata().get("axes")
        placed = laid_out(np.asarray(value) if isinstance(value, jax.Array) else value, axes)
        if isinstance(placed, PLACED):
            parameter.set_value(jax.tree.map(jax.device_put, placed))


def use_output_rows(model: Decoder) -> None:
    """Transpose a model's quantized matrices to outputs as rows, in place and one at a time."""
    for parameter in _parameters(model):
        if isinstance(parameter[...], PLACED):
            parameter.set_value(output_major(parameter[...]))


def _parameters(model: Decoder) -> Iterator[nnx.Param[Any]]:
    return (node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param))


def in_blocks(parameter: nnx.Param[Any], form: str | None, panels: bool) -> int | None:
    """Return the number of input dimensions of a parameter that `form` quantizes to GGUF blocks.

    This applies to all matrices, including the embedding, with "int4" on CPU (`panels`) if their
    inputs are whole blocks. The result is None for other parameters.
    """
    if form != "int4" or not panels or np.dtype(parameter.dtype).itemsize > 4:
        return None
    contract = block_inputs(parameter)
    inputs = prod(parameter.shape[:contract] if contract else parameter.shape[1:])
    return None if contract is None or inputs % FORMATS["Q4_1"].size else contract


def stacked_form(parameter: nnx.Param[Any]) -> str:
    """Return the GGUF format whose scales "int4" has in a parameter of experts or heads.

    Experts have 4 bits. The matrices of heads are small and have the bits of other short rows.
    """
    is_experts = parameter.get_metadata()["axes"][0] == "experts"
    return "Q4_1" if is_experts else grouped_form(parameter.shape[1])


def read_packed(
    checkpoint: SplitCheckpoint,
    parameters: Parameters,
    dims: Mapping[str, int],
    placement: Placement,
    report: Callable[[int], None],
) -> dict[str, Any]:
    """Read the parameters that a checkpoint stores quantized, and return them placed, by path.

    Parameters that are not quantized in jaxserve, such as an output projection, are dequantized. So
    are experts that cannot be stacked.

    Args:
        checkpoint: the checkpoint's tensors.
        parameters: the model's parameters by path.
        dims: sizes of the dimensions that the table of weights names.
        placement: quantizes and places the parameters.
        report: called with the bytes of each parameter after it was read.

    Raises:
        CheckpointError: see `PackedTensor.read`. Also if only some tensors of a fused parameter are
            quantized.
    """
    plain = {weight.path: weight.name for weight in checkpoint.table}
    values: dict[str, Any] = {}
    reported: set[str] = set()  # tensors with parts of several parameters are reported once
    for path, weights in by_path(checkpoint.packed_table).items():
        if path in plain:
            raise CheckpointError(
                f"{checkpoint.checkpoint.directory}: {weights[0].name!r} is quantized and "
                f"{plain[path]!r} is not; they are one product here and must be stored alike"
            )
        # Free the host memory of this parameter before the next one is read.
        value = read_parameter(checkpoint, weights, parameters[path], dims)
        if isinstance(value, np.ndarray):
            value = placement.quantized(path, value)
        values[path] = placement.placed(path, value)
        del value
        names = {weight.name for weight in weights} - reported
        reported |= names
        report(sum(checkpoint.packed[name].num_bytes for name in names))
    return values


def read_parameter(
    checkpoint: SplitCheckpoint,
    weights: list[WeightName],
    parameter: nnx.Param[Any],
    dims: Mapping[str, int],
) -> Any:
    """Read one parameter of quantized tensors: its codes on the host, or its dequantized values.

    Raises:
        CheckpointError: see `PackedTensor.read`. Also if dequantized values are not finite.
    """
    matrices = {name: checkpoint.packed[name].read() for name in {w.name for w in weights}}
    parts = [(weight, matrices[weight.name]) for weight in weights]
    quantized = quantized_parameter(parts, parameter, dims)
    if quantized is not None:
        rounds = checkpoint.packed[weights[0].name].stored.rounds_rows
        return TokenRounded(quantized) if rounds else quantized
    with np.errstate(over="ignore"):  # reported with the tensor's name
        whole = dequantized(parts, parameter.shape, np.dtype(parameter.dtype), dims)
    if not np.isfinite(whole).all():
        raise CheckpointError(
            f"{checkpoint.checkpoint.directory}: {weights[0].name!r}, once it is widened "
            f"to {parameter.dtype}, holds NaN or infinity"
        )
    return whole


def set_kv_scales(
    model: Decoder, entries: Mapping[str, TensorEntry], mesh: Mesh | None = None
) -> None:
    """Set the scales of the fp8 cache in each layer for which a checkpoint has some.

    If a layer has only one of the scales for keys and values, the other one is 1.

    Args:
        model: the model, changed in place.
        entries: the checkpoint's cache scales, by name.
        mesh: devices over which the model is divided, None for one device.

    Raises:
        CheckpointError: a scale is not one positive number, its layer is not in the model, or the
            layer has latent attention.
    """
    by_layer: dict[int, np.ndarray] = {}
    for name, entry in entries.items():
        layer, kind = kv_scale_of(name) or (len(model.layers), "")
        value = read_tensor(entry).astype(np.float32) if entry.shape in ((), (1,)) else None
        if layer >= len(model.layers) or value is None or not 0 < value.item() < np.inf:
            raise CheckpointError(
                f"{entry.shard.path}: tensor {name!r} must be one positive number, for one of the "
                f"{len(model.layers)} layers"
            )
        if not isinstance(_attention_of(model.layers[layer]), Attention):
            raise CheckpointError(
                f"{entry.shard.path}: tensor {name!r} scales a cache, which is not supported with "
                "latent attention"
            )
        heads = model.config.for_layer(layer).num_key_value_heads
        scales = by_layer.setdefault(layer, np.ones((2, heads), np.float32))
        scales[0 if kind == "k" else 1] = value.item()
    for layer, scales in by_layer.items():
        attention = _attention_of(model.layers[layer])
        assert isinstance(attention, Attention)
        config = model.config.for_layer(layer)
        attention.kv_scales = scales_parameter(placed_scales(scales, config, mesh))


def placed_scales(scales: np.ndarray, config: ModelConfig, mesh: Mesh | None) -> jax.Array:
    """Place the scales of a layer's cache, float32[2, K], on the default device or on a mesh."""
    if mesh is None:
        return jnp.asarray(scales)
    parts = parts_of(config, SCALES_AXES, scales.shape)
    return placed_parts(mesh, parts, lambda device: jnp.asarray(parts[device].cut(scales)))


def scales_parameter(values: Any) -> nnx.Param[Any]:
    """Return a parameter with the scales of a layer's cache, float32[2, K]: keys, then values."""
    return nnx.Param(values, axes=SCALES_AXES)


def scales_of(model: Decoder) -> dict[str, Attention]:
    """Return the attention modules that may have fp8 cache scales, by the path of the scales."""
    modules = enumerate(map(_attention_of, model.layers))
    return {
        f"layers.{index}.attention.kv_scales": module
        for index, module in modules
        if isinstance(module, Attention)
    }


def _attention_of(layer: nnx.Module) -> nnx.Module | None:
    return getattr(layer, "attention", None)
