"""Weights in the layouts of a device's matrix products, quantized or not.

The matrices of the transformer layers are quantized: the projections of attention (plain or
latent), of the gated MLP and of every expert. The embedding, the output projection, routers, norms
and biases keep their dtype, as in vLLM: a tied table serves two purposes, the output projection
decides between close logits, and a router between close experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import EllipsisType, MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from jaxserve.models.paged import LogicalAxes
from pallas_kernels import (
    block_product,
    laid_out_product,
    output_major_matmul,
    panel_product,
    quantized_grouped_matmul,
    quantized_matmul,
    quantized_panel_product,
)
from pallas_kernels.cpu import block_numbers, blocks
from pallas_kernels.cpu.panels import columns, panels_of
from pallas_kernels.quantized_codes import codes_a_row
from pallas_kernels.quantized_matmul import IMPLEMENTATIONS as QUANTIZED_IMPLEMENTATIONS

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, Shaped

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
        # Latent attention, and experts in fewer dimensions.
        ("embed", "latent"): 1,
        ("latent", "embed"): 1,
        ("latent", "mlp"): 1,
        ("latent", "kv_heads", "head_dim"): 1,
        ("embed", "kv_heads", "head_dim"): 1,
        ("kv_heads", "head_dim", "embed"): 2,
    }
)
HEAD_KEYS: LogicalAxes = ("kv_heads", "head_dim", "latent")
"""The axes of the projection of keys from latents, which multiplies queries."""
# The same for experts, and for heads with a matrix each. The first dimension is the expert or head,
# the second the input of its matrix.
EXPERTS: frozenset[LogicalAxes] = frozenset(
    {
        ("experts", "embed", "gate_up", "mlp"),
        ("experts", "embed", "mlp"),
        ("experts", "mlp", "embed"),
        HEAD_KEYS,
        ("kv_heads", "latent", "head_dim"),
    }
)
FULL = "full"
"""The form of matrices that are not quantized."""

Layout = Literal[
    "input_major", "output_major", "panels", "later_panels", "code_panels", "block_panels"
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedWeight:
    """A matrix of I inputs and O outputs, or one for each of E experts, as a product reads it.

    Arrays of experts have a leading dimension E. The layouts are:

    - "input_major": codes of `pallas_kernels.quantized_matmul` and `quantized_grouped_matmul`.
    - "output_major": the same codes transposed, for GPUs before Ampere.
    - "later_panels": numbers [I, O], which each product puts in panels. It can be differentiated.
    - "panels", "code_panels", "block_panels": numbers, codes or GGUF blocks for CPU products, in
      panels of a few output columns (`pallas_kernels.cpu`).

    Attributes:
        values: codes are [I, O], or uint8 [I / 2, O] for int4, with I padded to whole groups by
            codes that stand for zeros. Panels have the shape of `cpu.panels.panel_shape`, of
            `cpu.panels.rows_in_order` (codes), or of `cpu.blocks.panel_shape`.
        scales: [groups, O] of codes. In panels, 16-bit scales are stored as their bits in uint16.
        zeros: zero points, or minima if their dtype is a float, if the format has them.
        order: the input of each row of codes, or of each column of blocks, if they are not in
            order.
        form: "int8", "fp8" or "int4" for codes, the name of a GGUF block format, or `FULL`.
        inputs: I, without padding.
        outputs: the shape of the outputs in the model, with product O.
        layout: the layout of the arrays.
        dtype: dtype of the numbers in panels, or that `columns` returns of blocks, or of the scales
            of codes in panels.
        implementation: implementation of the input-major product (see `with_implementation`).
        num_rows: number of real rows of a product in panels, or of each expert. Later rows are
            padding. None if all rows are real.
    """

    values: Shaped[Array, " ..."]
    scales: Shaped[Array, " ..."] | None
    zeros: Shaped[Array, " ..."] | None
    order: Int32[Array, " I"] | None
    form: str = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})
    layout: Layout = field(default="input_major", metadata={"static": True})
    dtype: str = field(default="", metadata={"static": True})
    implementation: str = field(default="auto", metadata={"static": True})
    num_rows: Int32[Array, ""] | Int32[Array, " E"] | None = None

    def __getitem__(self, index: EllipsisType) -> PlacedWeight:
        """Return self, so that `parameter[...]` reads a quantized weight as it reads an array."""
        return self

    @property
    def in_panels(self) -> bool:
        """Whether the weight is laid out in panels for CPU products."""
        return self.layout.endswith("panels")

    @property
    def granularity(self) -> int:
        """Number of consecutive inputs of the weight that sharding must not divide.

        It is the size of a GGUF block or of a group of inputs that share a scale. If all inputs
        share one scale, it is the number of codes in a byte. Codes must be "input_major".
        """
        if self.scales is None:
            return blocks.FORMATS[self.form].size
        width, groups = codes_a_row(self.form), self.scales.shape[-2]
        return self.values.shape[-2] * width // groups if groups > 1 else width

    def laid_out(self) -> PlacedWeight:
        """Return the weight in "panels" if its layout is "later_panels", else the weight itself."""
        if self.layout != "later_panels":
            return self
        return replace(self, values=panels_of(self.values), layout="panels")

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Return the product of x [T, I] and the weight, [T, outputs...], in at least float32.

        In panels, rows do not affect each other, and a weight of experts takes x sorted by expert.
        """
        y = _PRODUCTS[self.layout](self, self._ordered(x))
        return y[:, : prod(self.outputs)].reshape(x.shape[0], *self.outputs)

    def grouped(
        self, x: Float[Array, "A I"], sizes: Int32[Array, " E"], implementation: str
    ) -> Float[Array, " A *outputs"]:
        """Multiply each row of x, sorted by expert, by the matrix of the row's expert.

        The result is [rows, outputs...] in x's dtype. In panels it has at least float32, and rows
        after the last expert's rows are zeros.

        Args:
            x: activations.
            sizes: the number of rows of each expert.
            implementation: implementation of the product, without effect in panels.
        """
        if self.in_panels:
            return replace(self, num_rows=sizes).dot(x)
        assert self.scales is not None
        y = quantized_grouped_matmul(
            self._ordered(x),
            self.values,
            self.scales,
            self.zeros,
            sizes,
            form=self.form,
            implementation=implementation,
        )
        return y.reshape(x.shape[0], *self.outputs)

    def columns(self, outputs: Int32[Array, " T"]) -> Float[Array, "T I"]:
        """Return the weights of the given output indices, [T, inputs], in `dtype`.

        Indices are clamped. The layout must be panels of numbers or of GGUF blocks.
        """
        ids = jnp.clip(outputs, 0, prod(self.outputs) - 1)
        if self.layout == "later_panels":
            return jnp.take(self.values, ids, axis=1).T
        if self.layout == "block_panels":
            return block_numbers.columns(self.values, ids, self.form).astype(self.dtype)
        return columns(self.values, ids, self.inputs, self.dtype)

    def _ordered(self, x: Float[Array, "T I"]) -> Float[Array, "T J"]:
        # Inputs in the order of the rows of codes, and zeros for rows of padding.
        if self.order is not None:
            x = jnp.take(x, self.order, axis=1)
        missing = self._stored_inputs - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, missing))) if missing else x

    @property
    def _stored_inputs(self) -> int:
        if self.layout in ("panels", "later_panels"):
            return self.inputs
        if self.layout == "block_panels":
            return self.values.shape[-2] * blocks.FORMATS[self.form].size
        axis = -1 if self.layout == "output_major" else -2
        return self.values.shape[axis] * codes_a_row(self.form)


