"""Fill a model with weights: a checkpoint's, or random ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.errors import CheckpointError
from jaxserve.models import Decoder, ModelConfig, abstract_model, checkpoint_weights
from jaxserve.models.linear import Constant
from jaxserve.models.weight_table import WeightName, dimensions
from jaxserve.weights.checkpoint import open_checkpoint
from jaxserve.weights.mxfp4 import PackedEntry
from jaxserve.weights.names import match_names
from jaxserve.weights.packed import sort_packed
from jaxserve.weights.placing import Place, quantizing, read_packed, set_kv_scales
from jaxserve.weights.safetensors import TensorEntry, read_tensor

if TYPE_CHECKING:
    from jaxtyping import Array

ROWS = 64  # of a parameter, copied at a time

# Called with the bytes read so far and the bytes to read in all.
Progress = Callable[[int, int], None]


def load_weights(
    directory: str | Path,
    config: ModelConfig,
    dtype: DTypeLike,
    *,
    quantization: str | None = None,
    kv_scales: bool = False,
    check_finite: bool = True,
    on_progress: Progress | None = None,
    place: Place | None = None,
) -> Decoder:
    """A model with the weights of a Hugging Face checkpoint, cast to `dtype`.

    Beyond the parameters already placed, host memory holds one parameter and one tensor at a time.

    Args:
        directory: holds `model.safetensors`, or shards and their index.
        config: what the checkpoint should hold.
        dtype: of the parameters.
        quantization: "int8", "fp8" or "int4": of the blocks' matrices, one after the other as they
            are read; None keeps them as they are stored. A quantized checkpoint stays in its width.
        kv_scales: take over the checkpoint's scales for a cache in fp8, if it has them.
        check_finite: refuse NaN and infinity, also where the cast to `dtype` makes them.
        on_progress: told after each tensor.
        place: by default, the arrays go to JAX's default device.

    Raises:
        CheckpointError: files missing, malformed, unsafe, in disagreement with `config`, changed
            during the load, or holding values that are not finite.
    """
    opened = open_checkpoint(directory)
    dims = dimensions(config)
    sorted_ = sort_packed(opened, config.quantization, checkpoint_weights(config), dims)
    checkpoint, table = sorted_.checkpoint, sorted_.table
    entries = match_names(checkpoint, config, table)
    total = sum(entry.num_bytes for entry in [*entries.values(), *sorted_.packed.values()])
    report = _counted(on_progress, total)
    model = abstract_model(config, dtype)
    parameters = _parameters(model)
    place = quantizing(place or _place, parameters, quantization)
    values = read_packed(sorted_, parameters, dims, place, report)
    for path, parts in groupby(sorted(table, key=lambda part: part.path), key=_path_of):
        parameter = np.empty(parameters[path].shape, parameters[path].dtype)
        name, tensor = "", parameter
        for part in parts:
            if part.name != name:  # the parts of one tensor follow each other
                entry = entries[part.name]
                read = entry.read if isinstance(entry, PackedEntry) else partial(read_tensor, entry)
                name, tensor = part.name, read()
                report(entry.num_bytes)
            if not _fill(parameter[part.at], part.arrange(tensor, dims), check_finite):
                raise _not_finite(tensor, entries[part.name], parameter.dtype)
        values[path] = place(path, parameter)
    opened.check_unchanged()
    model = _filled(model, values)
    if kv_scales:
        set_kv_scales(model, sorted_.kv_scales)
    return model


def _counted(on_progress: Progress | None, total: int) -> Callable[[int], None]:
    """Adds up what it is told, and tells the sum."""
    done = 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress(done, total)

    return report


def random_weights(
    config: ModelConfig, dtype: DTypeLike, seed: int = 0, quantization: str | None = None
) -> Decoder:
    """A model with normal weights, for benchmarks: fast to build, and logits of about unit size.

    Every projection has variance 1 / inputs, those that end in the residual stream divided by the
    2 * layers of them, so that activations neither vanish nor explode. Norms are 1, biases 0.
    """
    model = abstract_model(config, dtype)
    depth = (2 * config.num_hidden_layers) ** -0.5
    parameters = _parameters(model)
    place = quantizing(_place, parameters, quantization)
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
        return place(path, normal.astype(parameter.dtype, copy=False))

    with ThreadPoolExecutor() as pool:
        arrays = pool.map(values, parameters, streams)
        return _filled(model, dict(zip(parameters, arrays, strict=True)))


def _path_of(part: WeightName) -> str:
    return part.path


def _place(path: str, values: np.ndarray) -> Array:
    return jnp.asarray(values)


def _parameters(model: Decoder) -> dict[str, nnx.Param[Array]]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): parameter for path, parameter in flat}


def _filled(model: Decoder, values: dict[str, Any]) -> Decoder:
    """The abstract model with arrays in place of shapes."""
    graphdef, state = nnx.split(model)
    flat = {
        path: parameter.replace(values[".".join(map(str, path))])
        for path, parameter in nnx.to_flat_state(state)
    }
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _fill(target: np.ndarray, source: np.ndarray, check_finite: bool) -> bool:
    """Copy and cast; False as soon as the cast values are checked and not all finite.

    A few rows at a time: cast first, in the order of the source's memory, so that the transposition
    happens in the processor's cache. That is 3 to 9 times faster on large matrices than
    `target[...] = source`, and needs no second copy of them.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # reported below, by name
        for start in range(0, len(target), ROWS):
            rows = source[start : start + ROWS].astype(target.dtype)
            if check_finite and not _all_finite(rows):
                return False
            target[start : start + ROWS] = rows
    return True


def _not_finite(tensor: np.ndarray, entry: TensorEntry, dtype: np.dtype) -> CheckpointError:
    where = f"{entry.shard.path}: tensor {entry.name!r}"
    if _all_finite(tensor):
        largest = np.abs(tensor).max()
        return CheckpointError(f"{where}: its largest value {largest} is too large for {dtype}")
    return CheckpointError(f"{where}: holds NaN or infinity")


def _all_finite(values: np.ndarray) -> bool:
    if values.dtype.itemsize == 2:
        # Neither kind of 16-bit float is native: looking for full exponents is 3 times faster.
        exponent = np.array(np.inf, values.dtype).view(np.uint16)
        return bool(((values.view(np.uint16) & exponent) != exponent).all())
    return bool(np.isfinite(values).all())
