"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): frequencies, scalings, cosines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxserve.models.config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from jaxserve.models.linear import accumulator
from jaxserve.models.rounding import rounded_once

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

    # Cosines and sines of each token's rotary angles.
    CosSin = tuple[Float[Array, "T pairs"], Float[Array, "T pairs"]]


def rope_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Return the angle per position of each rotated pair, float64: theta ** (-2i / d), scaled.

    d is the number of rotated dimensions: `head_dim`, or less if only part of a head is rotated.
    For a dynamic scaling these are the frequencies within the original context (see
    `rope_cos_sin`).
    """
    size = rope.dimensions(head_dim)
    frequencies = rope.theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    match rope.scaling:
        case LinearScaling(factor):  # Chen et al. 2023, arXiv:2306.15595
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            return _yarn(frequencies, scaling, rope.theta, size)
        case LongRopeScaling() as scaling:  # Ding et al. 2024, arXiv:2402.13753
            return frequencies / np.array(scaling.long if scaling.stretched else scaling.short)
        case ProportionalScaling(pairs, factor):
            return np.where(np.arange(len(frequencies)) < pairs, frequencies / factor, 0.0)
        case DynamicScaling() | None:
            return frequencies


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    # As in llama-models (`apply_scaling`): map the turns over the original context to 1 (keep the
    # frequency, from `high_freq_factor` turns on) .. 0 (divide it, up to `low_freq_factor` turns).
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def _yarn(frequencies: np.ndarray, scaling: YarnScaling, theta: float, size: int) -> np.ndarray:
    """Return the frequencies of the rotary embedding with YaRN scaling (Peng et al. 2023, 3.2).

    Pairs with more than `beta_fast` turns over the original context keep their frequency. Pairs
    with fewer than `beta_slow` turns have it divided by the factor. Between these bounds the share
    of the division grows linearly with the index of the pair.
    """

    def index_with(turns: float) -> float:
        """Return the fractional index of the pair with `turns` turns over the original context."""
        wavelength = scaling.original_max_position_embeddings / turns
        return size * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = index_with(scaling.beta_fast), index_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The bound is the last dimension, not the last pair, as in the paper's code and all others.
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    slow = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0.0, 1.0)
    return frequencies * (1.0 - slow + slow / scaling.factor)


def rope_cos_sin(
    positions: Int32[Array, " T"], rope: Rope, head_dim: int, dtype: DTypeLike
) -> CosSin:
    """Return the cosines and sines of each token's rotary angles, both [T, pairs].

    They are in at least float32. All layers with the same `rope` share them. YaRN and LongRoPE
    multiply both by an attention factor. Under dynamic scaling the token at position p is rotated
    as the last of p + 1 tokens. A model that reads one token at a time does the same, and it is the
    only rule by which a cached key does not depend on the chunking of its prompt.

    Args:
        positions: position of each token in its sequence.
        rope: the rotary embedding.
        head_dim: size of a head.
        dtype: dtype of the activations.
    """
    exact = accumulator(dtype)
    frequencies = jnp.asarray(rope_frequencies(rope, head_dim), exact)
    angles = positions.astype(exact)[:, None] * frequencies
    match rope.scaling:
        case DynamicScaling() as scaling:
            angles = angles * _growth(positions, scaling, rope.dimensions(head_dim), exact)
            factor = 1.0
        case YarnScaling(attention_factor=factor) | LongRopeScaling(attention_factor=factor):
            pass
        case _:
            factor = 1.0

    def compute(angles: Float[Array, "T pairs"]) -> CosSin:
        return jnp.cos(angles) * factor, jnp.sin(angles) * (-factor if rope.backwards else factor)

    return rounded_once(compute, angles, positions)


def _growth(
    positions: Int32[Array, " T"], scaling: DynamicScaling, size: int, dtype: DTypeLike
) -> Float[Array, "T pairs"]:
    """Return the factor of each frequency at each position under dynamic NTK scaling, [T, pairs].

    The factor is 1 within the original context. Beyond it, the base of the rotary embedding grows
    by g ** (d / (d - 2)), g = factor * length / original - (factor - 1), d = `size` rotated
    dimensions. Frequency i is thus multiplied by g ** (-2i / (d - 2)) (Peng et al. 2023, appendix
    B).
    """
    original = scaling.original_max_position_embeddings
    beyond = jnp.maximum(positions + 1 - original, 0).astype(dtype)
    base = 1.0 + scaling.factor * beyond / original
    exponents = jnp.asarray(-np.arange(0, size, 2) / (size - 2), dtype)
    return jnp.exp(jnp.log(base)[:, None] * exponents)


def rotate(
    x: Float[Array, "T N H"], cos_sin: CosSin, interleaved: bool = False
) -> Float[Array, "T N H"]:
    """Return x with its pairs of dimensions rotated (rotary position embedding), in x's dtype.

    The pairs are dimensions (i, i + pairs), the order of Llama's weights. With `interleaved`, the
    input has the pairs (2i, 2i + 1), but the result has the order of Llama, which is correct if
    queries and keys have the same order. Dimensions of a head after the rotated ones stay
    unchanged.
    """
    cos, sin = (part[:, None] for part in cos_sin)
    pairs = cos.shape[-1]
    turned, rest = jnp.split(x.astype(cos.dtype), [2 * pairs], axis=-1)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rest.shape[-1]:
        parts.append(rest)
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)
