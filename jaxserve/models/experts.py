"""A mixture of experts: a router chooses a few experts for each token.

The tokens of a step are sorted by expert, so that one grouped product computes exactly the required
rows. Padding has no expert. The result of a token does not depend on other tokens. References:
Shazeer et al. 2017, and Gale et al. 2022 ("dropless").
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.collectives import device_index, summed
from jaxserve.models.config.experts import Experts
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.expert_places import chosen_places
from jaxserve.models.family import FamilyTraits, Router
from jaxserve.models.layers import build_mlp, squared
from jaxserve.models.linear import accumulator, constant, matmul, normal, value_of, weight
from jaxserve.models.paged import LogicalAxes, PagedStep
from jaxserve.models.placed_weight import PlacedWeight
from jaxserve.models.routing import route
from jaxserve.models.token_rounding import TokenRounded, rounded_rows
from pallas_kernels import gated, grouped_matmul, sigmoid
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32


class CountedRows(nnx.Intermediate):
    """Number of rows that the experts of this device computed, u32, sown by each `SparseMLP`.

    If experts have places, the value is an array with the number of rows of each place.
    """


class SparseMLP(nnx.Module):
    """Mixture of experts: the weighted sum of each token's chosen experts, each a gated MLP.

    The shared MLP, if the model has one, is added without a weight.
    """

    def __init__(
        self,
        config: ModelConfig,
        experts: Experts,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        traits: FamilyTraits,
    ) -> None:
        embed, count, mlp = config.hidden_size, experts.count, experts.size
        self.experts, self.split = experts, config.split
        self.kind: Router = traits.router
        self.router = weight(rngs, (embed, count), ("embed", "experts"), dtype)
        # Experts may work in a space of fewer dimensions, with a projection before and after.
        latent, width = experts.latent, experts.latent or embed
        self.before = weight(rngs, (embed, width), ("embed", "latent"), dtype) if latent else None
        self.after = weight(rngs, (width, embed), ("latent", "embed"), dtype) if latent else None
        self.is_gated, self.activation = traits.activation != "relu2", traits.activation
        pair: LogicalAxes = ("experts", "embed", "gate_up", "mlp")
        if self.is_gated:
            self.gate_up, self.up = _stacked(rngs, (count, width, 2, mlp), pair, dtype), None
        else:
            axes = (*pair[:2], pair[3])
            self.gate_up, self.up = None, _stacked(rngs, (count, width, mlp), axes, dtype)
        self.down = _stacked(rngs, (count, mlp, width), ("experts", "mlp", "embed"), dtype)
        if traits.router == "chosen":
            self.router_bias = constant(0.0, (count,), ("experts",), dtype)
            axes: LogicalAxes = ("experts", "gate_up", "mlp")
            self.gate_up_bias = constant(0.0, (count, 2, mlp), axes, dtype)
            self.down_bias = constant(0.0, (count, embed), ("experts", "embed"), dtype)
        else:
            self.router_bias = self.gate_up_bias = self.down_bias = None
        # Corrections have at least float32, because scores are compared in at least float32.
        correction = constant(0.0, (count,), ("experts",), accumulator(dtype))
        is_corrected = traits.router in ("sigmoid", "corrected softmax") and experts.corrected
        self.correction = correction if is_corrected else None
        shared = experts.shared
        self.shared = build_mlp(config, dtype, rngs, traits, shared) if shared else None
        has_gate = experts.shared_gate
        self.shared_gate = weight(rngs, (embed, 1), ("embed", "taps"), dtype) if has_gate else None

    def __call__(
        self, x: Float[Array, "T D"], step: PagedStep, stream: Float[Array, "T D"]
    ) -> Float[Array, "T D"]:
        """Return the output [T, D] of the mixture of experts for every token, in x's dtype.

        The output is summed over devices. Padding rows get arbitrary finite results. If each device
        has whole experts, the numbers of their rows are sown as `CountedRows`.

        Args:
            x: the input, normalized.
            step: the ragged batch of this step.
            stream: the residual stream, which subclasses read.
        """
        with jax.named_scope("router"):
            exact = accumulator(x.dtype)
            scores = matmul(x, self.router[...], bias=value_of(self.router_bias), out_dtype=exact)
            if cap := self.experts.score_cap:
                # The kernel of sigmoid gives equal bits at any place of the array.
                scores = cap * (2.0 * sigmoid(scores * (2.0 / cap)) - 1.0)
            weights, chosen = route(scores, self.experts, self.kind, value_of(self.correction))
        return self.mixed(x, weights, chosen, step)

    def mixed(
        self,
        x: Float[Array, "T D"],
        weights: Float[Array, "T C"],
        chosen: Int32[Array, "T C"],
        step: PagedStep,
    ) -> Float[Array, "T D"]:
        """Return the weighted sum of the chosen experts, and the shared MLP, [T, D], in x's dtype.

        Args:
            x: inputs of the experts.
            weights: weight of each chosen expert.
            chosen: numbers of the chosen experts.
            step: the ragged batch of this step.
        """
        with jax.named_scope("experts"):
            real = step.slot_mapping >= 0
            if step.places is not None:
                chosen = chosen_places(chosen, step.positions, step.places)
            inputs = x if self.before is None else matmul(x, self.before[...])
            y = self._experts(inputs, weights, chosen, real, step.implementation)
            y = y if self.after is None else matmul(y, self.after[...], out_dtype=y.dtype)
        if self.split.axis is None:
            return y if self.shared is None else y + self._gated(x, self.shared(x))
        # A single sum over devices for the routed experts and the shared one.
        y = summed(
            y if self.shared is None else y + self._gated(x, self.shared.share(x)), self.split
        )
        bias = None if self.shared is None else value_of(self.shared.down_bias)
        return (y if bias is None else y + bias).astype(x.dtype)

    def _gated(self, x: Float[Array, "T D"], y: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Multiply the result of the shared MLP by the gate of each token, if there is one."""
        if self.shared_gate is None:
            return y
        exact = accumulator(x.dtype)
        gate = sigmoid(matmul(x, self.shared_gate[...], out_dtype=exact))
        return (y.astype(exact) * gate).astype(y.dtype)

    def _experts(
        self,
        x: Float[Array, "T D"],
        weights: Float[Array, "T C"],
        chosen: Int32[Array, "T C"],
        real: Bool[Array, " T"],
        implementation: str,
    ) -> Float[Array, "T D"]:
        count, fanout, axis = self.experts.count, chosen.shape[1], self.split.axis
        is_own = real[:, None]
        if axis is not None and self.split.expert_parallel:
            count = (self.split.places or count) // self.split.devices
            chosen = chosen - device_index(axis) * count
            is_own &= (chosen >= 0) & (chosen < count)
        expert = jnp.where(is_own, chosen, count).reshape(-1)
        order = jnp.argsort(expert, stable=True).astype(jnp.int32)
        sizes = (expert[:, None] == jnp.arange(count)).sum(axis=0, dtype=jnp.int32)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
        owner = expert[order]
        inputs = x[order // fanout]
        if self.gate_up is not None:
            rows = _product(inputs, self.gate_up[...], sizes, implementation)
            hidden = self._activate(_add_bias(rows, self.gate_up_bias, owner))  # of [T * C, 2, M]
        else:
            assert self.up is not None
            hidden = squared(_product(inputs, self.up[...], sizes, implementation))
        rows = _product(hidden.astype(x.dtype), self.down[...], sizes, implementation)
        rows = self._add_down_bias(rows, owner)[place].reshape(*chosen.shape, -1)
        if axis is not None:  # rows of padding and of other devices' experts are arbitrary
            rows = jnp.where(is_own[..., None], rows, 0)
        # Add the experts one by one: in bfloat16, an addition to XLA's sum over this axis has other
        # bits for few tokens than for many.
        weighted = (rows[:, i].astype(weights.dtype) * weights[:, i, None] for i in range(fanout))
        total = reduce(jnp.add, weighted)
        if self.split.places:
            self.sow(CountedRows, "rows", sizes.astype(jnp.uint32))
        elif self.split.counts_rows:
            self.sow(CountedRows, "rows", sizes.sum(dtype=jnp.uint32))
        return total.astype(x.dtype) if axis is None else total

    def _add_down_bias(
        self, rows: Float[Array, "A D"], owner: Int32[Array, " A"]
    ) -> Float[Array, "A D"]:
        axis = self.split.axis
        biased = _add_bias(rows, self.down_bias, owner)
        if self.down_bias is None or axis is None or self.split.expert_parallel:
            return biased
        # Each device has a part of every expert: only one of them adds the bias to the sum.
        return jnp.where(device_index(axis) == 0, biased, rows)

    def _activate(self, rows: Float[Array, "A two M"]) -> Float[Array, "A M"]:
        gate, up = rows[:, 0], rows[:, 1]
        if self.activation == "gelu_tanh":
            return gated(rows, "gelu_tanh", rows.dtype)
        if self.kind != "chosen":
            return jax.nn.silu(gate) * up
        alpha, limit = self.experts.alpha, self.experts.limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1.0) * gate * jax.nn.sigmoid(alpha * gate)


