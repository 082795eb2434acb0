"""Parameters on their way to the device: quantized if asked for, or as the checkpoint has them."""

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
# Puts a parameter, given its path and values, on its device or devices.
Place = Callable[[str, np.ndarray], Any]
# Lays out a parameter's form, given its path, and puts on a device what is not on one yet.
Finish = Callable[[str, Any], Any]

SCALES_AXES = ("key_value", "kv_heads")
QUANTIZED = QuantizedWeight | SplitWeight | QuantizedExperts | BlockPanels | TokenRounded


def contracted(parameter: nnx.Param[Any]) -> int | None:
    """Return the number of a parameter's dimensions that are inputs; None if it stays in full."""
    return PROJECTIONS.get(parameter.get_metadata()["axes"])


# Matrices of the embedding that may be kept in blocks, by their axes, and how many of those are
# inputs: of a table none, since its outputs are looked up.
_EMBEDDINGS = {("embed", "vocab"): 1, ("vocab", "embed"): 0}


def block_inputs(parameter: nnx.Param[Any]) -> int | None:
    """Return the number of a parameter's dimensions that are inputs, if it may be in blocks."""
    axes = parameter.get_metadata()["axes"]
    return PROJECTIONS.get(axes, _EMBEDDINGS.get(axes))


def holds_experts(parameter: nnx.Param[Any]) -> bool:
    """Return whether a parameter is a matrix for each expert, which may be quantized."""
    return parameter.get_metadata()["axes"] in EXPERTS


def panelled(place: Place, parameters: Parameters) -> Place:
    """Return `place`, changed to lay out matrices as the CPU's own product reads them."""

    def place_panels(path: str, values: np.ndarray) -> Any:
        panels = _panels(parameters[path].get_metadata()["axes"], values)
        return place(path, values) if panels is None else panels

    return place_panels


def divided(place: Place, config: ModelConfig, parameters: Parameters, mesh: Mesh | None) -> Place:
    """Return `place`, changed to put on each device of a mesh the part that it has.

    Args:
        place: makes a part's form on JAX's default device, given the parameter's path.
        config: of the model, with its split over the mesh.
        mesh: None for one device.
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
    """Return `place`, changed to quantize, to lay out panels and to divide over a mesh.

    Args are those of `quantizing` and `divided`. What is quantized is whole; see `finishing`.
    """
    place = panelled(place, parameters) if panels else place
    return quantizing(divided(place, config, parameters, mesh), parameters, form, panels)


def finishing(
    config: ModelConfig, parameters: Parameters, panels: bool, mesh: Mesh | None
) -> Finish:
    """Return what lays out quantized matrices, each device's part of them on a mesh.

    Args:
        config: of the model, with its split over the mesh.
        panels: lay them out for the CPU's own products.
        mesh: None for one device.
    """

    def placed(value: Any) -> Any:
        return jax.tree.map(jax.device_put, with_weight(value, with_panels) if panels else value)

    def finish(path: str, value: Any) -> Any:
        if not isinstance(value, QUANTIZED):
            return value  # which has its place
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
    """Return whether a device multiplies quantized matrices whose rows are inputs."""
    return not device.is_gpu or device.runs_triton


def use_panels(model: Decoder) -> None:
    """Lay out a model's matrices in panels, in place, one after the other."""
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
    """Transpose a model's quantized matrices, in place, one after the other."""
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
    """Return the axes of inputs and of outputs of a parameter that has panels, else None.

    A table of embeddings has panels only in 16 bits: for a lookup of its rows within a loop, XLA
    on CPU would convert all of it to float32. From panels the bits themselves are looked up.
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
    """Plan, by path, how parameters not quantized to `form` are read straight into panels."""
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
    """Place the panels that were read, as a parameter."""
    return PanelWeight(jax.device_put(panels), plan.dtype.name, plan.outputs, plan.inputs)


def in_blocks(parameter: nnx.Param[Any], form: str | None, panels: bool) -> int | None:
    """Return how many dimensions of a parameter are inputs that is quantized to blocks.

    With "int4" on CPU these are all matrices, those of the embedding too; None for others.
    """
    if form != "int4" or not panels or np.dtype(parameter.dtype).itemsize > 4:
        return None
    contract = block_inputs(parameter)
    inputs = prod(parameter.shape[:contract] if contract else parameter.shape[1:])
    return None if contract is None or inputs % FORMATS["Q4_1"].size else contract


def quantizing(
    place: Place, parameters: Parameters, form: str | None, panels: bool = False
) -> Place:
    """Return `place`, preceded by quantization to `form` for the blocks' matrices.

    Args:
        panels: whether they are for the CPU's own products, which take blocks of 4 bits.
    """
    layers = 1 + max(
        (int(path.split(".")[1]) for path in parameters if "layers." in path), default=0
    )

    def quantize_to_blocks(path: str, values: np.ndarray, contract: int) -> BlockPanels:
        outputs = values.shape[contract:] if contract else values.shape[:1]
        rows = values.reshape(-1, prod(outputs)).T if contract else values
        made = best_rows(rows, block_forms(path, rows.shape[1], layers))
        return BlockPanels.of(made.blocks, made.form, values.dtype.name, outputs)

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
    """Read the parameters that a checkpoint holds quantized, by path; each is finished at once.

    Those that jaxserve keeps in full (an output projection, say) are dequantized, and so are
    experts that cannot be kept side by side. `report` receives the bytes of every parameter read.

    Raises:
        CheckpointError: see `PackedTensor.read`; or a fused parameter of which the checkpoint has
            quantized only a part.
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
        # What was read goes before the next is.
        made = _read_packed(checkpoint, weights, parameters[path], dims, place)
        values[path] = finish(path, made)
        del made
        report(sum(checkpoint.packed[name].num_bytes for name in {w.name for w in weights}))
    return values


