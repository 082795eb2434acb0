"""Layers that families share, apart from attention: norm, embedding, gated MLP, rotary angles."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxserve.models.config import ModelConfig, Rope
from jaxserve.models.linear import accumulator, constant, matmul, value_of, weight
from jaxserve.models.paged import LogicalAxis

# Cosines and sines of each token's rotary angles, each [T, H / 2].
CosSin = tuple[Float[Array, "T half_H"], Float[Array, "T half_H"]]


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, axis: LogicalAxis, eps: float, dtype: DTypeLike) -> None:
        self.scale = constant(1.0, (size,), (axis,), dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalise in at least float32, then round to x's dtype, then scale, as Llama does."""
        y = x.astype(accumulator(x.dtype))
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return self.scale[...] * y.astype(x.dtype)


class Embedding(nnx.Module):
    """Token embeddings and the output projection, one array where the model ties them.

    The projection is `[D, V]`, input-major like every weight. Against `[V, D]` it is 1.1 to 1.6
    times faster at 2 to 16 rows in float32 on CPU, the same at 1 row, and 0.7 to 1.0 times as fast
    in bfloat16 (D 576-768, V 32-49 thousand). A tied table is therefore `[D, V]` only: looking a
    token up reads a column, which costs 4 us a token more, 1% to 10% of what the projection gains
    at those sizes, and spares the memory of a second copy (a fifth of a 135M-parameter model).
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        vocab, embed = config.vocab_size, config.hidden_size
        self.tied = config.tie_word_embeddings
        self.project = weight(rngs, (embed, vocab), ("embed", "vocab"), dtype)
        if not self.tied:
            self.table = weight(rngs, (vocab, embed), ("vocab", "embed"), dtype, contract=0)

    def __call__(self, tokens: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Look tokens up. Ids outside [0, V) are the caller's to refuse: they clamp here."""
        if self.tied:
            return jnp.take(self.project[...], tokens, axis=1, mode="clip").T
        return jnp.take(self.table[...], tokens, axis=0, mode="clip")

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Scores of every token, in at least float32."""
        return matmul(hidden, self.project[...], out_dtype=accumulator(hidden.dtype))


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, "SwiGLU"), gate and up in one product."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        embed, mlp = config.hidden_size, config.intermediate_size
        self.gate_up = weight(rngs, (embed, 2, mlp), ("embed", "gate_up", "mlp"), dtype)
        self.down = weight(rngs, (mlp, embed), ("mlp", "embed"), dtype)
        if config.mlp_bias:
            self.gate_up_bias = constant(0.0, (2, mlp), ("gate_up", "mlp"), dtype)
            self.down_bias = constant(0.0, (embed,), ("embed",), dtype)
        else:
            self.gate_up_bias = self.down_bias = None

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate_up = matmul(x, self.gate_up[...], bias=value_of(self.gate_up_bias))  # [T, 2, F]
        hidden = jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]
        return matmul(hidden, self.down[...], bias=value_of(self.down_bias))


def rope_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Angle per position of each rotated pair, `[H / 2]`, float64.

    theta ** (-2i / H) (Su et al. 2021). With Llama 3.1 scaling, pairs whose wavelength exceeds the
    original context over `low_freq_factor` turn `factor` times slower, those shorter than the
    original context over `high_freq_factor` are unchanged, and those between are interpolated
    (llama-models, `apply_scaling`).
    """
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    # Turns made over the original context, mapped to 1 (keep) .. 0 (slow down by the factor).
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rope_cos_sin(
    positions: Int32[Array, " T"], rope: Rope, head_dim: int, dtype: DTypeLike
) -> CosSin:
    """Cosines and sines for one step, in at least float32; computed once, used by every layer."""
    exact = accumulator(dtype)
    frequencies = jnp.asarray(rope_frequencies(rope, head_dim), exact)
    angles = positions.astype(exact)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)
