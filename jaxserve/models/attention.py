"""Grouped-query attention over a paged cache."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import CosSin, RMSNorm
from jaxserve.models.linear import constant, matmul, value_of, weight
from jaxserve.models.paged import KVPages, PagedStep
from pallas_kernels import kv_write, paged_decode_attention, ragged_paged_attention


class Attention(nnx.Module):
    """Project, rotate, write K and V to their pages, attend, project back.

    The fused projection is `[D, K, G + 2, H]`: for each kv head its G query heads, then its key,
    then its value. Splitting it over the kv heads keeps every head with the pages it reads.
    """

    def __init__(
        self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs, *, qk_norm: bool = False
    ) -> None:
        embed, kv_heads, head_dim = config.hidden_size, config.num_key_value_heads, config.head_dim
        self.group = group = config.num_attention_heads // kv_heads
        self.qkv = weight(
            rngs,
            (embed, kv_heads, group + 2, head_dim),
            ("embed", "kv_heads", "group", "head_dim"),
            dtype,
        )
        self.out = weight(
            rngs,
            (kv_heads, group, head_dim, embed),
            ("kv_heads", "group", "head_dim", "embed"),
            dtype,
            contract=3,
        )
        if config.attention_bias:
            axes = ("kv_heads", "group", "head_dim")
            self.qkv_bias = constant(0.0, (kv_heads, group + 2, head_dim), axes, dtype)
            self.out_bias = constant(0.0, (embed,), ("embed",), dtype)
        else:
            self.qkv_bias = self.out_bias = None
        if qk_norm:
            self.query_norm = RMSNorm(head_dim, "head_dim", config.rms_norm_eps, dtype)
            self.key_norm = RMSNorm(head_dim, "head_dim", config.rms_norm_eps, dtype)
        else:
            self.query_norm = self.key_norm = None

    def __call__(
        self, x: Float[Array, "T D"], cos_sin: CosSin, step: PagedStep, kv: KVPages
    ) -> tuple[Float[Array, "T D"], KVPages]:
        """Attend from every token to its row's cache, this step's tokens included."""
        num_tokens, group = x.shape[0], self.group
        qkv = matmul(x, self.qkv[...], bias=value_of(self.qkv_bias))  # [T, K, G + 2, H]
        query, key, val = qkv[:, :, :group], qkv[:, :, group], qkv[:, :, group + 1]
        query = query.reshape(num_tokens, -1, query.shape[-1])  # [T, N, H]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, cos_sin), rotate(key, cos_sin)
        kv = kv_write(key, val, *kv, step.slot_mapping, implementation=step.implementation)
        attended = attend(query, kv, step)
        attended = attended.reshape(num_tokens, -1, group, attended.shape[-1])  # [T, K, G, H]
        return matmul(attended, self.out[...], contract=3, bias=value_of(self.out_bias)), kv


def rotate(x: Float[Array, "T N H"], cos_sin: CosSin) -> Float[Array, "T N H"]:
    """Rotary embedding that pairs dimension i with i + H / 2, the order Hugging Face stores."""
    cos, sin = (part[:, None] for part in cos_sin)
    left, right = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x.dtype)


def attend(query: Float[Array, "T N H"], kv: KVPages, step: PagedStep) -> Float[Array, "T N H"]:
    """Causal attention of each token over its row's pages."""
    if step.decode_only:
        return paged_decode_attention(
            query, *kv, step.page_table, step.kv_len, implementation=step.implementation
        )
    return ragged_paged_attention(
        query,
        *kv,
        step.page_table,
        step.query_start,
        step.kv_len,
        implementation=step.implementation,
    )
