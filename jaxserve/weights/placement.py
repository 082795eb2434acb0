"""Quantize parameters, lay them out for the kernels, and place them on devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
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
from jaxserve.models.output_rows import with_output_rows
from jaxserve.models.panels import BlockPanels, PanelWeight, with_panels
from jaxserve.models.quantized import (
    EXPERTS,
    PROJECTIONS,
    QuantizedExperts,
    QuantizedWeight,
    SplitWeight,
    flat_shape,
)
from jaxserve.models.shards import parts_of
from jaxserve.models.token_rounding import TokenRounded, with_weight
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.block_quantize import best_rows, block_forms, grouped_form
from jaxserve.weights.codes import Codes
from jaxserve.weights.cutting import cut
from jaxserve.weights.expert_codes import fused_experts, quantized_experts
from jaxserve.weights.fused_parameters import dequantized, fused
from jaxserve.weights.panel_rows import Axes, PanelPlan, panel_plan
from jaxserve.weights.pieces import placed_parts
from jaxserve.weights.quantize import in_groups, quantize
from jaxserve.weights.quantized_tensors import SplitCheckpoint, kv_scale_of
from jaxserve.weights.safetensors import TensorEntry, read_tensor
from pallas_kernels.cpu.blocks import FORMATS
from pallas_kernels.devices import DeviceLimits, target_device

Parameters = Mapping[str, nnx.Param[Any]]
# Places a parameter, given its path and values, on its device or devices.
Place = Callable[[str, np.ndarray], Any]
# Lays out a quantized parameter, given its path and value, and places it if it is on the host.
Finish = Callable[[str, Any], Any]

SCALES_AXES = ("key_value", "kv_heads")
QUANTIZED = QuantizedWeight | SplitWeight | QuantizedExperts | BlockPanels | TokenRounded


def contracted(parameter: nnx.Param[Any]) -> int | None:
    """Return how many dimensions of a parameter are inputs, or None if it is never quantized."""
    return PROJECTIONS.get(parameter.get_metadata()["axes"])


# Number of input dimensions of the embedding matrices that may stay in blocks, by axes. A table has
# 0, because its rows are looked up.
_EMBEDDINGS = {("embed", "vocab"): 1, ("vocab", "embed"): 0}


def block_inputs(parameter: nnx.Param[Any]) -> int | None:
    """Return how many dimensions of a parameter are inputs; None if it is never in GGUF blocks."""
    axes = parameter.get_metadata()["axes"]
    return PROJECTIONS.get(axes, _EMBEDDINGS.get(axes))


def holds_experts(parameter: nnx.Param[Any]) -> bool:
    """Return whether a parameter holds the matrices of all experts, which may be quantized."""
    return parameter.get_metadata()["axes"] in EXPERTS


def panelled(place: Place, parameters: Parameters) -> Place:
    """Return a function like `place` that places matrices as panels for our CPU kernels."""

    def place_panels(path: str, values: np.ndarray) -> Any:
        panels = _panels(parameters[path].get_metadata()["axes"], values)
        return place(path, values) if panels is None else panels

    return place_panels


def divided(place: Place, config: ModelConfig, parameters: Parameters, mesh: Mesh | None) -> Place:
    """Return a function like `place` that divides parameters over the devices of a mesh.

    Args:
        place: places a part on JAX's default device, given the path of the parameter.
        config: configuration of the model, with its split over the mesh.
        mesh: the devices, None for one device, which returns `place`.
    """
    if mesh is None:
        return place

    def place_parts(path: str, values: np.ndarray) -> Any:
        parts = parts_of(config, parameters[path].get_metadata()["axes"], values.shape, path)
        return placed_parts(mesh, parts, lambda device: place(path, parts[device].cut(values)))

    return place_parts


def placing(
    place: Place,
    config: ModelConfig,
    parameters: Parameters,
    form: str | None,
    panels: bool,
    mesh: Mesh | None,
) -> Place:
    """Return a function like `place` that also quantizes, lays out panels and divides over a mesh.

    Quantized parameters are returned whole and on the host. `finishing` divides and places them.
    For the arguments see `quantizing` and `divided`.
    """
    place = panelled(place, parameters) if panels else place
    return quantizing(divided(place, config, parameters, mesh), parameters, form, panels)


def finishing(
    config: ModelConfig, parameters: Parameters, panels: bool, mesh: Mesh | None
) -> Finish:
    """Return a function that lays out quantized parameters and places them on the devices.

    The function returns other parameters, which are placed already, unchanged.

    Args:
        config: configuration of the model, with its split over the mesh.
        panels: lay them out for our CPU kernels.
        mesh: the devices, None for one device.
    """

    def placed(value: Any) -> Any:
        return jax.tree.map(jax.device_put, with_weight(value, with_panels) if panels else value)

    def finish(path: str, value: Any) -> Any:
        if not isinstance(value, QUANTIZED):
            return value  # placed already
        if mesh is None:
            return placed(value)
        parameter = parameters[path]
        axes = parameter.get_metadata()["axes"]
        parts = parts_of(config, axes, tuple(parameter.shape), path)

        def form(device: int) -> Any:
            piece = placed(cut(value, axes, parts[device], path))
            turned = not multiplies_input_major(target_device())
            return with_weight(piece, with_output_rows) if turned else piece

        return placed_parts(mesh, parts, form)

    return finish


def multiplies_input_major(device: DeviceLimits) -> bool:
    """Return whether a device's kernels read quantized matrices with inputs as rows."""
    return not device.is_gpu or device.runs_triton


