"""Fill a model with weights: a checkpoint's, or random ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models import Decoder, ModelConfig, abstract_model, checkpoint_weights
from jaxserve.models.linear import Constant
from jaxserve.models.weight_table import dimensions
from jaxserve.weights.checkpoint import open_checkpoint
from jaxserve.weights.gguf import GgufFile
from jaxserve.weights.gguf_names import named_tensors
from jaxserve.weights.names import match_names
from jaxserve.weights.reading import Progress, read_parameters

if TYPE_CHECKING:
    from jaxtyping import Array

# Puts a parameter, given its path and values, on its device or devices.
Place = Callable[[str, np.ndarray], jnp.ndarray]


def load_weights(
    source: str | Path | GgufFile,
    config: ModelConfig,
    dtype: DTypeLike,
    *,
    check_finite: bool = True,
    on_progress: Progress | None = None,
    place: Place | None = None,
) -> Decoder:
    """A model with the weights of a Hugging Face checkpoint or a GGUF file, cast to `dtype`.

    Beyond the parameters already placed, host memory holds a few parameters and blocks of tensors.

    Args:
        source: a folder with `model.safetensors`, or shards and their index; or a GGUF file.
        config: what the checkpoint should hold.
        dtype: of the parameters.
        check_finite: refuse NaN and infinity, also where the cast to `dtype` makes them.
        on_progress: told after each tensor.
        place: by default, the arrays go to JAX's default device.

    Raises:
        CheckpointError: files missing, malformed, unsafe, in disagreement with `config`, changed
            during the load, or holding values that are not finite.
    """
    checkpoint = named_tensors(source) if isinstance(source, GgufFile) else open_checkpoint(source)
    table = checkpoint_weights(config)
    entries = match_names(checkpoint, config, table)
    model = abstract_model(config, dtype)
    shapes = {
        path: (parameter.shape, np.dtype(parameter.dtype))
        for path, parameter in parameters_of(model).items()
    }
    parameters = read_parameters(
        table,
        entries,
        dimensions(config),
        shapes,
        check_finite=check_finite,
        on_progress=on_progress,
    )
    place = place or place_on_default
    values = {path: place(path, array) for path, array in parameters}
    checkpoint.check_unchanged()
    return filled(model, values)


def random_weights(config: ModelConfig, dtype: DTypeLike, seed: int = 0) -> Decoder:
    """A model with normal weights, for benchmarks: fast to build, and logits of about unit size.

    Every projection has variance 1 / inputs, those that end in the residual stream divided by the
    2 * layers of them, so that activations neither vanish nor explode. Norms are 1, biases 0.
    """
    model = abstract_model(config, dtype)
    depth = (2 * config.num_hidden_layers) ** -0.5
    parameters = parameters_of(model)
    streams = np.random.SeedSequence(seed).spawn(len(parameters))

    def values(path: str, stream: np.random.SeedSequence) -> Array:
        parameter = parameters[path]
        initial = parameter.get_metadata()["initial"]
        if isinstance(initial, Constant):
            return place_on_default(path, np.full(parameter.shape, initial.value, parameter.dtype))
        scale = initial.scale * (depth if path.endswith((".out", ".down")) else 1.0)
        generator = np.random.Generator(np.random.SFC64(stream))
        normal = generator.standard_normal(parameter.shape, np.float32)
        normal *= np.float32(scale)
        return place_on_default(path, normal.astype(parameter.dtype, copy=False))

    with ThreadPoolExecutor() as pool:
        arrays = pool.map(values, parameters, streams)
        return filled(model, dict(zip(parameters, arrays, strict=True)))


def place_on_default(path: str, values: np.ndarray) -> Array:
    """On the default device; on CPU the array is taken over where `jnp.asarray` would copy it."""
    return jax.device_put(values)


def parameters_of(model: Decoder) -> dict[str, nnx.Param[Array]]:
    """A model's parameters by path, "layers.0.mlp.down"."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): parameter for path, parameter in flat}


def parameter_values(model: Decoder) -> dict[str, Array]:
    """A model's arrays by path."""
    return {path: parameter[...] for path, parameter in parameters_of(model).items()}


def filled(model: Decoder, values: dict[str, Array]) -> Decoder:
    """The abstract model with arrays in place of shapes."""
    graphdef, state = nnx.split(model)
    flat = {
        path: parameter.replace(values[".".join(map(str, path))])
        for path, parameter in nnx.to_flat_state(state)
    }
    return nnx.merge(graphdef, nnx.from_flat_state(flat))
