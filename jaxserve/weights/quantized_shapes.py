"""Shapes of a model's weights once they are quantized, where none are read."""

from __future__ import annotations

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
        contract = PROJECTIONS.get(parameter.get_metadata().get("axes"))
        if contract is None:
            continue
        shape = parameter.get_value().shape
        inputs, outputs = flat_shape(shape, contract)
        rows, groups = inputs // codes_a_row(form), inputs // INT4_GROUP if form == "int4" else 1
        code, scale = jnp.int8 if form == "int8" else jnp.uint8, jnp.float32
        zeros = None
        if form == "int4":
            scale, zeros = jnp.bfloat16, jax.ShapeDtypeStruct((groups, outputs), jnp.uint8)
        weight = QuantizedWeight(
            jax.ShapeDtypeStruct((rows, outputs), code),
            jax.ShapeDtypeStruct((groups, outputs), scale),
            zeros,
            None,
            form,
            inputs,
            shape[contract:],
        )
        parameter.set_value(jax.eval_shape(with_output_rows, weight) if output_rows else weight)
