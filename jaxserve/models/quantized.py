"""Weights that are stored and multiplied in a quantized form.

The matrices of the transformer layers are quantized: the projections of attention (plain or
latent), of the gated MLP and of every expert. The embedding, the output projection, routers, norms
and biases keep their dtype, as in vLLM: a tied table serves two purposes, the output projection
decides between close logits, and a router between close experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import EllipsisType, MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxserve.models.paged import LogicalAxes
from pallas_kernels import quantized_grouped_matmul, quantized_matmul
from pallas_kernels.quantized_codes import codes_a_row
from pallas_kernels.quantized_matmul import IMPLEMENTATIONS as QUANTIZED_IMPLEMENTATIONS

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, Shaped, UInt8

# The axes of parameters that may be quantized, and the number of their input dimensions.
PROJECTIONS: Mapping[LogicalAxes, int] = MappingProxyType(
    {
        ("embed", "kv_heads", "group", "head_dim"): 1,
        ("kv_heads", "group", "head_dim", "embed"): 3,
        ("embed", "gate_up", "mlp"): 1,
        ("mlp", "embed"): 1,
        ("embed", "mlp"): 1,
        ("embed", "state_parts"): 1,
        # Attention with gates.
        ("embed", "kv_heads", "group", "gate_up", "head_dim"): 1,
        ("embed", "kv_heads", "gate_up", "head_dim"): 1,
        # Latent attention.
        ("embed", "latent"): 1,
        ("latent", "kv_heads", "head_dim"): 1,
        ("embed", "kv_heads", "head_dim"): 1,
        ("kv_heads", "head_dim", "embed"): 2,
    }
)
# The same for experts. The first dimension is the expert, the second the input of its matrix.
EXPERTS: frozenset[LogicalAxes] = frozenset(
    {
        ("experts", "embed", "gate_up", "mlp"),
        ("experts", "embed", "mlp"),
        ("experts", "mlp", "embed"),
    }
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix of I inputs and O outputs, in the layout of `pallas_kernels.quantized_matmul`.

    Attributes:
        values: the codes, [I, O], or uint8 [I / 2, O] for int4. I is padded to a whole number of
            groups with codes that stand for zeros.
        scales: [groups, O].
        zeros: zero points, or minima if their dtype is a float, if the format has them.
        order: the input of each row of codes, if rows have been sorted by group.
        form: "int8", "fp8" or "int4".
        inputs: number of inputs, without padding.
        outputs: the shape of the outputs in the model, with product O.
        implementation: implementation of the product (see `with_implementation`).
    """

    values: Shaped[Array, "codes O"]
    scales: Float[Array, "groups O"]
    zeros: UInt8[Array, "groups O"] | Float[Array, "groups O"] | None
    order: Int32[Array, " I"] | None
    form: str = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})
    implementation: str = field(default="auto", metadata={"static": True})

    def __getitem__(self, index: EllipsisType) -> QuantizedWeight:
        """Return self: any value of a parameter is read as `parameter[...]`."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Multiply x by the quantized weight. Returns at least float32."""
        x = in_order(x, self.order, self.values.shape[0], self.form)
        y = quantized_matmul(
            x,
            self.values,
            self.scales,
            self.zeros,
            form=self.form,
            implementation=self.implementation,
        )
        return y.reshape(x.shape[0], *self.outputs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplitWeight:
    """A fused projection stored as several weights, each for a part of the outputs.

    The weights are separate because each has a different order of inputs.
    """

    weights: tuple[Any, ...]  # QuantizedWeight, or the same as panels or output rows
    # The outputs of each weight, as (start, size) along every dimension of `outputs`.
    places: tuple[tuple[tuple[int, int], ...], ...] = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})

    def __getitem__(self, index: EllipsisType) -> SplitWeight:
        """Return self, as a QuantizedWeight does."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Multiply x by each weight, and join the outputs. Returns at least float32."""
        parts = [weight.dot(x) for weight in self.weights]
        out = jnp.zeros((x.shape[0], *self.outputs), parts[0].dtype)
        for part, place in zip(parts, self.places, strict=True):
            sizes = tuple(size for _, size in place)
            starts = (0, *(start for start, _ in place))
            out = jax.lax.dynamic_update_slice(out, part.reshape(-1, *sizes), starts)
        return out


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedExperts:
    """A matrix for each of E experts, in the layout of `pallas_kernels.quantized_grouped_matmul`.

    Attributes:
        values: the codes, [E, I, O], or uint8 [E, I / 2, O] for int4 (see `QuantizedWeight`).
        scales: [E, groups, O].
        zeros: zero points, or minima if their dtype is a float, if the format has them.
        form: "int8", "fp8" or "int4".
        inputs: number of inputs, without padding.
        outputs: the shape of the outputs in the model, with product O.
    """

    values: Shaped[Array, "E codes O"]
    scales: Float[Array, "E groups O"]
    zeros: UInt8[Array, "E groups O"] | Float[Array, "E groups O"] | None
    form: str = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})

    def __getitem__(self, index: EllipsisType) -> QuantizedExperts:
        """Return self, as a QuantizedWeight does."""
        return self

    def grouped(
        self, x: Float[Array, "A I"], sizes: Int32[Array, " E"], implementation: str
    ) -> Float[Array, " A *outputs"]:
        """Multiply rows of x, sorted by expert, by their expert's matrix, in x's dtype.

        sizes: the number of rows of each expert.
        """
        x = padded(x, self.values.shape[1] * codes_a_row(self.form))
        y = quantized_grouped_matmul(
            x,
            self.values,
            self.scales,
            self.zeros,
            sizes,
            form=self.form,
            implementation=implementation,
        )
        return y.reshape(x.shape[0], *self.outputs)


Quantized = QuantizedWeight | SplitWeight


def with_implementation(tree: Any, implementation: str) -> Any:
    """Return a parameter tree whose quantized products use the implementation of attention.

    Quantized products have no Mosaic kernel, and use "auto" when attention is a Mosaic kernel.
    """
    name = implementation if implementation in QUANTIZED_IMPLEMENTATIONS else "auto"

    def is_quantized(leaf: Any) -> bool:
        return isinstance(leaf, QuantizedWeight)

    def chosen(leaf: Any) -> Any:
        return replace(leaf, implementation=name) if is_quantized(leaf) else leaf

    return jax.tree.map(chosen, tree, is_leaf=is_quantized)


def in_order(
    x: Float[Array, "T I"], order: Int32[Array, " I"] | None, rows: int, form: str
) -> Float[Array, "T J"]:
    """Return x with its inputs in the order of the rows of codes, and zeros for rows of padding."""
    if order is not None:
        x = jnp.take(x, order, axis=1)
    return padded(x, rows * codes_a_row(form))


def padded(x: Float[Array, "T I"], inputs: int) -> Float[Array, "T J"]:
    """Return x padded with zeros to `inputs` columns."""
    return x if x.shape[1] == inputs else jnp.pad(x, ((0, 0), (0, inputs - x.shape[1])))


def flat_shape(shape: tuple[int, ...], contract: int) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a parameter with `contract` input dimensions."""
    return prod(shape[:contract]), prod(shape[contract:])
