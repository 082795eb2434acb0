"""Weights that are stored quantized and multiplied as they are.

Quantized are the matrices of the blocks: the projections of attention and of the gated MLP. The
embedding, the output projection, norms and biases keep their dtype, as they do in vLLM: a tied
table serves two purposes, and the output projection decides between close logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from types import EllipsisType, MappingProxyType
from typing import TYPE_CHECKING, Self

import jax
import jax.numpy as jnp

from jaxserve.models.paged import LogicalAxes
from pallas_kernels import quantized_matmul

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, UInt8

# The parameters that may be quantized, by their axes, and how many of those are inputs.
PROJECTIONS: Mapping[LogicalAxes, int] = MappingProxyType(
    {
        ("embed", "kv_heads", "group", "head_dim"): 1,
        ("kv_heads", "group", "head_dim", "embed"): 3,
        ("embed", "gate_up", "mlp"): 1,
        ("mlp", "embed"): 1,
    }
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix of I inputs and O outputs as `pallas_kernels.quantized_matmul` takes it.

    Attributes:
        values: the codes, [I, O], or uint8 [I / 2, O] for int4; I is a whole number of groups,
            whose last rows may be padding that stands for zeros.
        scales: [groups, O].
        zeros: zero points, where the format has them.
        order: which input each row is for, where rows have been sorted by group.
        form: "int8", "fp8" or "int4".
        inputs: how many inputs there are, padding not counted.
        outputs: the shape that the outputs have in the model; their product is O.
    """

    values: Array
    scales: Float[Array, "groups O"]
    zeros: UInt8[Array, "groups O"] | None
    order: Int32[Array, " I"] | None
    form: str = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})

    def __getitem__(self, index: EllipsisType) -> Self:
        """Itself: a parameter's value is read as `parameter[...]`, whatever it is."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """x times the weight, in at least float32."""
        if self.order is not None:
            x = jnp.take(x, self.order, axis=1)
        rows = self.values.shape[0] * (2 if self.form == "int4" else 1)
        if rows > self.inputs:
            x = jnp.pad(x, ((0, 0), (0, rows - self.inputs)))
        y = quantized_matmul(x, self.values, self.scales, self.zeros, form=self.form)
        return y.reshape(x.shape[0], *self.outputs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SeveralWeights:
    """One fused projection whose parts are stored differently, each with its share of the outputs.

    So it is where each of them has its own order of inputs.
    """

    weights: tuple[QuantizedWeight, ...]
    # Which outputs each part gives, as starts and sizes along every dimension of `outputs`.
    places: tuple[tuple[tuple[int, int], ...], ...] = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})

    def __getitem__(self, index: EllipsisType) -> Self:
        """Itself, as of a QuantizedWeight."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """x times the weight, in at least float32."""
        parts = [weight.dot(x) for weight in self.weights]
        out = jnp.zeros((x.shape[0], *self.outputs), parts[0].dtype)
        for part, place in zip(parts, self.places, strict=True):
            sizes = tuple(size for _, size in place)
            starts = (0, *(start for start, _ in place))
            out = jax.lax.dynamic_update_slice(out, part.reshape(-1, *sizes), starts)
        return out


Quantized = QuantizedWeight | SeveralWeights


def flat_shape(shape: tuple[int, ...], contract: int) -> tuple[int, int]:
    """Inputs and outputs of a parameter whose first `contract` dimensions are inputs."""
    return prod(shape[:contract]), prod(shape[contract:])