def _input_major(weight: PlacedWeight, x: Array) -> Array:
    assert weight.scales is not None
    return quantized_matmul(
        x,
        weight.values,
        weight.scales,
        weight.zeros,
        form=weight.form,
        implementation=weight.implementation,
    )


def _output_major(weight: PlacedWeight, x: Array) -> Array:
    assert weight.scales is not None
    return output_major_matmul(x, weight.values, weight.scales, weight.zeros, form=weight.form)


def _panels(weight: PlacedWeight, x: Array) -> Array:
    return panel_product(x, weight.values, weight.dtype, weight.num_rows)


def _later_panels(weight: PlacedWeight, x: Array) -> Array:
    return laid_out_product(x, weight.values, weight.num_rows)


def _code_panels(weight: PlacedWeight, x: Array) -> Array:
    assert weight.scales is not None
    return quantized_panel_product(
        x,
        weight.values,
        weight.scales,
        weight.zeros,
        form=weight.form,
        scales_dtype=weight.dtype,
        num_rows=weight.num_rows,
    )


def _block_panels(weight: PlacedWeight, x: Array) -> Array:
    return block_product(x, weight.values, weight.form, weight.num_rows)


_PRODUCTS: Mapping[Layout, Callable[[PlacedWeight, Any], Any]] = MappingProxyType(
    {
        "input_major": _input_major,
        "output_major": _output_major,
        "panels": _panels,
        "later_panels": _later_panels,
        "code_panels": _code_panels,
        "block_panels": _block_panels,
    }
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplitWeight:
    """A fused projection stored as several PlacedWeights, each for a part of the outputs.

    The parts are separate because they differ in form, or in their order of inputs.
    """

    weights: tuple[PlacedWeight, ...]
    # The outputs of each weight, as (start, size) along every dimension of `outputs`.
    places: tuple[tuple[tuple[int, int], ...], ...] = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})

    def __getitem__(self, index: EllipsisType) -> SplitWeight:
        """Return self, so that `parameter[...]` reads this weight as it reads an array."""
        return self

    def dot(self, x: Float[Array, "T I"]) -> Float[Array, " T *outputs"]:
        """Return x times each weight, joined to [T, outputs...], in at least float32."""
        parts = [weight.dot(x) for weight in self.weights]
        out = jnp.zeros((x.shape[0], *self.outputs), parts[0].dtype)
        for part, place in zip(parts, self.places, strict=True):
            sizes = tuple(size for _, size in place)
            starts = (0, *(start for start, _ in place))
            out = jax.lax.dynamic_update_slice(out, part.reshape(-1, *sizes), starts)
        return out


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, PlacedWeight)


