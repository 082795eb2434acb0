"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Keys and values are projected up from a latent of low rank. All heads share the rotated part of the
keys. The cache holds the keys and values of every head, as the kernels read them; the shorter of
the two is padded with zeros.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.attention import (
    decode_attention,
    ragged_attention,
    rotate,
    scales_of,
    write_kv,
)
from jaxserve.models.config.latent import Latent
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import Rope, YarnScaling
from jaxserve.models.family import FamilyTraits
from jaxserve.models.layers import Norm
from jaxserve.models.linear import constant, matmul, value_of, weight
from jaxserve.models.paged import KVPages, PagedStep
from pallas_kernels import AttentionOptions

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from jaxserve.models.rope import CosSin

NORM_EPS = 1e-6  # epsilon of the latents' norms, independent of config.json


class LatentAttention(nnx.Module):
    """Multi-head latent attention of DeepSeek-V2 over a paged KV cache.

    Queries, keys and values are projected up from latents of low rank, and all heads share the
    rotated part of the keys. The cache holds the full keys and values of every head.
    """

    def __init__(
        self,
        config: ModelConfig,
        latent: Latent,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        traits: FamilyTraits,
    ) -> None:
        embed, heads = config.hidden_size, config.num_attention_heads
        self.latent, self.scale = latent, softmax_scale(latent, config.rope)
        self.split = config.split
        rank, biased = latent.query_rank, config.attention_bias
        if rank is None:
            self.query_down = self.query_down_bias = self.query_norm = None
        else:
            self.query_down = weight(rngs, (embed, rank), ("embed", "latent"), dtype)
            self.query_down_bias = constant(0.0, (rank,), ("latent",), dtype) if biased else None
            self.query_norm = Norm((rank,), ("latent",), NORM_EPS, dtype, traits)
        self.query = weight(
            rngs,
            (rank or embed, heads, latent.key),
            ("latent" if rank else "embed", "kv_heads", "head_dim"),
            dtype,
        )
        joint = latent.rank + latent.rotary
        self.down = weight(rngs, (embed, joint), ("embed", "latent"), dtype)
        self.norm = Norm((latent.rank,), ("latent",), NORM_EPS, dtype, traits)
        self.up = weight(
            rngs,
            (latent.rank, heads, latent.plain + latent.value),
            ("latent", "kv_heads", "head_dim"),
            dtype,
        )
        axes = ("kv_heads", "head_dim", "embed")
        self.out = weight(rngs, (heads, latent.value, embed), axes, dtype, contract=2)
        self.down_bias = constant(0.0, (joint,), ("latent",), dtype) if biased else None
        self.out_bias = constant(0.0, (embed,), ("embed",), dtype) if biased else None

    def __call__(
        self, x: Float[Array, "T D"], cos_sin: CosSin | None, step: PagedStep, kv: KVPages
    ) -> tuple[Float[Array, "T D"], KVPages]:
        """Attend causally from every token to the cached keys and values of its own sequence.

        The keys and values of this step are written to the cache first.

        Args:
            x: normalized input of the layer, [T, D].
            cos_sin: cosines and sines of the rotary embedding, or None for no rotation.
            step: the ragged batch of this step.
            kv: cache pages of this layer.

        Returns:
            The projected output, [T, D], and the updated cache pages.
        """
        latent = self.latent
        query = self._queries(x)
        joint = matmul(x, self.down[...], bias=value_of(self.down_bias))
        rotary = joint[:, None, latent.rank :]  # [T, 1, rotary]
        parts = matmul(self.norm(joint[:, : latent.rank]), self.up[...])
        key, val = parts[..., : latent.plain], parts[..., latent.plain :]
        query_plain, query_rotary = query[..., : latent.plain], query[..., latent.plain :]
        if cos_sin is not None:
            query_rotary = rotate(query_rotary, cos_sin, latent.interleaved)
            rotary = rotate(rotary, cos_sin, latent.interleaved)
        query = jnp.concatenate([query_plain, query_rotary], axis=-1)
        rotary = jnp.broadcast_to(rotary, (*key.shape[:2], latent.rotary))
        key = jnp.concatenate([key, rotary], axis=-1)
        query, key, val = (_padded(part, latent.cached) for part in (query, key, val))
        kv = write_kv((key, val), kv, step.slot_mapping, step.implementation, {})
        attended = self._attend(query, kv, step)[..., : latent.value]
        out, bias = self.out[...], value_of(self.out_bias)
        return matmul(attended, out, contract=2, bias=bias, split=self.split), kv

    def _queries(self, x: Float[Array, "T D"]) -> Float[Array, "T N H"]:
        if self.query_down is not None and self.query_norm is not None:
            x = matmul(x, self.query_down[...], bias=value_of(self.query_down_bias))
            x = self.query_norm(x)
        return matmul(x, self.query[...])

    def _attend(
        self, query: Float[Array, "T N H"], kv: KVPages, step: PagedStep
    ) -> Float[Array, "T N H"]:
        scales: Any = scales_of(kv)
        options = AttentionOptions(scale=self.scale, **scales)
        table, lengths, name = step.page_table, step.kv_len, step.implementation
        if step.decode_only:
            return decode_attention(query, *kv[:2], table, lengths, options, implementation=name)
        return ragged_attention(
            query, *kv[:2], table, step.query_start, lengths, options, implementation=name
        )


def softmax_scale(latent: Latent, rope: Rope) -> float:
    """Return the factor of the attention scores of latent attention: (size of a key) ** -0.5.

    YaRN with `mscale_all_dim` multiplies this by (1 + 0.1 * mscale_all_dim * log(factor)) ** 2.
    """
    scale = latent.key**-0.5
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        growth = 0.1 * math.log(max(rope.scaling.factor, 1.0))
        scale *= (1.0 + rope.scaling.mscale_all_dim * growth) ** 2
    return scale


def _padded(x: Float[Array, "T N H"], size: int) -> Float[Array, "T N padded"]:
    return x if x.shape[-1] == size else jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[-1])))
