"""Shapes of a model's weights once they are quantized, where none are read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.output_rows import with_output_rows
from jaxserve.models.quantized import PROJECTIONS, QuantizedWeight, flat_shape
from jaxserve.weights.quantize import INT4_GROUP
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
        rows, groups = inputs // codes_a_row(form), inputs // INT4_GROUP if form == "int4" else 1
        has_zeros = form == "int4"
        code = jnp.int8 if form == "int8" else jnp.uint8
        weight = QuantizedWeight(
            _shape(code, rows, outputs),
            _shape(jnp.bfloat16 if has_zeros else jnp.float32, groups, outputs),
            _shape(jnp.uint8, groups, outputs) if has_zeros else None,
            None,
            form,
            inputs,
            shape[contract:],
        )
        parameter.set_value(jax.eval_shape(with_output_rows, weight) if output_rows else weight)


def _shape(dtype: Any, *shape: int) -> Any:
    """Describe an array, where one is expected."""
    return jax.ShapeDtypeStruct(shape, dtype)
