"""Attention over a cache of latents, and its writes, in plain JAX for every platform.

Attention over one kv head whose keys and values are both the whole cells has the results as the
first numbers of its own. XLA gathers the cells once.
"""

from __future__ import annotations

import jax

from pallas_kernels import xla
from pallas_kernels.arguments import AttentionArrays
from pallas_kernels.devices import target_device
from pallas_kernels.gpu import xla_attention
from pallas_kernels.latent_arguments import LatentOptions


def latent_attention(arrays: AttentionArrays, options: LatentOptions, one_query: bool) -> jax.Array:
    """Compute causal attention over pages of latents in plain JAX: [T,N,rank] of q's dtype.

    Args:
        arrays: arrays of the call, from `as_attention`.
        options: options of the call.
        one_query: whether row r has query r alone, or is padding.
    """
    module = xla_attention if target_device().is_gpu else xla
    if one_query:
        out = module.paged_decode_attention(arrays._replace(query_start=None), options.attention)
    else:
        out = module.ragged_paged_attention(arrays, options.attention)
    return out[..., : options.rank]


def latent_write(
    new: jax.Array, pages: jax.Array, slot_mapping: jax.Array, scale: jax.Array | None
) -> jax.Array:
    """Store latents [T,C] in their pages, in plain JAX. Return the new pages [P,1,S,C]."""
    cells = new[:, None]  # XLA leaves out the second of two equal writes
    scales = {"k_scale": scale, "v_scale": scale}
    return xla.kv_write(cells, cells, pages, pages, slot_mapping, **scales)[0]
