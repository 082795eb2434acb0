"""Check, before weights are read, that devices do not share a quantization group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from flax import nnx

from jaxserve.errors import UnsupportedModel
from jaxserve.models import ModelConfig
from jaxserve.models.placed_weight import EXPERTS, PROJECTIONS, weights_in
from jaxserve.models.shards import part_of
from jaxserve.weights.block_quantize import block_forms
from jaxserve.weights.placement import in_blocks
from jaxserve.weights.quantize import GROUP
from pallas_kernels.cpu.blocks import FORMATS
from pallas_kernels.quantized_codes import codes_a_row

_NAMED = 3  # number of parameters that an error names


def check_groups(
    config: ModelConfig,
    parameters: Mapping[str, Any],
    sizes: Mapping[str, int],
    remedy: str = "",
) -> None:
    """Check that the split over devices does not cut a group of inputs that share a scale.

    Args:
        config: configuration of the model, with its split.
        parameters: whole parameters by path, with or without values.
        sizes: number of inputs in a group, by path of the quantized parameters.
        remedy: an alternative that the error names before other sizes.

    Raises:
        UnsupportedModel: groups would be cut. The error names parameters, inputs and group sizes.
    """
    devices = config.split.devices
    wrong = [
        f"{path} has {inputs} inputs in groups of {sizes[path]}"
        for path, inputs, on_device in _inputs(config, parameters)
        if path in sizes and on_device < inputs and on_device % sizes[path]
    ]
    if wrong:
        more = f", and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise UnsupportedModel(
            f"tensor_parallel_size is {devices}, which would cut groups of inputs that share a "
            f"scale: {', '.join(wrong[:_NAMED])}{more}; allowed: {remedy}sizes that leave whole "
            "groups"
        )


def _inputs(
    config: ModelConfig, parameters: Mapping[str, nnx.Param[Any]]
) -> Iterator[tuple[str, int, int]]:
    """Yield (path, inputs, inputs on each device) of each parameter that may be quantized.

    Inputs are counted for one matrix. Embeddings are left out.
    """
    for path, parameter in parameters.items():
        axes, shape = parameter.get_metadata()["axes"], tuple(parameter.shape)
        if axes in EXPERTS:
            inputs = slice(1, 2)
        elif axes in PROJECTIONS:
            inputs = slice(PROJECTIONS[axes])
        else:
            continue
        part_shape = part_of(config, axes, shape, 0).own_shape
        yield path, prod(shape[inputs]), prod(part_shape[inputs])


def group_sizes(
    config: ModelConfig, parameters: Mapping[str, Any], form: str | None, on_cpu: bool
) -> dict[str, int]:
    """Return the number of inputs in a quantization group, by path of the quantized parameters.

    Args:
        config: configuration of the model, with its stored quantization.
        parameters: whole parameters by path.
        form: form to which parameters are quantized while they are read, or None.
        on_cpu: "int4" means GGUF blocks, as on CPU.
    """
    stored, sizes = config.quantization, dict[str, int]()
    is_stacked = config.experts is not None and config.experts.stacked
    for path, inputs, _ in _inputs(config, parameters):
        if is_stacked and form is None and parameters[path].get_metadata()["axes"] in EXPERTS:
            continue  # checkpoints with stacked experts do not quantize them
        if stored is not None and stored.form != "full":
            group = stored.group or (stored.block or (0, 0))[1]
            sizes[path] = max(group, codes_a_row(stored.form))
        elif in_blocks(parameters[path], form, on_cpu) is not None:
            names = block_forms(path, inputs, config.num_hidden_layers)
            sizes[path] = max(FORMATS[name].size for name in names)
        elif form == "int4":
            sizes[path] = GROUP
    return sizes


def stored_groups(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of inputs in a group or GGUF block, by path of the quantized parameters.

    `values` are parameters by path, with arrays or shapes.
    """
    quantized = {path: weights_in(value) for path, value in values.items()}
    return {
        path: max(weight.granularity for weight in weights)
        for path, weights in quantized.items()
        if weights
    }
