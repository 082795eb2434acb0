"""Layers that all families share, except attention: norm, embedding, gated MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.collectives import axis_size, device_index, summed, summed_few
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.split import Split
from jaxserve.models.family import LLAMA_TRAITS, FamilyTraits
from jaxserve.models.linear import (
    accumulator,
    constant,
    matmul,
    matmul_to_add,
    value_of,
    weight,
)
from jaxserve.models.paged import LogicalAxes
from jaxserve.models.placed_weight import PlacedWeight, with_num_rows
from pallas_kernels import (
    Activation,
    NormOptions,
    add_norm,
    add_norm_over_devices,
    gated,
    gated_matmul,
    has_few_row_product,
    row_sums,
    sigmoid,
    softplus,
)
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


# All transformer layers and the final norm call these jitted functions. Within a larger program
# each function is traced and lowered once.
_STATIC = ("options", "implementation")
_add_norm = jax.jit(add_norm, static_argnames=_STATIC)
_add_norm_over_devices = jax.jit(add_norm_over_devices, static_argnames=(*_STATIC, "axis"))


def norm_options(eps: float, traits: FamilyTraits) -> NormOptions:
    """Return the options of a norm kernel: `eps`, and the scale offset and rounding of a family."""
    return NormOptions(eps, traits.norm_offset, traits.norm_rounds_last)


class Norm(nnx.Module):
    """RMSNorm, x / rms(x) * scale over the last dimensions (Zhang and Sennrich 2019).

    With `traits.norm_centered`, x - mean(x) replaces x: LayerNorm without a bias (Ba et al. 2016).
    The norm covers the last dimensions of x, as many as the scale has, or only the last `over`.
    Without a scale, all its elements are 1.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: LogicalAxes,
        eps: float,
        dtype: DTypeLike,
        traits: FamilyTraits = LLAMA_TRAITS,
        over: int | None = None,
        has_scale: bool = True,
    ) -> None:
        one = constant(1.0 - traits.norm_offset, shape, axes, dtype)
        self.scale = one if has_scale and traits.norm_scales else None
        self.shape, self.dtype = shape, jnp.dtype(dtype)
        self.eps, self.traits, self.over = eps, traits, over or len(shape)
        # Set by the owner if the normalized dimensions are divided over devices: the mesh axis, and
        # the number of devices that hold the same part.
        self.axis: str | None = None
        self.copies = 1

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return the normalized and scaled x, with the shape and dtype of x.

        x / rms(x) is computed in at least float32, rounded to x's dtype as in Llama, and scaled.
        With `norm_rounds_last` in the traits, only the scaled result is rounded.
        """
        scale, exact = self.gain, accumulator(x.dtype)
        y = x.astype(exact)
        if self.traits.norm_centered:
            y = y - self._mean(x)
            squares = self._mean(y, "squares")
        else:
            squares = self._mean(x, "squares")
        y = y * jax.lax.rsqrt(squares + self.eps)
        if self.traits.norm_rounds_last:
            return (y * (scale.astype(exact) + self.traits.norm_offset)).astype(x.dtype)
        return scale * y.astype(x.dtype)

    @property
    def gain(self) -> Float[Array, "*sizes"]:
        """The scale, without the offset of the traits."""
        if self.scale is None:
            return jnp.full(self.shape, 1.0 - self.traits.norm_offset, self.dtype)
        return self.scale[...]

    @property
    def options(self) -> NormOptions:
        """Options of this norm for the norm kernels, which support no centered norm."""
        return norm_options(self.eps, self.traits)

    @property
    def is_per_head(self) -> bool:
        """Whether the norm covers only the last dimension of its input, a single head."""
        return self.over == 1

    @property
    def is_centered(self) -> bool:
        """Whether the norm subtracts the mean of its input first, as in LayerNorm."""
        return self.traits.norm_centered

    def _mean(
        self, x: Float[Array, "... D"], kind: Literal["numbers", "squares"] = "numbers"
    ) -> Float[Array, "... 1"]:
        size = prod(x.shape[-self.over :])
        sums = row_sums(x.reshape(*x.shape[: -self.over], size), kind)
        means = sums.reshape(*sums.shape, *(1,) * self.over) / size
        return self.over_devices(means)

    def over_devices(self, means: Float[Array, "*sizes"]) -> Float[Array, "*sizes"]:
        """Average the means of all devices, and return the average on every device.

        Devices in the same group of `copies` have equal means, and each group counts once. If the
        norm is not divided over devices, `means` is returned unchanged.
        """
        if self.axis is None:
            return means
        counts = device_index(self.axis) % self.copies == 0
        different = axis_size(self.axis) // self.copies
        return summed_few(jnp.where(counts, means, 0), self.axis) / different


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residual:
    """The residual stream [T, D], and an update that the next norm kernel adds to the stream.

    Attributes:
        stream: the residual stream without `update`.
        update: result of attention or MLP, [T, D] or partial sums [parts, T, D] (see
            `linear.matmul_to_add`), or None.
        norm_scale: scale of a norm to apply to `update`, or None for no norm.
        factor: factor to apply to `update`.
        axis: mesh axis over which to sum `update` first, or None for no sum.
    """

    stream: Float[Array, "T D"]
    update: Float[Array, "*parts T D"] | None = None
    norm_scale: Float[Array, " D"] | None = None
    factor: float = field(default=1.0, metadata={"static": True})
    axis: str | None = field(default=None, metadata={"static": True})

    def added(self) -> Residual:
        """Return a Residual whose stream is `stream` plus `update`, and whose update is None.

        The update must be a single [T, D] with no norm, factor or mesh axis to apply.
        """
        return self if self.update is None else Residual(self.stream + self.update)

    def normed(
        self, norm: Norm | None, options: NormOptions, implementation: str
    ) -> tuple[Residual, Float[Array, "T D"]]:
        """Return the residual stream with its update added, and the norm of this sum, [T, D].

        One kernel computes both where possible. Without a norm the stream is returned twice.

        Args:
            options: options of `norm`, and of the norm of the update.
            implementation: name of a kernel implementation, as in `pallas_kernels`.
        """
        update = self.update
        is_plain = update is None or (self.norm_scale is None and update.ndim == 2)
        if (norm is None and is_plain) or (norm is not None and norm.is_centered):
            residual = self.added()
            return residual, residual.stream if norm is None else norm(residual.stream)
        options = dataclasses.replace(options, factor=self.factor)
        operands = self.stream, update, None if norm is None else norm.gain, self.norm_scale
        named: dict[str, Any] = {"options": options, "implementation": implementation}
        if self.axis is None:
            stream, normed = _add_norm(*operands, **named)
        else:
            stream, normed = _add_norm_over_devices(*operands, axis=self.axis, **named)
        return Residual(stream), normed


class Embedding(nnx.Module):
    """Token embeddings and the output projection, a single array if the model ties them.

    The projection is `[D, V]`, input-major like every weight. Against `[V, D]` it is 1.1 to 1.6
    times faster at 2 to 16 rows in float32 on CPU, the same at 1 row, and 0.7 to 1.0 times as fast
    in bfloat16 (D 576-768, V 32-49 thousand). A tied table is therefore `[D, V]` only. A token
    lookup reads a column, which costs 4 us more for each token, 1% to 10% of the gain of the
    projection at these sizes.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        vocab, embed = config.vocab_size, config.hidden_size
        self.vocab_size, self.split = vocab, config.split
        self.tied = config.tie_word_embeddings
        self.project = weight(rngs, (embed, vocab), ("embed", "vocab"), dtype)
        if not self.tied:
            self.table = weight(rngs, (vocab, embed), ("vocab", "embed"), dtype, contract=0)

    def __call__(self, tokens: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Return the embedding of each token id, [T, D], on every device.

        Token ids outside [0, V) are clamped, so callers must refuse them.
        """
        return rows_over_devices(self._rows, tokens, self.vocab_size, self.split)

    def _rows(self, tokens: Int32[Array, " T"]) -> Float[Array, "T D"]:
        table = self.project[...] if self.tied else self.table[...]
        if isinstance(table, PlacedWeight):
            return table.columns(tokens)
        if self.tied:
            return jnp.take(table, tokens, axis=1, mode="clip").T
        return jnp.take(table, tokens, axis=0, mode="clip")

    def logits(
        self, hidden: Float[Array, "R D"], num_rows: Int32[Array, ""] | None = None
    ) -> Float[Array, "R V"]:
        """Return the logits [R, V] of hidden states [R, D], in at least float32.

        Rows from `num_rows` on are padding, and their logits are undefined. If the vocabulary is
        sharded over devices, V is the size of this device's shard.
        """
        project = self.project[...]
        if num_rows is not None:
            project = with_num_rows(project, num_rows)
        return matmul(hidden, project, out_dtype=accumulator(hidden.dtype))


def rows_over_devices(
    rows: Callable[[Int32[Array, " T"]], Float[Array, "T D"]],
    tokens: Int32[Array, " T"],
    vocab_size: int,
    split: Split,
) -> Float[Array, "T D"]:
    """Return the row of each token id of a table whose rows are divided over devices, [T, D].

    Token ids outside [0, vocab_size) are clamped.

    Args:
        rows: returns rows of this device's part of the table, by their index in it.
        tokens: token ids.
        vocab_size: number of rows of the whole table.
        split: the division over devices.
    """
    axis = split.axis
    if axis is None:
        return rows(tokens)
    # Each device has a part of the rows, and adds zeros for all other rows.
    size = -(-vocab_size // axis_size(axis))
    row = jnp.clip(tokens, 0, vocab_size - 1) - device_index(axis) * size
    is_own = (row >= 0) & (row < size)
    return summed(jnp.where(is_own[:, None], rows(jnp.clip(row, 0, size - 1)), 0), split)


XIELU_EPS = -1e-6  # above it, exp(x) - 1 is that of this number


class SquaredMLP(nnx.Module):
    """down(relu(up(x)) ** 2) (So et al. 2021, "Primer")."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        width: int | None = None,
    ) -> None:
        self.split = config.split
        embed, mlp = config.hidden_size, width or config.intermediate_size
        self.up = weight(rngs, (embed, mlp), ("embed", "mlp"), dtype)
        self.down = weight(rngs, (mlp, embed), ("mlp", "embed"), dtype)
        bias = config.mlp_bias
        self.up_bias = constant(0.0, (1, mlp), ("taps", "mlp"), dtype) if bias else None
        self.down_bias = constant(0.0, (embed,), ("embed",), dtype) if bias else None

    def __call__(
        self, x: Float[Array, "T D"], kernel: str = "xla", implementation: str = "xla"
    ) -> Float[Array, "*parts T D"]:
        """Return the result, with the arguments and the form of a `GatedMLP`."""
        bias = value_of(self.down_bias)
        return matmul_to_add(
            self._hidden(x),
            self.down[...],
            kernel,
            bias=bias,
            implementation=implementation,
            split=self.split,
        )

    def share(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return this device's summand of the result, in at least float32, without the bias."""
        return matmul(self._hidden(x), self.down[...], out_dtype=accumulator(x.dtype))

    def _hidden(self, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        bias = None if self.up_bias is None else self.up_bias[...][0]
        return self._activated(matmul(x, self.up[...], bias=bias))

    def _activated(self, x: Float[Array, "T F"]) -> Float[Array, "T F"]:
        return squared(x)


class XieluMLP(SquaredMLP):
    """down(xielu(up(x))) (Huang and Schlag 2024, arXiv:2411.13010).

    xielu(x) is x / 2 + p x**2 for x > 0, else x / 2 + n (exp(x) - 1 - x). p and n - 1/2 are the
    softplus of two learned numbers of the layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        width: int | None = None,
    ) -> None:
        super().__init__(config, dtype, rngs, width)
        self.curves = constant(0.0, (2,), ("taps",), dtype)

    def _activated(self, x: Float[Array, "T F"]) -> Float[Array, "T F"]:
        exact = accumulator(x.dtype)
        positive, negative = softplus(self.curves[...].astype(exact))
        y = x.astype(exact)
        # exp(y) - 1 from the kernel of sigmoid, whose bits do not depend on the place in the array.
        share = sigmoid(jnp.minimum(y, XIELU_EPS))
        grown = (2.0 * share - 1.0) / (1.0 - share) - y
        # Each has a single product in its sum.
        above, below = y * (positive * y + 0.5), 0.5 * (y + (2.0 * negative + 1.0) * grown)
        return jnp.where(y > 0, above, below).astype(x.dtype)


def squared(x: Float[Array, "*sizes"]) -> Float[Array, "*sizes"]:
    """Compute relu(x) ** 2."""
    return jnp.square(jax.nn.relu(x))


def build_mlp(
    config: ModelConfig,
    dtype: DTypeLike,
    rngs: nnx.Rngs | None,
    traits: FamilyTraits,
    width: int | None = None,
) -> GatedMLP | SquaredMLP:
    """Make the MLP of a family, of the model's width by default."""
    if traits.activation == "relu2":
        return SquaredMLP(config, dtype, rngs, width)
    if traits.activation == "xielu":
        return XieluMLP(config, dtype, rngs, width)
    return GatedMLP(config, dtype, rngs, traits, width)


class GatedMLP(nnx.Module):
    """Gated MLP, down(silu(gate(x)) * up(x)) (Shazeer 2020), with gate and up in one product.

    Some families have another activation instead of silu (`traits.activation`).
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        traits: FamilyTraits = LLAMA_TRAITS,
        width: int | None = None,
    ) -> None:
        assert traits.activation not in ("relu2", "xielu")
        self.activation: Activation = traits.activation
        self.split, self.gate_factor = config.split, config.scales.gate
        embed, mlp = config.hidden_size, width or config.intermediate_size
        self.gate_up = weight(rngs, (embed, 2, mlp), ("embed", "gate_up", "mlp"), dtype)
        self.down = weight(rngs, (mlp, embed), ("mlp", "embed"), dtype)
        if config.mlp_bias:
            self.gate_up_bias = constant(0.0, (2, mlp), ("gate_up", "mlp"), dtype)
            self.down_bias = constant(0.0, (embed,), ("embed",), dtype)
        else:
            self.gate_up_bias = self.down_bias = None

    def __call__(
        self, x: Float[Array, "T D"], kernel: str = "xla", implementation: str = "xla"
    ) -> Float[Array, "*parts T D"]:
        """Return the output of the MLP for x, [T, D], or its partial sums [parts, T, D].

        Args:
            kernel: name of the kernel that adds the output to the residual stream, which determines
                the form of the output (see `matmul_to_add`).
            implementation: kernel implementation of products of few rows.
        """
        bias = value_of(self.down_bias)
        return matmul_to_add(
            self._hidden(x, implementation),
            self.down[...],
            kernel,
            bias=bias,
            implementation=implementation,
            split=self.split,
        )

    def share(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return this device's summand of the MLP's output without bias, in at least float32."""
        return matmul(self._hidden(x, "xla"), self.down[...], out_dtype=accumulator(x.dtype))

    def _hidden(self, x: Float[Array, "T D"], implementation: str) -> Float[Array, "T F"]:
        weights = self.gate_up[...]
        is_plain = isinstance(weights, jax.Array) and self.gate_up_bias is None
        is_plain = is_plain and self.gate_factor == 1.0
        if is_plain and has_few_row_product("gated_matmul", x, weights.shape[-1], implementation):
            return gated_matmul(x, weights, self.activation, implementation=implementation)
        # On CPU the activation kernel rounds the products. On a GPU the product itself rounds them.
        product = x.dtype if target_device().is_gpu else accumulator(x.dtype)
        bias = value_of(self.gate_up_bias)
        gate_up = matmul(x, weights, bias=bias, out_dtype=product)  # [T, 2, F]
        if self.gate_factor != 1.0:
            factors = jnp.array([[self.gate_factor], [1.0]], accumulator(x.dtype))
            gate_up = (gate_up * factors).astype(product)
        return gated(gate_up, self.activation, x.dtype)