def _product(
    x: Float[Array, "A I"],
    w: Float[Array, "E I ..."] | PlacedWeight | TokenRounded,
    sizes: Int32[Array, " E"],
    implementation: str,
) -> Float[Array, "A ..."]:
    """Multiply each row of x by the matrix of the row's expert (see `grouped_matmul`).

    Args:
        x: rows sorted by expert.
        w: the matrices of all experts, [E, inputs, outputs...], plain or quantized.
        sizes: number of rows of each expert.
        implementation: implementation of the kernel.

    Returns:
        [rows, outputs...], in x's dtype, or in at least float32 if `w` is in panels or rounds its
        activations.
    """
    if isinstance(w, TokenRounded):
        numbers, scales = rounded_rows(x, w.axis)
        if not target_device().is_gpu:
            return _product(numbers * scales, w.weight, sizes, implementation)
        y = _product(numbers.astype(x.dtype), w.weight, sizes, implementation)
        return y * scales.reshape(-1, *[1] * (y.ndim - 1))
    if isinstance(w, PlacedWeight):
        return w.grouped(x, sizes, implementation)
    flat = w.reshape(*w.shape[:2], -1)
    y = grouped_matmul(x, flat, sizes, implementation=implementation)
    return y.reshape(-1, *w.shape[2:])


def _add_bias(
    rows: Float[Array, "A ..."], bias: nnx.Param[Array] | None, owner: Int32[Array, " A"]
) -> Float[Array, "A ..."]:
    return rows if bias is None else rows + bias[...].at[owner].get(mode="clip")


def _stacked(
    rngs: nnx.Rngs | None, shape: tuple[int, ...], axes: LogicalAxes, dtype: DTypeLike
) -> nnx.Param[Array]:
    return normal(rngs, shape, axes, dtype, shape[1] ** -0.5)