def use_panels(model: Decoder) -> None:
    """Convert the matrices of a model to panels, in place and one at a time."""
    for _, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Param):
            continue
        if not isinstance(node[...], jax.Array):
            node.set_value(with_weight(node[...], with_panels))
        else:
            panels = _panels(node.get_metadata().get("axes"), np.asarray(node[...]))
            if panels is not None:
                node.set_value(panels)


def use_output_rows(model: Decoder) -> None:
    """Convert a model's quantized matrices to outputs as rows, in place and one at a time."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Param) and not isinstance(node[...], jax.Array):
            node.set_value(with_weight(node[...], with_output_rows))


def _panels(names: Any, values: np.ndarray) -> PanelWeight | None:
    axes = panel_axes(names, values.dtype)
    if axes is None:
        return None
    if names in EXPERTS:
        return PanelWeight.of_experts(values)
    inputs, outputs = axes
    return PanelWeight.of(values.transpose(*inputs, *outputs), len(inputs))


def panel_axes(names: Any, dtype: np.dtype) -> Axes | None:
    """Return the input axes and output axes of a parameter, or None if it is not put in panels.

    An embedding table is put in panels only if its dtype has 16 bits. XLA on CPU would convert the
    whole table to float32 for a lookup in a loop, but a lookup in panels reads the bits directly.
    """
    if names == ("vocab", "embed"):
        return ((1,), (0,)) if dtype.itemsize == 2 else None
    if names in EXPERTS:
        return (1,), tuple(range(2, len(names)))
    contract = 1 if names in (("embed", "vocab"), ("embed", "experts")) else PROJECTIONS.get(names)
    if contract is None:
        return None
    return tuple(range(contract)), tuple(range(contract, len(names)))


def panel_plans(
    table: Iterable[WeightName],
    entries: Mapping[str, TensorEntry],
    dims: Mapping[str, int],
    parameters: Parameters,
    form: str | None,
) -> dict[str, PanelPlan]:
    """Return the plans, by path, of the parameters that are read directly into panels.

    Parameters that `form` quantizes have no plan.
    """
    plans = {}
    for path, parts in groupby(sorted(table, key=lambda part: part.path), lambda part: part.path):
        parameter = parameters[path]
        dtype = np.dtype(parameter.dtype)
        axes = panel_axes(parameter.get_metadata()["axes"], dtype)
        matrices = contracted(parameter) is not None or holds_experts(parameter)
        blocked = in_blocks(parameter, form, panels=True) is not None
        quantized = blocked or (form is not None and matrices)
        if axes is not None and not quantized:
            plan = panel_plan(list(parts), entries, dims, parameter.shape, dtype, axes)
            if plan is not None:
                plans[path] = plan
    return plans


def place_panels(plan: PanelPlan, panels: np.ndarray) -> PanelWeight:
    """Place panels on JAX's default device, and return them as the parameter of `plan`."""
    return PanelWeight(jax.device_put(panels), plan.dtype.name, plan.outputs, plan.inputs)


def in_blocks(parameter: nnx.Param[Any], form: str | None, panels: bool) -> int | None:
    """Return how many dimensions of a parameter are inputs, if `form` quantizes it to GGUF blocks.

    This applies to all matrices, including the embedding, with "int4" on CPU (`panels`) if their
    inputs are whole blocks. The result is None for other parameters.
    """
    if form != "int4" or not panels or np.dtype(parameter.dtype).itemsize > 4:
        return None
    contract = block_inputs(parameter)
    inputs = prod(parameter.shape[:contract] if contract else parameter.shape[1:])
    return None if contract is None or inputs % FORMATS["Q4_1"].size else contract


