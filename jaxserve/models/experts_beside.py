"""Experts beside a dense MLP, each with norms of its own (Gemma 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.experts import Experts
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.experts import SparseMLP
from jaxserve.models.family import FamilyTraits
from jaxserve.models.layers import Norm, build_mlp
from jaxserve.models.linear import accumulator, constant, matmul
from jaxserve.models.paged import PagedStep
from jaxserve.models.rounding import rounded_once
from jaxserve.models.routing import route

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


class ExpertsBesideMLP(SparseMLP):
    """The sum of a dense MLP and of the chosen experts of each token, both normalized before it.

    The router and the experts read the residual stream, each through a norm of its own. The weight
    of a chosen expert is multiplied by a learned factor of the expert.
    """

    def __init__(
        self,
        config: ModelConfig,
        experts: Experts,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        traits: FamilyTraits,
    ) -> None:
        super().__init__(config, experts, dtype, rngs, traits)

        def norm() -> Norm:
            return Norm((config.hidden_size,), ("embed",), config.rms_norm_eps, dtype, traits)

        self.router_norm, self.routed_input_norm = norm(), norm()
        self.routed_norm, self.dense_norm = norm(), norm()
        self.expert_factors = constant(1.0, (experts.count,), ("experts",), dtype)
        self.dense = build_mlp(config, dtype, rngs, traits)

    def __call__(
        self, x: Float[Array, "T D"], step: PagedStep, stream: Float[Array, "T D"]
    ) -> Float[Array, "T D"]:
        """Return the sum of the results for every token, [T, D], in x's dtype.

        Args:
            x: inputs of the dense MLP, normalized.
            step: the ragged batch of this step.
            stream: the residual stream, which router and experts read.
        """
        dense = self.dense_norm(self.dense(x, "xla", step.others))
        with jax.named_scope("router"):
            weights, chosen = self._chosen(stream)
        routed = self.mixed(self.routed_input_norm(stream), weights, chosen, step)
        return dense + rounded_once(self.routed_norm, routed, step.positions)

    def _chosen(
        self, stream: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T C"], Int32[Array, "T C"]]:
        exact, size = accumulator(stream.dtype), stream.shape[-1]
        scores = matmul(self.router_norm(stream), self.router[...], out_dtype=exact)
        weights, chosen = route(scores * size**-0.5, self.experts, self.kind)
        factors = jnp.take(self.expert_factors[...], chosen, mode="clip")
        return weights * factors.astype(exact), chosen
