"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Keys and values are projected up from a latent of low rank, which all heads share, and the rotated
part of the keys is shared too. The cache holds the normalized latent and the rotated part, one cell
per token. The projection of keys is applied to the queries in place of the keys, and the projection
of values to the result of attention in place of the values ("absorbed" projections). Each is a
matrix per head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.attention import growing, growth_at, own_cells, part_attention
from jaxserve.models.collectives import device_index, heads_of_group, parts_of_group
from jaxserve.models.config.latent import Latent
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import Rope, YarnScaling
from jaxserve.models.family import FamilyTraits
from jaxserve.models.layers import Norm
from jaxserve.models.linear import accumulator, constant, matmul, normal, value_of, weight
from jaxserve.models.paged import LatentPages, PagedStep
from jaxserve.models.placed_weight import PlacedWeight
from jaxserve.models.rope import rotate
from jaxserve.models.token_rounding import TokenRounded, rounded_rows
from jaxserve.models.transposed_weight import TransposedWeight
from pallas_kernels import (
    LatentOptions,
    PartPositions,
    latent_attention,
    latent_write,
    merge_parts,
    quantized_latent_write,
    sigmoid,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from jaxserve.models.rope import CosSin

NORM_EPS = 1e-6  # epsilon of the latents' norms, independent of config.json

# As in `attention.py`, each is traced once for all layers.
attend_latents = jax.jit(latent_attention, static_argnames=("one_query", "implementation"))


class LatentAttention(nnx.Module):
    """Multi-head latent attention of DeepSeek-V2 over a paged cache of latents.

    A cell of the cache has the latent of a token and the rotated part of its keys.
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
        self.split, self.growth = config.split, growing(config.rope)
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
        joint = latent.cell
        self.down = weight(rngs, (embed, joint), ("embed", "latent"), dtype)
        self.norm = Norm((latent.rank,), ("latent",), NORM_EPS, dtype, traits)
        # The projections of keys and values from their latent, [heads, inputs, outputs] as they
        # multiply. Both have the scale of the projection from the latent.
        scale = latent.rank**-0.5
        shape = (heads, latent.plain, latent.rank)
        self.key_up = normal(rngs, shape, ("kv_heads", "head_dim", "latent"), dtype, scale)
        shape = (heads, latent.rank, latent.value)
        self.value_up = normal(rngs, shape, ("kv_heads", "latent", "head_dim"), dtype, scale)
        axes = ("kv_heads", "head_dim", "embed")
        self.out = weight(rngs, (heads, latent.value, embed), axes, dtype, contract=2)
        self.down_bias = constant(0.0, (joint,), ("latent",), dtype) if biased else None
        self.out_bias = constant(0.0, (embed,), ("embed",), dtype) if biased else None
        axes = ("embed", "kv_heads", "group")
        is_gated = traits.gated == "heads"
        self.head_gate = weight(rngs, (embed, heads, 1), axes, dtype) if is_gated else None

    def __call__(
        self, x: Float[Array, "T D"], cos_sin: CosSin | None, step: PagedStep, kv: LatentPages
    ) -> tuple[Float[Array, "T D"], LatentPages]:
        """Attend causally from every token to the cached latents of its own sequence.

        The cells of this step are written to the cache first.

        Args:
            x: normalized input of the layer, [T, D].
            cos_sin: cosines and sines of the rotary embedding, or None for no rotation.
            step: the ragged batch of this step.
            kv: cache pages of this layer.

        Returns:
            The projected output, [T, D], and the updated cache pages.
        """
        query = self._queries(x, cos_sin, step)
        kv = self._written(x, cos_sin, step, kv)
        attended = self._attend(query, kv, step)
        attended = _by_head(attended, self.value_up[...], step.others)
        if self.head_gate is not None:
            exact = accumulator(x.dtype)
            gate = sigmoid(matmul(x, self.head_gate[...]).astype(exact))
            attended = (attended.astype(exact) * gate).astype(x.dtype)
        out, bias = self.out[...], value_of(self.out_bias)
        return matmul(attended, out, contract=2, bias=bias, split=self.split), kv

    def _queries(
        self, x: Float[Array, "T D"], cos_sin: CosSin | None, step: PagedStep
    ) -> Float[Array, "T N C"]:
        """Return the queries of cells: the absorbed projection of keys, and the rotated part."""
        if self.query_down is not None and self.query_norm is not None:
            x = matmul(x, self.query_down[...], bias=value_of(self.query_down_bias))
            x = self.query_norm(x)
        query = matmul(x, self.query[...])
        if self.growth is not None:
            query = query * growth_at(self.growth, step.positions, query.dtype)
        plain, rotary = query[..., : self.latent.plain], query[..., self.latent.plain :]
        if cos_sin is not None:
            rotary = rotate(rotary, cos_sin, self.latent.interleaved)
        absorbed = _by_head(plain, self.key_up[...], step.others)
        return jnp.concatenate([absorbed, rotary], axis=-1)

    def _written(
        self, x: Float[Array, "T D"], cos_sin: CosSin | None, step: PagedStep, kv: LatentPages
    ) -> LatentPages:
        """Compute the cells of this step's tokens, and write them to their cache pages."""
        joint, rank = matmul(x, self.down[...], bias=value_of(self.down_bias)), self.latent.rank
        rotary = joint[:, None, rank:]  # [T, 1, rotary]
        if cos_sin is not None:
            rotary = rotate(rotary, cos_sin, self.latent.interleaved)
        latent = self.norm(joint[:, :rank])
        if isinstance(self.key_up[...], TokenRounded):
            # Keys and values are projected from the rounded latent, which is cached.
            numbers, scales = rounded_rows(latent)
            latent = (numbers * scales).astype(latent.dtype)
        new = jnp.concatenate([latent, rotary[:, 0]], axis=-1)
        cells = own_cells(step, self.split.axis, self.split.context)
        if len(kv) == 2:
            return quantized_latent_write(new, *kv, cells)
        return (latent_write(new, *kv, cells),)

    def _attend(
        self, query: Float[Array, "T N C"], kv: LatentPages, step: PagedStep
    ) -> Float[Array, "T N rank"]:
        """Return the attention of each query over the cells of its sequence: mixtures of latents.

        Args:
            query: queries of this device's own heads.
            kv: cache pages that include the cells of this step.
            step: the ragged batch of this step.
        """
        pages, *scales = kv
        options = LatentOptions(self.latent.rank, self.scale, scales[0] if scales else None)
        rows = step.page_table, step.query_start, step.kv_len
        if self.split.context == 1:
            return attend_latents(
                query,
                pages,
                *rows,
                options,
                one_query=step.decode_only,
                implementation=step.others,
            )
        # Each device attends with the heads of its group to its own positions. An exchange then
        # gives every device the partial results of its own heads.
        axis, context = self.split.axis, self.split.context
        assert axis is not None
        part = part_attention(
            heads_of_group(query, axis, context),
            pages,
            pages,
            *rows,
            PartPositions(device_index(axis) % context, context),
            options.attention,
        )
        part = jnp.concatenate([part[..., : options.rank], part[..., -2:]], axis=-1)
        return merge_parts(parts_of_group(part, axis, context)).astype(query.dtype)


def _by_head(x: Float[Array, "T N I"], w: Any, implementation: str) -> Float[Array, "T N O"]:
    """Multiply the activations of each head by the head's own matrix.

    Args:
        x: activations.
        w: the matrices of all heads, [N, I, O], plain or quantized. Rounding of activations is not
            applied here: it is that of the latents, which are cached rounded.
        implementation: implementation of grouped products.

    Returns:
        [T, N, O] of x's dtype.
    """
    if isinstance(w, TokenRounded):
        w = w.weight
    if isinstance(w, TransposedWeight):
        return w.by_head(x, implementation).astype(x.dtype)
    if isinstance(w, PlacedWeight):
        tokens, heads, size = x.shape
        sizes = jnp.full(heads, tokens, jnp.int32)
        y = w.grouped(x.transpose(1, 0, 2).reshape(-1, size), sizes, implementation)
        return y.reshape(heads, tokens, -1).transpose(1, 0, 2).astype(x.dtype)
    exact = accumulator(x.dtype)
    return jnp.einsum("tni,nio->tno", x, w, preferred_element_type=exact).astype(x.dtype)


def softmax_scale(latent: Latent, rope: Rope) -> float:
    """Return the factor of the attention scores of latent attention: (size of a key) ** -0.5.

    YaRN with `mscale_all_dim` multiplies this by (1 + 0.1 * mscale_all_dim * log(factor)) ** 2.
    """
    scale = latent.key**-0.5
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        growth = 0.1 * math.log(max(rope.scaling.factor, 1.0))
        scale *= (1.0 + rope.scaling.mscale_all_dim * growth) ** 2
    return scale
