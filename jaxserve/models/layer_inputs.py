"""Inputs of each layer that are embeddings of the token itself (Gemma 3n, Gemma 4).

Every layer adds a small projected vector to the residual stream. The vector combines an embedding
of the token for this layer with a projection of the token's usual embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.family import FamilyTraits
from jaxserve.models.layers import Norm, rows_over_devices
from jaxserve.models.linear import accumulator, matmul, weight
from jaxserve.models.paged import PagedStep
from jaxserve.models.placed_weight import PlacedWeight
from jaxserve.models.rounding import rounded_once
from pallas_kernels import gated

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


class LayerInputs(nnx.Module):
    """The inputs of all layers, each a vector of `ModelConfig.layer_inputs` numbers per token."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        traits: FamilyTraits,
    ) -> None:
        self.layers, self.size = config.num_hidden_layers, config.layer_inputs
        self.vocab_size, self.split = config.vocab_size, config.split
        embed = config.hidden_size
        shape = config.vocab_size, self.layers * self.size
        self.table = weight(rngs, shape, ("vocab", "embed"), dtype, contract=0)
        self.project = weight(rngs, (embed, shape[1]), ("embed", "latent"), dtype)
        self.norm = Norm((self.size,), ("latent",), config.rms_norm_eps, dtype, traits)

    def __call__(
        self, tokens: Int32[Array, " T"], x: Float[Array, "T D"], step: PagedStep
    ) -> Float[Array, "T layers P"]:
        """Return the input of each layer for every token, [T, layers, P].

        Args:
            tokens: token ids of the step.
            x: embeddings of the tokens.
            step: the ragged batch of this step.
        """
        exact, shape = accumulator(x.dtype), (len(tokens), self.layers, self.size)
        own = rows_over_devices(self._rows, tokens, self.vocab_size, self.split)
        projected = matmul(x, self.project[...], out_dtype=exact) * x.shape[-1] ** -0.5
        projected = self.norm(projected.astype(x.dtype).reshape(shape))

        def scaled(own: Float[Array, "T LP"]) -> Float[Array, "T LP"]:
            return (own * jnp.asarray(self.size**0.5, own.dtype)).astype(own.dtype)

        own = rounded_once(scaled, own, step.positions).reshape(shape)
        return ((projected + own).astype(exact) * 2**-0.5).astype(x.dtype)

    def _rows(self, tokens: Int32[Array, " T"]) -> Float[Array, "T LP"]:
        table = self.table[...]
        if isinstance(table, PlacedWeight):
            return table.columns(tokens)
        return jnp.take(table, tokens, axis=0, mode="clip")


class LayerInput(nnx.Module):
    """The addition of a layer's input to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        traits: FamilyTraits,
    ) -> None:
        embed, size = config.hidden_size, config.layer_inputs
        self.gate = weight(rngs, (embed, size), ("embed", "latent"), dtype)
        self.project = weight(rngs, (size, embed), ("latent", "embed"), dtype)
        self.norm = Norm((embed,), ("embed",), config.rms_norm_eps, dtype, traits)

    def __call__(self, x: Float[Array, "T D"], step: PagedStep) -> Float[Array, "T D"]:
        """Return the residual stream with the projection of the layer's gated input, [T, D]."""
        assert step.layer_input is not None
        gate = matmul(x, self.gate[...])
        pair = jnp.stack([gate, step.layer_input], axis=1)
        y = matmul(gated(pair, "gelu_tanh", x.dtype), self.project[...])
        return x + rounded_once(self.norm, y, step.positions)