def weights_in(tree: Any) -> list[PlacedWeight]:
    """Return a list of every `PlacedWeight` in a parameter tree, also within other weights."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_placed) if _is_placed(leaf)]


def with_weights(tree: Any, change: Callable[[PlacedWeight], PlacedWeight]) -> Any:
    """Return a parameter tree with `change` applied to every PlacedWeight, also within others."""

    def changed(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, PlacedWeight) else leaf

    return jax.tree.map(changed, tree, is_leaf=_is_placed)


def with_implementation(tree: Any, implementation: str) -> Any:
    """Return a parameter tree whose quantized products use the kernel implementation of attention.

    Quantized products have no Mosaic kernel, and use "auto" when attention is a Mosaic kernel.
    """
    name = implementation if implementation in QUANTIZED_IMPLEMENTATIONS else "auto"
    return with_weights(tree, lambda weight: replace(weight, implementation=name))


def with_num_rows(tree: Any, num_rows: Int32[Array, ""]) -> Any:
    """Return a parameter tree whose weights in panels multiply only the first `num_rows` rows."""

    def limited(weight: PlacedWeight) -> PlacedWeight:
        return replace(weight, num_rows=num_rows) if weight.in_panels else weight

    return with_weights(tree, limited)


def flat_shape(shape: tuple[int, ...], contract: int) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a parameter with `contract` input dimensions."""
    return prod(shape[:contract]), prod(shape[contract:])
