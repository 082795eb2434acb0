"""Layers that keep a state of fixed size for each sequence, in rows beside the cache pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.recurrent import GatedDeltaSizes, Mamba2Sizes, ShortConvSizes
from jaxserve.models.layers import Norm
from jaxserve.models.linear import accumulator, constant, matmul, value_of, weight
from jaxserve.models.paged import LogicalAxes, LogicalAxis, PagedStep, States
from pallas_kernels import (
    ConvWeights,
    DeltaOptions,
    Mamba2Options,
    causal_conv,
    conv_recurrence,
    gated,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float

# All layers call these jitted functions, so a larger program traces each once.
_STATIC = ("options", "one_token", "implementation")
_causal_conv = jax.jit(causal_conv, static_argnames=_STATIC)
conv_recurrence_of_layers = jax.jit(conv_recurrence, static_argnames=_STATIC)


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
        triple: LogicalAxes = ("gate_up", "mlp")
        channels: LogicalAxes = ("taps", "mlp")
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
        operands = before * inputs, states[0], self.taps[...][:, 0], bias, step.state_rows
        y, state = _causal_conv(
            *operands,
            one_token=step.decode_only,
            implementation=step.others,
        )
        y = matmul(after * y, self.out[...], bias=value_of(self.out_bias), split=self.split)
        return y, (state,)


class GatedDelta(nnx.Module):
    """The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), as in Qwen3.5.

    A short convolution runs over queries, keys and values first. Each head's result is normalized
    and gated.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        sizes = config.recurrent
        assert isinstance(sizes, GatedDeltaSizes)
        self.sizes, self.split = sizes, config.split
        embed, channels, values = config.hidden_size, sum(sizes.parts), sizes.parts[2]
        if sizes.fused:
            self.mixed, shape = None, (embed, channels + values)
            self.fused = weight(rngs, shape, ("embed", "mlp"), dtype)
            self.gate = None
        else:
            self.mixed = weight(rngs, (embed, channels), ("embed", "state_parts"), dtype)
            self.gate = weight(rngs, (embed, values), ("embed", "mlp"), dtype)
            self.fused = None
        axes: LogicalAxes = ("embed", "gate_up", "state_heads", "taps")
        gates = (embed, 2, sizes.groups, sizes.heads // sizes.groups)
        self.gates = weight(rngs, gates, axes, dtype)
        taps: LogicalAxes = ("taps", "taps", "state_parts")
        self.taps = weight(rngs, (sizes.width, 1, channels), taps, dtype)
        # The logarithm of the decay rate, and the bias of the decay, in at least float32.
        constants: LogicalAxes = ("taps", "state_heads")
        self.constants = constant(0.5, (2, sizes.heads), constants, accumulator(dtype))
        eps = sizes.norm_eps or config.rms_norm_eps
        self.norm = Norm((sizes.outputs,), ("head_dim",), eps, dtype)
        self.out = weight(rngs, (values, embed), ("mlp", "embed"), dtype)

    def __call__(
        self, x: Float[Array, "T D"], step: PagedStep, states: States
    ) -> tuple[Float[Array, "T D"], States]:
        """Return the result for each token, and the states with the tokens of this step."""
        assert step.state_rows is not None
        mixed, gate = self._projected(x)
        heads, outputs = states[1].shape[1], self.sizes.outputs
        sizes = DeltaOptions(
            heads // (self.sizes.heads // self.sizes.groups),
            heads,
            self.sizes.inputs,
            outputs,
            strength=self.sizes.strength,
        )
        gates = matmul(x, self.gates[...]).reshape(len(x), 2, heads)
        weights = ConvWeights(self.taps[...][:, 0])
        operands = mixed, gates, states, weights, self.constants[...], step.state_rows
        y, states = conv_recurrence_of_layers(
            *operands,
            options=sizes,
            one_token=step.decode_only,
            implementation=step.others,
        )
        y = self.norm(y).reshape(len(x), -1)
        y = gated(jnp.stack([gate, y], axis=1), "silu", x.dtype)
        return matmul(y, self.out[...], split=self.split), states

    def _projected(
        self, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T M"], Float[Array, "T values"]]:
        """Return queries, keys and values of all heads, one after the other, and the gates."""
        if self.fused is None:
            assert self.mixed is not None and self.gate is not None
            return matmul(x, self.mixed[...]), matmul(x, self.gate[...])
        sizes = self.sizes
        values = sizes.heads // sizes.groups * sizes.outputs
        fused = matmul(x, self.fused[...])
        fused = fused.reshape(len(x), -1, 2 * (sizes.inputs + values))
        places = np.cumsum([sizes.inputs, sizes.inputs, values])
        parts = [part.reshape(len(x), -1) for part in jnp.split(fused, places, axis=-1)]
        return jnp.concatenate(parts[:3], axis=-1), parts[3]


class Mamba2(nnx.Module):
    """Mamba-2 (Dao and Gu 2024) with a short convolution before it and a gated norm after it."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        sizes = config.recurrent
        assert isinstance(sizes, Mamba2Sizes)
        self.sizes, self.split = sizes, config.split
        embed, channels, values = config.hidden_size, sum(sizes.parts), sizes.parts[0]
        self.gate = weight(rngs, (embed, values), ("embed", "mlp"), dtype)
        self.mixed = weight(rngs, (embed, channels), ("embed", "state_parts"), dtype)
        self.steps = weight(rngs, (embed, sizes.heads), ("embed", "state_heads"), dtype)
        taps: LogicalAxes = ("taps", "taps", "state_parts")
        self.taps = weight(rngs, (sizes.width, 1, channels), taps, dtype)
        self.taps_bias = self._bias(sizes.conv_bias, channels, "state_parts", dtype)
        self.gate_bias = self._bias(sizes.bias, values, "mlp", dtype)
        self.mixed_bias = self._bias(sizes.bias, channels, "state_parts", dtype)
        self.steps_bias = self._bias(sizes.bias, sizes.heads, "state_heads", dtype)
        self.out_bias = constant(0.0, (embed,), ("embed",), dtype) if sizes.bias else None
        # The logarithm of the decay rate, the bias of the step sizes, and the factor of the direct
        # path, in at least float32.
        constants: LogicalAxes = ("taps", "state_heads")
        self.constants = constant(0.5, (3, sizes.heads), constants, accumulator(dtype))
        shape = (sizes.groups, values // sizes.groups)
        axes: LogicalAxes = ("state_heads", "head_dim")
        norm = Norm(shape, axes, config.rms_norm_eps, dtype, over=1)
        self.norm = norm if sizes.norm else None
        self.out = weight(rngs, (values, embed), ("mlp", "embed"), dtype)

    def _bias(
        self, exists: bool, size: int, axis: LogicalAxis, dtype: DTypeLike
    ) -> nnx.Param[Array] | None:
        return constant(0.0, (1, size), ("taps", axis), dtype) if exists else None

    def __call__(
        self, x: Float[Array, "T D"], step: PagedStep, states: States
    ) -> tuple[Float[Array, "T D"], States]:
        """Return the result for each token, and the states with the tokens of this step."""
        assert step.state_rows is not None
        gate, mixed, steps = (
            matmul(x, part[...], bias=None if bias is None else bias[...][0])
            for part, bias in (
                (self.gate, self.gate_bias),
                (self.mixed, self.mixed_bias),
                (self.steps, self.steps_bias),
            )
        )
        heads = states[1].shape[1]
        groups = heads // (self.sizes.heads // self.sizes.groups)
        if self.sizes.factors:
            gate, mixed, steps = self._scaled(gate, mixed, steps, heads, groups)
        taps_bias = None if self.taps_bias is None else self.taps_bias[...][0]
        sizes = Mamba2Options(
            groups, heads, self.sizes.inputs, self.sizes.outputs, self.sizes.least, self.sizes.most
        )
        weights = ConvWeights(self.taps[...][:, 0], taps_bias)
        operands = mixed, steps, states, weights, self.constants[...], step.state_rows
        y, states = conv_recurrence_of_layers(
            *operands,
            options=sizes,
            one_token=step.decode_only,
            implementation=step.others,
        )
        y = self._gated(gate, y.reshape(len(x), groups, -1)).astype(x.dtype)
        bias = value_of(self.out_bias)
        return matmul(y, self.out[...], bias=bias, split=self.split), states

    def _scaled(
        self,
        gate: Float[Array, "T values"],
        mixed: Float[Array, "T M"],
        steps: Float[Array, "T heads"],
        heads: int,
        groups: int,
    ) -> tuple[Float[Array, "T values"], Float[Array, "T M"], Float[Array, "T heads"]]:
        """Multiply the projections by the factors of the model (Falcon-H1)."""
        exact, (first, *parts, last) = accumulator(gate.dtype), self.sizes.factors
        keys = groups * self.sizes.inputs
        factors = np.repeat(parts, [heads * self.sizes.outputs, keys, keys])
        return (
            (gate.astype(exact) * first).astype(gate.dtype),
            (mixed.astype(exact) * jnp.asarray(factors, exact)).astype(mixed.dtype),
            (steps.astype(exact) * last).astype(steps.dtype),
        )

    def _gated(
        self, gate: Float[Array, "T values"], y: Float[Array, "T groups size"]
    ) -> Float[Array, "T values"]:
        """Apply the gate and the norm of the result in their order, in at least float32."""
        exact = accumulator(gate.dtype)
        if self.norm is not None and self.sizes.norm == "before":
            y = self.norm(y.astype(exact))
        pair = jnp.stack([gate, y.reshape(gate.shape)], axis=1).astype(exact)
        result = gated(pair, "silu")
        if self.norm is not None and self.sizes.norm == "after":
            result = self.norm(result.reshape(y.shape)).reshape(gate.shape)
        return result
