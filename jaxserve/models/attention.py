"""Grouped-query attention over a paged cache."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.collectives import device_index, heads_of_group, parts_of_group
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import Rope, YarnScaling
from jaxserve.models.family import LLAMA_TRAITS, FamilyTraits
from jaxserve.models.layers import Norm
from jaxserve.models.linear import (
    MOST_ROWS_IN_PARTS,
    accumulator,
    constant,
    matmul,
    matmul_in_parts,
    matmul_to_add,
    value_of,
    weight,
)
from jaxserve.models.paged import KVPages, LogicalAxes, PagedStep
from jaxserve.models.rope import rotate
from jaxserve.models.shards import group_of, kv_copies
from pallas_kernels import (
    AttentionOptions,
    PartPositions,
    QkvOptions,
    attention_of_part,
    kv_write,
    merge_parts,
    paged_decode_attention,
    quantized_kv_write,
    ragged_paged_attention,
    rope_kv_write,
    rope_kv_write_kernel,
    sigmoid,
    softplus,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

    from jaxserve.models.rope import CosSin


# Tracing attention and cache writes takes most of the time of tracing a layer. The first layer,
# which `run_layer` traces apart from the others, calls the same jitted functions, so each is traced
# once.
decode_attention = jax.jit(paged_decode_attention, static_argnames="implementation")
ragged_attention = jax.jit(ragged_paged_attention, static_argnames="implementation")
part_attention = jax.jit(attention_of_part)
_rope_kv_write = jax.jit(rope_kv_write, static_argnames=("dtype", "implementation"))


class Attention(nnx.Module):
    """Grouped-query attention: project, rotate, write K and V to the cache, attend, project back.

    The fused projection is `[D, K, G + 2, H]`: hidden size, kv heads, and for each kv head its G
    query heads, then its key, then its value, all of size H. Splitting the projection over the kv
    heads keeps every head on the device that has the cache pages it reads.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        traits: FamilyTraits = LLAMA_TRAITS,
        window: int | None = None,
    ) -> None:
        embed, kv_heads, head_dim = config.hidden_size, config.num_key_value_heads, config.head_dim
        group = config.num_attention_heads // kv_heads
        # The number of query heads of a kv head on one device, where heads are divided over
        # several. Parameters are created whole.
        self.group, self.axis, self.split = group_of(config), config.split.axis, config.split
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.context = config.split.context
        self.window, self.scale = window, config.scales.attention
        self.soft_cap, self.interleaved = config.scales.attention_cap, traits.interleaved
        self.growth = growing(config.rope)
        heads: LogicalAxes = ("embed", "kv_heads", "group", "head_dim")
        # Values of another size than keys are projected by themselves.
        self.value_dim, self.value_factor = (value_dim := config.value_dim), config.scales.value
        self.keys_as_values, self.reads_other = config.keys_as_values, config.reads_other
        fused = group + 2 if value_dim is None and not self.keys_as_values else group + 1
        fused = group if self.reads_other else fused
        shape: tuple[int, ...] = (embed, kv_heads, fused, head_dim)
        has_pairs = traits.gated == "numbers"
        self.qkv = None if has_pairs else weight(rngs, shape, heads, dtype)
        # With gates, each query head is projected together with its gate, and keys with values.
        pair: LogicalAxes = ("embed", "kv_heads", "group", "gate_up", "head_dim")
        shape = (embed, kv_heads, group, 2, head_dim)
        self.query_gate = weight(rngs, shape, pair, dtype) if has_pairs else None
        pair, shape = (*pair[:2], *pair[3:]), (embed, kv_heads, 2, head_dim)
        self.key_value = weight(rngs, shape, pair, dtype) if has_pairs else None
        shape = (embed, kv_heads, value_dim or head_dim)
        has_value = value_dim is not None
        self.value = weight(rngs, shape, (*heads[:2], heads[3]), dtype) if has_value else None
        shape = (embed, kv_heads, group)
        has_gate = traits.gated == "heads"
        self.head_gate = weight(rngs, shape, heads[:3], dtype) if has_gate else None
        self.gate_activation = traits.gate_activation
        self.norm_after_rotation = traits.norm_after_rotation
        self.out = weight(
            rngs,
            (kv_heads, group, value_dim or head_dim, embed),
            ("kv_heads", "group", "head_dim", "embed"),
            dtype,
            contract=3,
        )
        shape, bias_shape = (kv_heads, group, head_dim), (kv_heads, group + 2, head_dim)
        axes: LogicalAxes = ("kv_heads", "group", "head_dim")
        self.qkv_bias = constant(0.0, bias_shape, axes, dtype) if config.attention_bias else None
        self.out_bias = constant(0.0, (embed,), ("embed",), dtype) if config.output_bias else None
        # f32[2, K]: scales of stored keys and of stored values, for a cache in fp8 only.
        self.kv_scales: nnx.Param[Any] | None = nnx.data(None)
        has_sinks = window is not None if traits.sinks == "windows" else traits.sinks
        self.sinks = constant(0.0, shape[:2], axes[:2], dtype) if has_sinks else None
        self.query_norm, key_norm = self._norms(config, dtype, traits)
        self.key_norm = None if self.reads_other else key_norm
        norm = partial(Norm, shape[2:], axes[2:], config.rms_norm_eps, dtype, traits)
        self.value_norm = norm(has_scale=False) if traits.norm_values else None

    def _norms(
        self, config: ModelConfig, dtype: DTypeLike, traits: FamilyTraits
    ) -> tuple[Norm, Norm] | tuple[None, None]:
        """Return the norms of queries and of keys, or None twice if the family has none."""
        if traits.qk_norm is None:
            return None, None
        kv_heads, head_dim = config.num_key_value_heads, config.head_dim
        shape = (kv_heads, config.num_attention_heads // kv_heads, head_dim)
        axes: LogicalAxes = ("kv_heads", "group", "head_dim")
        query, key = (shape, axes), (shape[::2], axes[::2])
        if traits.qk_norm in ("head", "unscaled"):
            query = key = shape[2:], axes[2:]
        over = None if traits.qk_norm == "all" else 1
        options = config.rms_norm_eps, dtype, traits, over, traits.qk_norm != "unscaled"
        query_norm, key_norm = Norm(*query, *options), Norm(*key, *options)
        if over is None:
            query_norm.axis = key_norm.axis = self.axis
            key_norm.copies = kv_copies(config)
        return query_norm, key_norm

    def __call__(
        self,
        x: Float[Array, "T D"],
        cos_sin: CosSin | None,
        step: PagedStep,
        kv: KVPages,
        kernel: str = "xla",
    ) -> tuple[Float[Array, "*parts T D"], KVPages]:
        """Attend causally from every token to the cached keys and values of its own sequence.

        The keys and values of this step are written to the cache first. Queries and keys are
        rotated only if `cos_sin` is given.

        Args:
            x: normalized input of the layer, [T, D].
            cos_sin: cosines and sines of the rotary embedding, or None.
            step: the ragged batch of this step.
            kv: cache pages of this layer.
            kernel: name of the kernel that adds the result to the residual stream.

        Returns:
            The projected output, [T, D], or partial sums [parts, T, D] if `kernel` accepts them
            (see `matmul_to_add`), and the updated cache pages.
        """
        num_tokens, group = x.shape[0], self.group
        qkv, gate = self._with_gates(x)
        query, kv, arrivals = self._placed(x, cos_sin, step, kv, qkv)
        attended = self._attend(query, kv, step, arrivals)
        attended = attended.reshape(num_tokens, -1, group, attended.shape[-1])  # [T, K, G, H]
        if self.value_dim is not None:
            attended = attended[..., : self.value_dim]
        if gate is not None:
            exact = accumulator(x.dtype)
            factor = softplus if self.gate_activation == "softplus" else sigmoid
            attended = (attended.astype(exact) * factor(gate.astype(exact))).astype(x.dtype)
        y = matmul_to_add(
            attended,
            self.out[...],
            kernel,
            bias=value_of(self.out_bias),
            contract=3,
            implementation=step.others,
            split=self.split,
        )
        return y, kv

    def _with_gates(
        self, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T K G_plus_2 H"] | None, Float[Array, "T K G gates"] | None]:
        """Return queries, keys and values, and the gates, for attention with gates.

        A gate for each head needs no projection of its own queries, keys and values: the first
        result is then None.
        """
        if self.head_gate is not None:
            return None, matmul(x, self.head_gate[...])[..., None]
        if self.query_gate is None or self.key_value is None:
            return None, None
        both = matmul(x, self.query_gate[...])
        qkv = jnp.concatenate([both[..., 0, :], matmul(x, self.key_value[...])], axis=2)
        return qkv, both[..., 1, :]

    def _placed(
        self,
        x: Float[Array, "T D"],
        cos_sin: CosSin | None,
        step: PagedStep,
        kv: KVPages,
        qkv: Float[Array, "T K G_plus_2 H"] | None,
    ) -> tuple[Float[Array, "T N H"], KVPages, Int32[Array, " counters"] | None]:
        """Compute the queries of this step, and write its keys and values to their cache pages.

        Returns:
            The queries [T, N, H] (normalized and rotated), the updated pages, and the counters that
            the fused kernel allocated for the attention kernel (None without the fused kernel).
        """
        can = self.query_norm is None or not self.query_norm.is_centered
        can &= self.growth is None and not self.norm_after_rotation and self.value is None
        can &= self.value_norm is None and not self.keys_as_values and not self.reads_other
        if can:
            kernel = rope_kv_write_kernel(x.dtype, kv[0], len(x), self.group, step.others)
            if kernel != "xla":
                return self._placed_at_once(x, cos_sin, step, kv, kernel, qkv)
        group = self.group
        if self.qkv is not None:
            qkv = matmul(x, self.qkv[...], bias=value_of(self.qkv_bias))  # [T, K, G + 2, H]
        assert qkv is not None
        if self.reads_other:
            return self._rotated_queries(qkv, cos_sin), kv, None
        query, key = qkv[:, :, :group], qkv[:, :, group]
        if self.value is not None:
            val = self._values(x, key.shape[-1])
        else:
            val = key if self.keys_as_values else qkv[:, :, group + 1]
        val = val if self.value_norm is None else self.value_norm(val)
        if not self.norm_after_rotation:
            query, key = self._normed(query, key)
        query = query.reshape(x.shape[0], -1, query.shape[-1])  # [T, N, H]
        if cos_sin is not None:
            query = rotate(query, cos_sin, self.interleaved)
            key = rotate(key, cos_sin, self.interleaved)
        if self.norm_after_rotation:
            query, key = self._normed(query, key)
        if self.growth is not None:
            query = query * growth_at(self.growth, step.positions, query.dtype)
        kv = write_kv(
            (key, val), kv, own_cells(step, self.axis, self.context), step.others, self._scales(kv)
        )
        return query, kv, None

    def _rotated_queries(
        self, query: Float[Array, "T K G H"], cos_sin: CosSin | None
    ) -> Float[Array, "T N H"]:
        """Return the normalized and rotated queries of a layer that reads the pages of another."""
        query = query if self.query_norm is None else self.query_norm(query)
        query = query.reshape(len(query), -1, query.shape[-1])
        return query if cos_sin is None else rotate(query, cos_sin, self.interleaved)

    def _values(self, x: Float[Array, "T D"], size: int) -> Float[Array, "T K H"]:
        """Return values that are shorter than keys, with zeros up to `size`, as in the cache."""
        assert self.value is not None
        values = matmul(x, self.value[...])
        if self.value_factor != 1.0:
            values = (values.astype(accumulator(x.dtype)) * self.value_factor).astype(x.dtype)
        return jnp.pad(values, ((0, 0), (0, 0), (0, size - values.shape[-1])))

    def _normed(
        self, query: Float[Array, "T *heads H"], key: Float[Array, "T K H"]
    ) -> tuple[Float[Array, "T *heads H"], Float[Array, "T K H"]]:
        if self.query_norm is None or self.key_norm is None:
            return query, key
        return self.query_norm(query), self.key_norm(key)

    def _placed_at_once(
        self,
        x: Float[Array, "T D"],
        cos_sin: CosSin | None,
        step: PagedStep,
        kv: KVPages,
        kernel: str,
        qkv: Float[Array, "T K G_plus_2 H"] | None,
    ) -> tuple[Float[Array, "T N H"], KVPages, Int32[Array, " counters"]]:
        """Compute the queries, and cache the keys and values, with one fused kernel (`kernel`).

        The QKV projection precedes the kernel, which adds the bias, normalizes and rotates queries
        and keys, and writes keys and values to their cache pages. The results are those of
        `_placed`.
        """
        options: dict[str, Any] = {"interleaved": self.interleaved, **self._scales(kv)}
        bias = value_of(self.qkv_bias)
        if self.qkv is not None:
            qkv, bias = self._projected(x, self.qkv[...], bias, kernel, step.others)
            options["bias"] = bias
        assert qkv is not None
        if self.query_norm is not None and self.key_norm is not None:
            options["query_norm"] = self.query_norm.gain
            options["key_norm"] = self.key_norm.gain
            options["norm"] = self.query_norm.options
            if not self.query_norm.is_per_head:
                norms = self.query_norm, self.key_norm
                options["mean_squares"] = _mean_squares(qkv, bias, x.shape[0], x.dtype, norms)
        query, keys, values, arrivals = _rope_kv_write(
            qkv,
            cos_sin,
            *kv[:2],
            own_cells(step, self.axis, self.context),
            QkvOptions(**options),
            dtype=x.dtype,
            implementation=step.others,
        )
        return query, (keys, values), arrivals

    def _projected(
        self,
        x: Float[Array, "T D"],
        weights: Any,
        bias: Float[Array, "K G_plus_2 H"] | None,
        kernel: str,
        implementation: str,
    ) -> tuple[Float[Array, "*parts T K G_plus_2 H"], Float[Array, "K G_plus_2 H"] | None]:
        """Return queries, keys and values, perhaps as partial sums, and the bias not yet added."""
        if kernel == "llvm":
            return matmul_to_add(x, weights, kernel, bias=bias), None
        if isinstance(weights, jax.Array) and x.shape[0] <= MOST_ROWS_IN_PARTS:
            return matmul_in_parts(x, weights, implementation=implementation), bias
        return matmul(x, weights, bias=bias), None

    def _attend(
        self,
        query: Float[Array, "T N H"],
        kv: KVPages,
        step: PagedStep,
        arrivals: Int32[Array, " counters"] | None,
    ) -> Float[Array, "T N H"]:
        """Return the attention of each query over the cache pages of its sequence, [T, N, H].

        Attention is causal and limited to the layer's window.

        Args:
            query: queries of this step, rotated.
            kv: cache pages that include the keys and values of this step.
            step: the ragged batch of this step.
            arrivals: counters for the kernel, from `_placed`, or None.
        """
        options: Any = {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}
        options |= self._scales(kv)
        if self.context > 1:
            return self._attend_over_devices(query, kv, step, options)
        if self.sinks is not None:
            options["sinks"] = self.sinks[...].reshape(-1)
        described = AttentionOptions(arrivals=arrivals, **options)
        table, lengths = step.page_table, step.kv_len
        if step.decode_only:
            return decode_attention(
                query, *kv[:2], table, lengths, described, implementation=step.others
            )
        return ragged_attention(
            query,
            *kv[:2],
            table,
            step.query_start,
            lengths,
            described,
            implementation=step.implementation,
        )

    def _attend_over_devices(
        self, query: Float[Array, "T N H"], kv: KVPages, step: PagedStep, options: dict[str, Any]
    ) -> Float[Array, "T N H"]:
        """Return the attention, [T, N, H], with positions divided over `context` devices.

        Each device computes attention for the query heads of its whole group over its own
        positions. An exchange then gives every device all partial results for its own heads, which
        it merges.

        Args:
            query: queries of this device's own heads.
            kv: this device's cache pages.
            options: keyword arguments of `AttentionOptions`.
        """
        axis, sinks = self.axis, value_of(self.sinks)
        assert axis is not None
        part = part_attention(
            heads_of_group(query, axis, self.context),
            *kv[:2],
            step.page_table,
            step.query_start,
            step.kv_len,
            PartPositions(device_index(axis) % self.context, self.context),
            AttentionOptions(**options),
        )
        parts = parts_of_group(part, axis, self.context)
        sinks = None if sinks is None else sinks.reshape(-1)
        return merge_parts(parts, sinks).astype(query.dtype)

    def _scales(self, kv: KVPages) -> dict[str, Any]:
        if self.kv_scales is None or len(kv) == 4:
            return scales_of(kv)
        key, value = self.kv_scales[...]
        return {"k_scale": key, "v_scale": value}


def own_cells(step: PagedStep, axis: str | None, context: int) -> Int32[Array, " T"]:
    """Return the cell of each token in the cache of this device, or -1 for positions elsewhere.

    Args:
        step: the batch, with the cells in the whole cache.
        axis: mesh axis, or None for one device.
        context: number of devices that divide the positions between them.
    """
    if context == 1 or axis is None:
        return step.slot_mapping
    cell, number = step.slot_mapping, device_index(axis) % context
    return jnp.where((cell >= 0) & (cell % context == number), cell // context, -1)


def scales_of(kv: KVPages) -> dict[str, Float[Array, "P K S"]]:
    """Return the per-token scales of an int8 cache as keyword arguments of attention.

    The result is a dict with "k_scale" and "v_scale", or {} for a cache without per-token scales.
    """
    return {"k_scale": kv[2], "v_scale": kv[3]} if len(kv) == 4 else {}


def write_kv(
    new: tuple[Float[Array, "T K H"], Float[Array, "T K H"]],
    kv: KVPages,
    slot_mapping: Int32[Array, " T"],
    implementation: str,
    scales: dict[str, Any],
) -> KVPages:
    """Write keys and values to their cache pages and return the updated pages.

    Args:
        new: keys and values of T tokens, each [T, K, H].
        kv: cache pages of the layer.
        slot_mapping: cache cell of each token, page * page size + offset, or -1 to write no cell.
        implementation: implementation of the kernel.
        scales: "k_scale" and "v_scale" of each kv head of an fp8 cache. Unused for int8 pages,
            which have their own scales for each token.
    """
    if len(kv) == 4:
        return quantized_kv_write(*new, *kv, slot_mapping, implementation=implementation)
    return kv_write(*new, *kv, slot_mapping, implementation=implementation, **scales)


def _mean_squares(
    qkv: Float[Array, "*parts T K G_plus_2 H"],
    bias: Float[Array, "K G_plus_2 H"] | None,
    num_tokens: int,
    dtype: DTypeLike,
    norms: tuple[Norm, Norm],
) -> Float[Array, "T 2"]:
    """Return the mean square of each token's queries over all heads, and of its keys, [T, 2].

    Args:
        qkv: result of the fused projection, [T, K, G + 2, H], or its partial sums.
        bias: bias to add to partial sums, or None.
        num_tokens: T.
        dtype: the dtype to which the projection is rounded first.
        norms: the norms of queries and keys, which average over devices.
    """
    exact = accumulator(dtype)
    if qkv.ndim == 5:
        qkv = qkv.sum(axis=0)[:num_tokens]
        qkv = qkv if bias is None else qkv + bias.astype(exact)
    squares = jnp.square(qkv.astype(dtype).astype(exact))
    parts = squares[:, :, :-2], squares[:, :, -2]
    means = [
        norm.over_devices(part.reshape(num_tokens, -1).mean(axis=1))
        for norm, part in zip(norms, parts, strict=True)
    ]
    return jnp.stack(means, axis=1)


def growing(rope: Rope) -> YarnScaling | None:
    """Return the scaling of a rotary embedding if it says that queries grow with the position."""
    scaling = rope.scaling
    return scaling if isinstance(scaling, YarnScaling) and scaling.query_beta > 0 else None


def growth_at(
    scaling: YarnScaling, positions: Int32[Array, " T"], dtype: DTypeLike
) -> Float[Array, "T 1 1"]:
    """Return the factor of each token's queries, 1 + query_beta * log(1 + position // original)."""
    times = (positions // scaling.original_max_position_embeddings).astype(accumulator(dtype))
    return (1.0 + scaling.query_beta * jnp.log1p(times))[:, None, None].astype(dtype)
