"""Fill a model with weights: a checkpoint's, or random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_leaves_with_path
from jax.typing import DTypeLike

from jaxserve.models import Decoder, ModelConfig, abstract_model
from jaxserve.models.linear import Constant
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.block_parameters import block_sizes, read_blocks
from jaxserve.weights.block_reader import read_parameters, reading_ahead
from jaxserve.weights.block_targets import prepare_panels
from jaxserve.weights.gguf.file import GgufFile
from jaxserve.weights.group_borders import check_groups, group_sizes
from jaxserve.weights.placement import (
    Finish,
    Parameters,
    Place,
    finishing,
    panel_plans,
    place_panels,
    placing,
    read_packed,
    set_kv_scales,
)
from jaxserve.weights.quantized_tensors import PackedTensor, SplitCheckpoint
from jaxserve.weights.safetensors import TensorEntry
from jaxserve.weights.tensors import StoredTensors, open_tensors
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array

# Called with the bytes read so far and the bytes to read in all.
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
    place: Place | None = None,
    panels: bool = False,
    packed: bool = False,
    mesh: Mesh | None = None,
) -> Decoder:
    """Load a model with the weights of a Hugging Face checkpoint or GGUF file, cast to `dtype`.

    Beyond the parameters already placed, host memory holds a few parameters and blocks of tensors.

    Args:
        source: a folder with `model.safetensors`, or shards and their index; a GGUF file; or the
            tensors that `open_tensors` found in one of these.
        config: what the checkpoint should hold.
        dtype: dtype of the parameters.
        quantization: "int8", "fp8" or "int4" for the blocks' matrices; None keeps them as stored.
        kv_scales: take over the checkpoint's scales for a cache in fp8, if it has them.
        check_finite: refuse NaN and infinity, also where the cast to `dtype` makes them.
        on_progress: called after each tensor.
        place: places an array; by default on JAX's default device.
        panels: lay out matrices for the CPU's own products; see `models/panels.py`.
        packed: keep a GGUF file's blocks where those take them.
        mesh: devices that `config.split` divides the model over; None for one.

    Raises:
        UnsupportedModel: groups of inputs that devices would share.
        CheckpointError: files missing, malformed, unsafe, not as `config` says, or changed
            meanwhile; or values that are not finite.
    """
    stored = source if isinstance(source, StoredTensors) else open_tensors(source, config)
    sorted_, entries, dims = stored.split, stored.entries, stored.dims
    report = _counted(on_progress, [*entries.values(), *sorted_.packed.values()])
    model, parameters = _structure(config, dtype, sorted_.table, entries, panels)
    in_blocks = packed and quantization is None
    blocks = block_sizes(sorted_.table, entries, parameters, panels) if in_blocks and mesh else {}
    _check_division(config, parameters, quantization, panels, sorted_, blocks)
    place = placing(place or place_on_default, config, parameters, quantization, panels, mesh)
    finish = finishing(config, parameters, panels, mesh)
    values, table = read_packed(sorted_, parameters, dims, place, report, finish), sorted_.table
    if in_blocks:
        own: Any = {"on_cpu": panels, "leave_host": mesh is not None}
        table = read_blocks(table, entries, parameters, dims, report, values, finish, **own)
    straight = panels and mesh is None  # into panels
    plans = panel_plans(table, entries, dims, parameters, quantization) if straight else {}
    leave = quantization is not None or mesh is not None or target_device().platform != "cpu"
    flags = {"check_finite": check_finite, "leave_host": leave, "plans": plans}
    values |= dict(_read_plain(table, entries, dims, parameters, report, place, finish, flags))
    stored.opened.check_unchanged()
    model = filled(model, values)
    set_kv_scales(model, sorted_.kv_scales if kv_scales else {}, mesh)
    return model


def _read_plain(
    table: Sequence[WeightName],
    entries: Mapping[str, TensorEntry],
    dims: Mapping[str, int],
    parameters: Parameters,
    report: Callable[[int], None],
    place: Place,
    finish: Finish,
    flags: dict[str, Any],
) -> Iterator[tuple[str, Any]]:
    """Read the parameters of tensors in full, and place each; `flags` are of `read_parameters`."""
    shapes = {path: (leaf.shape, np.dtype(leaf.dtype)) for path, leaf in parameters.items()}
    for path, array in read_parameters(table, entries, dims, shapes, report, **flags):
        plan = flags["plans"].get(path)
        made = place(path, array) if plan is None else place_panels(plan, array)
        del array  # while what was made of it is laid out
        yield path, finish(path, made)


def _check_division(
    config: ModelConfig,
    parameters: Parameters,
    quantization: str | None,
    panels: bool,
    checkpoint: SplitCheckpoint,
    blocks: Mapping[str, int],
) -> None:
    """Refuse a division over devices that cuts groups of what is quantized, or is stored so.

    Args:
        blocks: inputs of a block, by path of the parameters that stay in a file's blocks.

    Raises:
        UnsupportedModel: see `check_groups`.
    """
    sizes = group_sizes(config, parameters, quantization, panels)
    if quantization is None:
        paths = {part.path for part in checkpoint.packed_table}
        sizes = {path: size for path, size in sizes.items() if path in paths}
    check_groups(config, parameters, sizes)
    check_groups(config, parameters, blocks, "a dtype, which widens a file's blocks, or ")


def _structure(
    config: ModelConfig,
    dtype: DTypeLike,
    table: Iterable[WeightName],
    entries: Mapping[str, TensorEntry],
    panels: bool,
) -> tuple[Decoder, dict[str, nnx.Param[Array]]]:
    """Build the abstract model and its parameters while the disk reads and kernels compile."""
    stored = {entry.dtype for entry in entries.values()} if panels else set()
    together = {entry.dtype for entry in entries.values() if len(entry.shape) == 3 and panels}
    kernels = partial(prepare_panels, stored, together, np.dtype(dtype))
    with reading_ahead(table, entries, kernels):
        model = abstract_model(config, dtype)
        return model, parameters_of(model)


def _counted(
    on_progress: Progress | None, entries: Sequence[TensorEntry | PackedTensor]
) -> Callable[[int], None]:
    """Return a report that adds up the bytes it receives and passes the sum to `on_progress`."""
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
    """Build a model with normal weights, for benchmarks, fast and with logits of about unit size.

    Every projection has variance 1 / inputs, those that end in the residual stream divided by the
    2 * layers of them, so that activations neither vanish nor explode. Norms are 1, biases 0.
    """
    model = abstract_model(config, dtype)
    depth = (2 * config.num_hidden_layers) ** -0.5
    parameters = parameters_of(model)
    check_groups(config, parameters, group_sizes(config, parameters, quantization, panels))
    place = placing(place_on_default, config, parameters, quantization, panels, mesh)
    finish = finishing(config, parameters, panels, mesh)
    streams = np.random.SeedSequence(seed).spawn(len(parameters))

    def values(path: str, stream: np.random.SeedSequence) -> Array:
        parameter = parameters[path]
        initial = parameter.get_metadata()["initial"]
        if isinstance(initial, Constant):
            return place(path, np.full(parameter.shape, initial.value, parameter.dtype))
        scale = initial.scale * (depth if path.endswith((".out", ".down")) else 1.0)
        generator = np.random.Generator(np.random.SFC64(stream))
        normal = generator.standard_normal(parameter.shape, np.float32)
        normal *= np.float32(scale)
        return finish(path, place(path, normal.astype(parameter.dtype, copy=False)))

    with ThreadPoolExecutor() as pool:
        arrays = pool.map(values, parameters, streams)
        return filled(model, dict(zip(parameters, arrays, strict=True)))


def place_on_default(path: str, values: np.ndarray) -> Array:
    """Place values on the default device; on CPU this copies nothing, unlike `jnp.asarray`."""
    return jax.device_put(values)


def parameters_of(model: Decoder) -> dict[str, nnx.Param[Array]]:
    """Return a model's parameters by path, such as "layers.0.mlp.down".

    Flax's own flattening, which `nnx.state` does for a filter too, leaves them in a cycle, where a
    closed engine's weights would wait for Python's collection of garbage.
    """
    leaves = tree_leaves_with_path(nnx.split(model)[1], is_leaf=_is_variable)
    return {keystr(path, simple=True, separator="."): parameter for path, parameter in leaves}


def parameter_values(model: Decoder) -> dict[str, Array]:
    """Return a model's arrays by path."""
    return {path: parameter[...] for path, parameter in parameters_of(model).items()}


def filled(model: Decoder, values: Mapping[str, Any]) -> Decoder:
    """Return the abstract model with arrays in place of shapes.

    Flax takes the variables as a list, in its order; it would flatten a state, see
    `parameters_of`.
    """
    parameters = parameters_of(model)
    return nnx.merge(
        nnx.graphdef(model), [leaf.replace(values[path]) for path, leaf in parameters.items()]
    )


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