def _read_packed(
    checkpoint: SplitCheckpoint,
    weights: list[WeightName],
    parameter: nnx.Param[Any],
    dims: Mapping[str, int],
    place: Place,
) -> Any:
    """Read one parameter of `read_packed`: its codes, or, placed, what they stand for."""
    codes = {name: checkpoint.packed[name].read() for name in {w.name for w in weights}}
    parts = [(weight, codes[weight.name]) for weight in weights]
    contract = contracted(parameter)
    narrow = [(part, own) for part, own in parts if isinstance(own, Codes)]
    kept: Any = None
    if len(narrow) == len(parts) and contract is not None:
        kept = fused(narrow, parameter.shape, contract, dims)
    elif len(narrow) == len(parts) and holds_experts(parameter):
        kept = fused_experts(narrow, parameter.shape, dims)
    if kept is not None:
        rounds = checkpoint.packed[weights[0].name].stored.rounds_rows
        return TokenRounded(kept) if rounds else kept
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
    """Give each layer the scales of its cache that a checkpoint holds, 1 where it holds one only.

    Args:
        entries: of the checkpoint's scales, by name.
        mesh: devices that the model is divided over; None for one.

    Raises:
        CheckpointError: a scale that is not one positive number for a layer of the model.
    """
    found: dict[int, np.ndarray] = {}
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
        scales = found.setdefault(layer, np.ones((2, model.config.num_key_value_heads), np.float32))
        scales[0 if kind == "k" else 1] = value.item()
    for layer, scales in found.items():
        attention = model.layers[layer].attention
        assert isinstance(attention, Attention)
        attention.kv_scales = scales_parameter(placed_scales(scales, model.config, mesh))


def placed_scales(scales: np.ndarray, config: ModelConfig, mesh: Mesh | None) -> jax.Array:
    """Place float32[2, K], the scales of a layer's cache, on the device or devices."""
    if mesh is None:
        return jnp.asarray(scales)
    parts = parts_of(config, SCALES_AXES, scales.shape)
    return placed_parts(mesh, parts, lambda device: jnp.asarray(parts[device].cut(scales)))


def scales_parameter(values: Any) -> nnx.Param[Any]:
    """Wrap float32[2, K] as the scales of a layer's cache, first of its keys, then its values."""
    return nnx.Param(values, axes=SCALES_AXES)


def scales_of(model: Decoder) -> dict[str, Attention]:
    """Return the attention that holds each layer's scales, by their path as a parameter."""
    return {
        f"layers.{index}.attention.kv_scales": layer.attention
        for index, layer in enumerate(model.layers)
        if isinstance(layer.attention, Attention)
    }
