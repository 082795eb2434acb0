"""Build a model with the weights of a checkpoint, or with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_leaves_with_path
from jax.typing import DTypeLike

from jaxserve.models import Decoder, ModelConfig, abstract_model
from jaxserve.models.linear import Constant
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.block_parameters import (
    BlockMatrices,
    block_parts,
    read_blocks,
)
from jaxserve.weights.block_reader import read_parameters, reading_ahead
from jaxserve.weights.block_targets import prepare_panels
from jaxserve.weights.gguf.file import GgufFile
from jaxserve.weights.group_borders import check_groups, group_sizes, stored_groups
from jaxserve.weights.panel_rows import panel_plans
from jaxserve.weights.placement import (
    Parameters,
    Place,
    Placement,
    place_on_default,
    read_packed,
    set_kv_scales,
)
from jaxserve.weights.quantized_tensors import PackedTensor, SplitCheckpoint
from jaxserve.weights.safetensors import TensorEntry
from jaxserve.weights.tensors import StoredTensors, open_tensors
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array

# Called with the bytes read so far and the total bytes to read.
Progress = Callable[[int, int], None]


def load_weights(
    source: str | Path | GgufFile | StoredTensors,
    config: ModelConfig,
    dtype: DTypeLike,
    *,
    quantization: str | None = None,
    kv_scales: bool = False,
    check_finite: bool = True,
    on_progress: Progress | None = None,
    place: Place = place_on_default,
    panels: bool = False,
    packed: bool = False,
    mesh: Mesh | None = None,
) -> Decoder:
    """Return a model with the weights of a Hugging Face checkpoint or GGUF file, cast to `dtype`.

    Host memory holds only a few parameters besides the placed ones.

    Args:
        source: a folder with `model.safetensors` or with shards and an index, a GGUF file, or the
            tensors that `open_tensors` found in one of these.
        config: configuration that the checkpoint must match.
        dtype: dtype of the parameters.
        quantization: form of the layers' matrices, "int8", "fp8" or "int4". None keeps theirs.
        kv_scales: use the checkpoint's scales for an fp8 cache, if it has them.
        check_finite: refuse NaN and infinity, including overflows of the cast.
        on_progress: called after each tensor with the bytes read and the total.
        place: places an array, by default on JAX's default device.
        panels: lay out matrices for our CPU kernels; see `models/placed_weight.py`.
        packed: keep GGUF and MXFP4 blocks that a kernel reads. Ignored with `quantization`.
        mesh: devices over which `config.split` divides the model, None for one device.

    Raises:
        UnsupportedModel: the split over devices would cut a quantization group.
        CheckpointError: a file is missing, malformed, unsafe, changed or not as in `config`, or
            values are not finite.
    """
    stored = source if isinstance(source, StoredTensors) else open_tensors(source, config)
    sorted_, entries, dims = stored.split, stored.entries, stored.dims
    report = _counted(on_progress, [*entries.values(), *sorted_.packed.values()])
    model, parameters = _structure(config, dtype, sorted_.table, entries, panels)
    in_blocks = packed and quantization is None
    parts = block_parts(sorted_.table, entries, parameters, panels) if in_blocks else {}
    matrices = BlockMatrices(entries, dims, on_cpu=panels)
    _check_division(config, parameters, quantization, sorted_, matrices, parts)
    placement = Placement(config, parameters, quantization, panels, mesh, place)
    values = read_packed(sorted_, parameters, dims, placement, report)
    values |= dict(_read_blocks(matrices, parts, placement, report))
    table = [part for part in sorted_.table if part.path not in parts]
    values |= dict(read_plain(table, entries, dims, placement, report, check_finite))
    stored.opened.check_unchanged()
    model = filled(model, values)
    set_kv_scales(model, sorted_.kv_scales if kv_scales else {}, mesh)
    return model


def _read_blocks(
    matrices: BlockMatrices,
    parts: Mapping[str, Sequence[WeightName]],
    placement: Placement,
    report: Callable[[int], None],
) -> Iterator[tuple[str, Any]]:
    """Read the parameters that stay in a file's blocks, and yield each path and placed value.

    `report` is called with the bytes of each parameter after it was placed.
    """
    leave_host, reported = placement.mesh is not None, set[str]()
    for path, value in read_blocks(matrices, parts, placement.parameters, leave_host):
        placed = placement.placed(path, value)
        del value  # free its memory before the next parameter is placed
        names = {part.name for part in parts[path]} - reported
        reported |= names
        report(sum(matrices.entries[name].num_bytes for name in names))
        yield path, placed


def read_plain(
    table: Sequence[WeightName],
    entries: Mapping[str, TensorEntry],
    dims: Mapping[str, int],
    placement: Placement,
    report: Callable[[int], None] = lambda num_bytes: None,
    check_finite: bool = True,
) -> Iterator[tuple[str, Any]]:
    """Read the parameters whose tensors are not quantized, and yield each path and placed value.

    Args:
        table: the tensor of each part of each parameter.
        entries: the tensors by name.
        dims: sizes of the dimensions that the table names.
        placement: quantizes and places the parameters.
        report: called with the bytes that were read since its last call.
        check_finite: refuse NaN and infinity, including overflows of the cast.

    Raises:
        CheckpointError: see `read_parameters`.
    """
    parameters, form, mesh = placement.parameters, placement.form, placement.mesh
    straight = placement.panels and mesh is None  # into panels
    plans = panel_plans(table, entries, dims, parameters, form) if straight else {}
    leave = form is not None or mesh is not None or target_device().platform != "cpu"
    shapes = {path: (leaf.shape, np.dtype(leaf.dtype)) for path, leaf in parameters.items()}
    flags: Any = {"check_finite": check_finite, "leave_host": leave, "plans": plans}
    for path, array in read_parameters(table, entries, dims, shapes, report, **flags):
        plan = plans.get(path)
        if plan is None:
            value = placement.quantized(path, array)
        else:
            value = replace(plan.weight, values=array)
        del array  # free its memory, if `value` is quantized, before `placed` allocates more
        placed = placement.placed(path, value)
        del value
        yield path, placed


def _check_division(
    config: ModelConfig,
    parameters: Parameters,
    quantization: str | None,
    checkpoint: SplitCheckpoint,
    matrices: BlockMatrices,
    parts: Mapping[str, Sequence[WeightName]],
) -> None:
    """Check that the split over devices cuts no quantization group and no GGUF block.

    Args:
        matrices: the parameters that stay in a file's blocks.
        parts: the tensors of these parameters, by path.

    Raises:
        UnsupportedModel: a group or block would be cut (see `check_groups`).
    """
    if config.split.devices == 1:
        return
    sizes = group_sizes(config, parameters, quantization, matrices.on_cpu)
    if quantization is None:
        paths = {part.path for part in checkpoint.packed_table}
        sizes = {path: size for path, size in sizes.items() if path in paths}
    check_groups(config, parameters, sizes)
    shapes = replace(matrices, is_read=False)
    blocks = {path: shapes.parameter(parts[path], parameters[path]) for path in parts}
    remedy = "a dtype, which widens a file's blocks, or "
    check_groups(config, parameters, stored_groups(blocks), remedy)


def _structure(
    config: ModelConfig,
    dtype: DTypeLike,
    table: Iterable[WeightName],
    entries: Mapping[str, TensorEntry],
    panels: bool,
) -> tuple[Decoder, dict[str, nnx.Param[Array]]]:
    """Build the abstract model, and return it with its parameters by path.

    Meanwhile the first tensors are read into the file cache, and the panel kernels are compiled.
    """
    stored = {entry.dtype for entry in entries.values()} if panels else set()
    together = {entry.dtype for entry in entries.values() if len(entry.shape) == 3 and panels}
    kernels = partial(prepare_panels, stored, together, np.dtype(dtype))
    with reading_ahead(table, entries, kernels):
        model = abstract_model(config, dtype)
        return model, parameters_of(model)


def _counted(
    on_progress: Progress | None, entries: Sequence[TensorEntry | PackedTensor]
) -> Callable[[int], None]:
    """Return a function that adds up the byte counts it gets and reports them to `on_progress`.

    `on_progress`, if not None, gets the sum so far and the bytes of all `entries`.
    """
    done, total = 0, sum(entry.num_bytes for entry in entries)

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress(done, total)

    return report


def random_weights(
    config: ModelConfig,
    dtype: DTypeLike,
    seed: int = 0,
    quantization: str | None = None,
    panels: bool = False,
    mesh: Mesh | None = None,
) -> Decoder:
    """Return a model with random weights, for benchmarks. Its logits have about unit size.

    The weights of a projection are normally distributed with variance 1 / inputs. For projections
    that end in the residual stream, of which there are 2 * layers, the variance is also divided by
    2 * layers, so that activations neither vanish nor explode. Norms are 1 and biases are 0.

    Args:
        seed: the same seed gives the same weights.
        quantization: form to which the layers' matrices are quantized, or None.
        panels: lay out matrices for our CPU kernels.
        mesh: devices over which `config.split` divides the model, None for one device.
    """
    model = abstract_model(config, dtype)
    depth = (2 * config.num_hidden_layers) ** -0.5
    parameters = parameters_of(model)
    check_groups(config, parameters, group_sizes(config, parameters, quantization, panels))
    placement = Placement(config, parameters, quantization, panels, mesh)
    streams = np.random.SeedSequence(seed).spawn(len(parameters))

    def values(path: str, stream: np.random.SeedSequence) -> Array:
        parameter = parameters[path]
        initial = parameter.get_metadata()["initial"]
        if isinstance(initial, Constant):
            array = np.full(parameter.shape, initial.value, parameter.dtype)
            return placement.placed(path, array)
        scale = initial.scale * (depth if path.endswith((".out", ".down")) else 1.0)
        generator = np.random.Generator(np.random.SFC64(stream))
        normal = generator.standard_normal(parameter.shape, np.float32)
        normal *= np.float32(scale)
        array = normal.astype(parameter.dtype, copy=False)
        return placement.placed(path, placement.quantized(path, array))

    with ThreadPoolExecutor() as pool:
        arrays = pool.map(values, parameters, streams)
        return filled(model, dict(zip(parameters, arrays, strict=True)))


def parameters_of(model: Decoder) -> dict[str, nnx.Param[Array]]:
    """Return a model's parameters by path, such as "layers.0.mlp.down".

    Flax's own flattening, which `nnx.state` also does for a filter, creates a reference cycle with
    the parameters. The weights of a closed engine would then stay in memory until Python's garbage
    collector runs.
    """
    leaves = tree_leaves_with_path(nnx.split(model)[1], is_leaf=_is_variable)
    return {keystr(path, simple=True, separator="."): parameter for path, parameter in leaves}


def parameter_values(model: Decoder) -> dict[str, Array]:
    """Return the values of a model's parameters by path: arrays or quantized weights."""
    return {path: parameter[...] for path, parameter in parameters_of(model).items()}


def filled(model: Decoder, values: Mapping[str, Any]) -> Decoder:
    """Return the abstract model with the arrays of `values`, by path, in place of shapes.

    The variables are passed to Flax as a list, because Flax would flatten a state; see
    `parameters_of`.
    """
    parameters = parameters_of(model)
    return nnx.merge(
        nnx.graphdef(model), [leaf.replace(values[path]) for path, leaf in parameters.items()]
    )


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
