"""Layers that keep a state of fixed size for each sequence, in rows beside the cache pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.recurrent import ShortConv as ShortConvSizes
from jaxserve.models.linear import constant, matmul, value_of, weight
from jaxserve.models.paged import PagedStep, States
from pallas_kernels import causal_conv

if TYPE_CHECKING:
    from jaxtyping import Array, Float

# All layers call this jitted function, so a larger program traces it once.
_causal_conv = jax.jit(causal_conv, static_argnames="options")


class ShortConv(nnx.Module):
    """C * conv(B * x), with B, C and x projected from the tokens (LFM2, Liquid AI 2025).

    The convolution is causal and has a few taps for each channel. Its state is the last inputs.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        sizes = config.recurrent
        assert isinstance(sizes, ShortConvSizes)
        embed, width, self.split = config.hidden_size, sizes.width, config.split
        parts = (3, sizes.channels)
        self.into = weight(rngs, (embed, *parts), ("embed", "gate_up", "mlp"), dtype)
        taps = (width, 1, sizes.channels)
        self.taps = weight(rngs, taps, ("taps", "taps", "mlp"), dtype)
        self.out = weight(rngs, (sizes.channels, embed), ("mlp", "embed"), dtype)
        triple, channels = ("gate_up", "mlp"), ("taps", "mlp")
        self.into_bias = constant(0.0, parts, triple, dtype) if sizes.bias else None
        self.taps_bias = constant(0.0, (1, parts[1]), channels, dtype) if sizes.bias else None
        self.out_bias = constant(0.0, (embed,), ("embed",), dtype) if sizes.bias else None

    def __call__(
        self, x: Float[Array, "T D"], step: PagedStep, states: States
    ) -> tuple[Float[Array, "T D"], States]:
        """Return the result for each token, and the states with the tokens of this step."""
        assert step.state_rows is not None
        parts = matmul(x, self.into[...], bias=value_of(self.into_bias))  # [T, 3, C]
        before, after, inputs = parts[:, 0], parts[:, 1], parts[:, 2]
        bias = None if self.taps_bias is None else self.taps_bias[...][0]
        y, state = _causal_conv(
            before * inputs, states[0], self.taps[...][:, 0], bias, step.state_rows
        )
        y = matmul(after * y, self.out[...], bias=value_of(self.out_bias), split=self.split)
        return y, (state,)
