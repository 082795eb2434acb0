"""Kimi's delta rule (Kimi Team 2025, arXiv:2510.26692): a decay for each number of a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.recurrent import ChannelDeltaSizes
from jaxserve.models.layers import Norm
from jaxserve.models.linear import accumulator, constant, matmul, weight
from jaxserve.models.paged import LogicalAxes, PagedStep, States
from jaxserve.models.recurrent import conv_recurrence_of_layers
from pallas_kernels import ChannelDeltaOptions, ChannelGates, ConvWeights, sigmoid

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class ChannelDelta(nnx.Module):
    """The delta rule of Kimi-Linear and Ling 3, with a short convolution before it.

    Each head's result is normalized and multiplied by the sigmoid of a gate. Decays and gates have
    projections of low rank in Kimi-Linear and full ones in Ling 3.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        sizes = config.recurrent
        assert isinstance(sizes, ChannelDeltaSizes)
        self.sizes, self.split = sizes, config.split
        embed, channels, (_, keys, values) = config.hidden_size, sum(sizes.parts), sizes.parts
        self.mixed = weight(rngs, (embed, channels), ("embed", "state_parts"), dtype)
        down, rank = (embed, sizes.rank or 0), sizes.rank
        axes: LogicalAxes = ("embed", "latent")
        self.decay_down = weight(rngs, down, axes, dtype) if rank else None
        self.gate_down = weight(rngs, down, axes, dtype) if rank else None
        inner: LogicalAxes = ("latent" if rank else "embed", "mlp")
        self.decay = weight(rngs, (rank or embed, keys), inner, dtype)
        self.gate = weight(rngs, (rank or embed, values), inner, dtype)
        self.write = weight(rngs, (embed, sizes.heads), ("embed", "state_heads"), dtype)
        taps: LogicalAxes = ("taps", "taps", "state_parts")
        self.taps = weight(rngs, (sizes.width, 1, channels), taps, dtype)
        # The logarithm of the decay rate of each head, and then the bias of each decay, in at least
        # float32.
        axes = ("taps", "state_heads", "head_dim")
        shape = (1, sizes.heads, 1 + sizes.inputs)
        self.constants = constant(0.5, shape, axes, accumulator(dtype))
        self.norm = Norm((sizes.outputs,), ("head_dim",), config.rms_norm_eps, dtype)
        self.out = weight(rngs, (values, embed), ("mlp", "embed"), dtype)

    def __call__(
        self, x: Float[Array, "T D"], step: PagedStep, states: States
    ) -> tuple[Float[Array, "T D"], States]:
        """Return the result for each token, and the states with the tokens of this step."""
        assert step.state_rows is not None
        heads, inputs = states[1].shape[1], self.sizes.inputs
        decay = matmul(_through(x, self.decay_down), self.decay[...])
        gates = ChannelGates(matmul(x, self.write[...]), decay.reshape(len(x), heads, inputs))
        sizes = ChannelDeltaOptions(
            heads, heads, inputs, self.sizes.outputs, bound=self.sizes.bound
        )
        weights = ConvWeights(self.taps[...][:, 0])
        mixed = matmul(x, self.mixed[...])
        operands = mixed, gates, states, weights, self.constants[...][0], step.state_rows
        y, states = conv_recurrence_of_layers(
            *operands,
            options=sizes,
            one_token=step.decode_only,
            implementation=step.others,
        )
        exact = accumulator(x.dtype)
        gate = matmul(_through(x, self.gate_down), self.gate[...]).astype(exact)
        y = self.norm(y.astype(exact)).reshape(gate.shape) * sigmoid(gate)
        return matmul(y.astype(x.dtype), self.out[...], split=self.split), states


def _through(x: jax.Array, down: nnx.Param[Array] | None) -> jax.Array:
    return x if down is None else matmul(x, down[...])
