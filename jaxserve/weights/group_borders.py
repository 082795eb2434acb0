"""Inputs that share a scale, which devices cannot share: checked before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from flax import nnx

from jaxserve.errors import UnsupportedModel
from jaxserve.models import ModelConfig
from jaxserve.models.quantized import EXPERTS, PROJECTIONS
from jaxserve.models.shards import part_of
from jaxserve.weights.block_quantize import block_forms
from jaxserve.weights.placement import in_blocks
from jaxserve.weights.quantize import GROUP
from pallas_kernels.cpu.blocks import FORMATS
from pallas_kernels.quantized_codes import codes_a_row

_NAMED = 3  # parameters that a refusal names


def check_groups(
    config: ModelConfig,
    parameters: Mapping[str, Any],
    sizes: Mapping[str, int],
    remedy: str = "",
) -> None:
    """Refuse a division over devices that would cut a group of inputs.

    Args:
        config: of the model, with its split.
        parameters: by path, whole, with or without their values.
        sizes: inputs of a group, by path of the parameters that have such.
        remedy: another way out, which the refusal names first.

    Raises:
        UnsupportedModel: names parameters, their inputs on a device and the group.
    """
    devices = config.split.devices
    wrong = [
        f"{path} has {inputs} inputs in groups of {sizes[path]}"
        for path, inputs, own in _inputs(config, parameters)
        if path in sizes and own < inputs and own % sizes[path]
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
    """Yield path, inputs and inputs on each device of the matrices that may be quantized."""
    for path, parameter in parameters.items():
        axes, shape = parameter.get_metadata()["axes"], tuple(parameter.shape)
        if axes in EXPERTS:
            inputs = slice(1, 2)
        elif axes in PROJECTIONS:
            inputs = slice(PROJECTIONS[axes])
        else:
            continue
        own = part_of(config, axes, shape, 0).own_shape
        yield path, prod(shape[inputs]), prod(own[inputs])


def group_sizes(
    config: ModelConfig, parameters: Mapping[str, Any], form: str | None, on_cpu: bool
) -> dict[str, int]:
    """Return the inputs of a group by path, as the checkpoint has them or `form` makes them.

    Args:
        config: of the model.
        parameters: by path, whole.
        form: what is quantized to while it is read.
        on_cpu: whether "int4" is blocks, as on CPU.
    """
    stored, found = config.quantization, dict[str, int]()
    is_stacked = config.experts is not None and config.experts.stacked
    for path, inputs, _ in _inputs(config, parameters):
        if is_stacked and form is None and parameters[path].get_metadata()["axes"] in EXPERTS:
            continue  # such files keep these in full
        if stored is not None and stored.form != "full":
            group = stored.group or (stored.block or (0, 0))[1]
            found[path] = max(group, codes_a_row(stored.form))
        elif in_blocks(parameters[path], form, on_cpu) is not None:
            names = block_forms(path, inputs, config.num_hidden_layers)
            found[path] = max(FORMATS[name].size for name in names)
        elif form == "int4":
            found[path] = GROUP
    return found