def quantizing(
    place: Place, parameters: Parameters, form: str | None, panels: bool = False
) -> Place:
    """Return a function that quantizes the layers' matrices to `form`, and places other parameters.

    Quantized matrices are returned on the host.

    Args:
        place: places a parameter that is not quantized.
        form: "int8", "fp8", "int4", or None for no quantization.
        panels: the weights are for our CPU kernels. "int4" is then GGUF blocks.
    """
    layers = 1 + max(
        (int(path.split(".")[1]) for path in parameters if "layers." in path), default=0
    )

    def quantize_to_blocks(path: str, values: np.ndarray, contract: int) -> BlockPanels:
        outputs = values.shape[contract:] if contract else values.shape[:1]
        rows = values.reshape(-1, prod(outputs)).T if contract else values
        best = best_rows(rows, block_forms(path, rows.shape[1], layers))
        return BlockPanels.of(best.blocks, best.form, values.dtype.name, outputs)

    def quantize_and_place(path: str, values: np.ndarray) -> Any:
        blocked = in_blocks(parameters[path], form, panels)
        if blocked is not None:
            return quantize_to_blocks(path, values, blocked)
        contract = contracted(parameters[path])
        if form is not None and holds_experts(parameters[path]):
            return quantized_experts(values, form)
        if form is None or contract is None:
            return place(path, values)
        flat = values.reshape(flat_shape(values.shape, contract)).astype(np.float32, copy=False)
        is_int4 = form == "int4"
        codes = in_groups(flat, grouped_form(len(flat))) if is_int4 else quantize(flat, form)
        return codes.as_weight(values.shape[contract:])

    return quantize_and_place


def read_packed(
    checkpoint: SplitCheckpoint,
    parameters: Parameters,
    dims: Mapping[str, int],
    place: Place,
    report: Callable[[int], None],
    finish: Finish,
) -> dict[str, Any]:
    """Read the parameters that a checkpoint stores quantized, and return them placed, by path.

    Parameters that are not quantized in jaxserve, such as an output projection, are dequantized.
    So are experts that cannot be stacked.

    Args:
        place: places a dequantized parameter.
        report: called with the bytes of each parameter after it was read.
        finish: lays out and places a quantized parameter.

    Raises:
        CheckpointError: see `PackedTensor.read`. Also if only some tensors of a fused parameter
            are quantized.
    """
    table = sorted(checkpoint.packed_table, key=lambda part: part.path)
    plain = {weight.path: weight.name for weight in checkpoint.table}
    values: dict[str, Any] = {}
    for path, group in groupby(table, key=lambda part: part.path):
        weights = list(group)
        if path in plain:
            raise CheckpointError(
                f"{checkpoint.checkpoint.directory}: {weights[0].name!r} is quantized and "
                f"{plain[path]!r} is not; they are one product here and must be stored alike"
            )
        # Free the host memory of this parameter before the next one is read.
        value = _read_packed(checkpoint, weights, parameters[path], dims, place)
        values[path] = finish(path, value)
        del value
        report(sum(checkpoint.packed[name].num_bytes for name in {w.name for w in weights}))
    return values


def _read_packed(
    checkpoint: SplitCheckpoint,
    weights: list[WeightName],
    parameter: nnx.Param[Any],
    dims: Mapping[str, int],
    place: Place,
) -> Any:
    """Read one parameter: its codes on the host, or its dequantized values, placed."""
    codes = {name: checkpoint.packed[name].read() for name in {w.name for w in weights}}
    parts = [(weight, codes[weight.name]) for weight in weights]
    contract = contracted(parameter)
    narrow = [(part, value) for part, value in parts if isinstance(value, Codes)]
    quantized: Any = None
    if len(narrow) == len(parts) and contract is not None:
        quantized = fused(narrow, parameter.shape, contract, dims)
    elif len(narrow) == len(parts) and holds_experts(parameter):
        quantized = fused_experts(narrow, parameter.shape, dims)
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
    return place(weights[0].path, whole)


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
        if not isinstance(model.layers[layer].attention, Attention):
            raise CheckpointError(
                f"{entry.shard.path}: tensor {name!r} scales a cache, which is not supported with "
                "latent attention"
            )
        scales = by_layer.setdefault(
            layer, np.ones((2, model.config.num_key_value_heads), np.float32)
        )
        scales[0 if kind == "k" else 1] = value.item()
    for layer, scales in by_layer.items():
        attention = model.layers[layer].attention
        assert isinstance(attention, Attention)
        attention.kv_scales = scales_parameter(placed_scales(scales, model.config, mesh))


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
    """Return the attention modules that have cache scales, by the parameter path of the scales."""
    return {
        f"layers.{index}.attention.kv_scales": layer.attention
        for index, layer in enumerate(model.layers)
        if isinstance(layer.attention, Attention)
    }
