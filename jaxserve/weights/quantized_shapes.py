"""Shapes of a model's weights once they are quantized, where none are read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.output_rows import with_output_rows
from jaxserve.models.quantized import PROJECTIONS, QuantizedWeight, flat_shape
from jaxserve.weights.block_quantize import grouped_form
from jaxserve.weights.quantize import GROUP
from pallas_kernels.quantized_codes import codes_a_row


def quantize_shapes(described: nnx.Module, form: str, output_rows: bool = False) -> None:
    """Replace the shapes of the blocks' matrices by those of codes, as quantized at load.

    Args:
        described: a model with shapes in place of arrays.
        form: "int8", "fp8" or "int4".
        output_rows: lay codes out as an engine does on a card without Triton.
    """
    for _, parameter in nnx.iter_graph(described):
        if not isinstance(parameter, nnx.Param):
            continue
        axes: Any = parameter.get_metadata().get("axes")
        contract = PROJECTIONS.get(axes)
        if contract is None:
            continue
        shape = parameter.get_value().shape
        inputs, outputs = flat_shape(shape, contract)
        own, groups, rows, kind = form, 1, inputs, jnp.float32
        if form == "int4":
            own = "int4" if grouped_form(inputs) == "Q4_1" else "int8"
            groups, kind = -(-inputs // GROUP), jnp.float16
            rows = groups * GROUP // codes_a_row(own)
        scales = _shape(kind, groups, outputs)
        weight = QuantizedWeight(
            _shape(jnp.int8 if own == "int8" else jnp.uint8, rows, outputs),
            scales,
            scales if own == "int4" else None,  # minima
            None,
            own,
            inputs,
            shape[contract:],
        )
        parameter.set_value(jax.eval_shape(with_output_rows, weight) if output_rows else weight)


def _shape(dtype: Any, *shape: int) -> Any:
    """Describe an array, where one is expected."""
    return jax.ShapeDtypeStruct(shape, dtype)
