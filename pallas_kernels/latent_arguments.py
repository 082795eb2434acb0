"""Arguments of attention over a cache of latents, and their checks while JAX traces the call."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np

from pallas_kernels.arguments import (
    AttentionArrays,
    AttentionOptions,
    Case,
    attention_case,
    kv_write_case,
)
from pallas_kernels.devices import target_device


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache_scale"],
    meta_fields=["rank", "scale"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class LatentOptions:
    """Options of ``latent_attention``. ``rank`` and ``scale`` are static, not arrays.

    Attributes:
        rank: the first numbers of a cell that are its value. The whole cell is its key.
        scale: factor of the scores.
        cache_scale: f32[1] factor of the stored numbers, or None for 1. Pages of int8 require
            f32[P,1,S], one factor per token.
    """

    rank: int
    scale: float
    cache_scale: jax.Array | None = None

    @property
    def attention(self) -> AttentionOptions:
        """The same options for attention whose keys and values are both whole cells."""
        return AttentionOptions(
            scale=self.scale, k_scale=self.cache_scale, v_scale=self.cache_scale
        )


@dataclasses.dataclass(frozen=True)
class LatentCase(Case):
    """Shapes and dtypes of a ``latent_attention`` call, by which its implementation is chosen.

    H is C, the numbers of a cell, and K is 1.

    Attributes:
        rank: the first numbers of a cell that are its value.
    """

    rank: int


def as_attention(
    query: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    query_start: jax.Array,
    kv_len: jax.Array,
) -> AttentionArrays:
    """Return the arrays of a ``latent_attention`` call for attention with one kv head.

    Keys and values are then whole cells, and the first `rank` numbers of a result are the result
    of the call. The arguments are as in ``latent_attention``.
    """
    return AttentionArrays.of(query, pages, pages, page_table, query_start, kv_len)


def latent_case(arrays: AttentionArrays, options: LatentOptions) -> LatentCase:
    """Check the arguments of a ``latent_attention`` call. Return its case for the target device.

    Args:
        arrays: arrays of the call, from `as_attention`.
        options: options of the call.

    Raises:
        ValueError: names the wrong argument, its shape or dtype, and the allowed values. Pages are
            called k_pages.
    """
    _check_single_head(arrays.k_pages)
    if options.scale is None or not np.isfinite(float(options.scale)):
        raise ValueError(f"scale is {options.scale!r}; expected a finite float")
    size = arrays.k_pages.shape[3]
    if not isinstance(options.rank, int) or not 1 <= options.rank <= size:
        raise ValueError(f"rank is {options.rank!r}; allowed: 1 to C = {size}")
    case = attention_case("ragged", arrays, options.attention)
    sizes: dict[str, Any] = {
        field.name: getattr(case, field.name) for field in dataclasses.fields(Case)
    }
    sizes |= {"op": "latent_attention", "rank": options.rank}
    return LatentCase(**sizes)


def latent_write_case(
    new: jax.Array, pages: jax.Array, slot_mapping: jax.Array, scale: jax.Array | None
) -> Case:
    """Check the arguments of a write of latents. Return its `Case` for the target device.

    Args:
        new: [T,C].
        pages: [P,1,S,C].
        slot_mapping: i32[T].
        scale: f32[1], f32[P,1,S] for pages of int8, or None.

    Raises:
        ValueError: names the wrong argument, its shape or dtype, and the allowed values. `new` is
            called k, and pages k_pages.
    """
    _check_single_head(pages)
    if new.ndim != 2:
        raise ValueError(f"new has {new.ndim} dimensions {tuple(new.shape)}; expected [T,C]")
    cells, scales = new[:, None], {"k_scale": scale, "v_scale": scale}
    case = kv_write_case(target_device(), cells, cells, pages, pages, slot_mapping, **scales)
    return dataclasses.replace(case, op="latent_write")


def _check_single_head(pages: jax.Array) -> None:
    if pages.ndim != 4 or pages.shape[1] != 1:
        raise ValueError(f"pages has shape {tuple(pages.shape)}; expected [P,1,S,C]")
