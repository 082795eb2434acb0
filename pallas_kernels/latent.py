"""Attention over a cache of latents, which all heads share (DeepSeek-V2, arXiv:2405.04434).

A cell of the cache has the C numbers of a token: a latent of `rank` numbers and a rotated key. The
whole cell is the key of every head, and the latent is also the value. Queries were projected into
this space before, and the results are projected out of it afterwards.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import xla
from pallas_kernels.arguments import INT8
from pallas_kernels.implementation import choose, kernel
from pallas_kernels.latent_arguments import (
    LatentOptions,
    as_attention,
    latent_case,
    latent_write_case,
)


def latent_attention(
    query: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    query_start: jax.Array,
    kv_len: jax.Array,
    options: LatentOptions,
    *,
    one_query: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Compute causal attention of rows of any length over their pages of latents.

    Rows, positions and padding are as in ``ragged_paged_attention``.

    Args:
        query: [T,N,C] queries, bfloat16, float16, float32 or float64.
        pages: [P,1,S,C] cells. Their dtype is that of the queries, a narrower one, float8_e4m3fn or
            int8. On a CPU also uint8, the bits of float8_e4m3fn.
        page_table: i32[R,M] page ids. Entries after the last page of a row can be any id in [0, P).
        query_start: i32[R+1]. It starts at 0 and never decreases.
        kv_len: i32[R] positions per row, at most M*S.
        options: rank, scale, and the scale of the pages.
        one_query: whether row r has query r alone, or is padding. Then T is R. The CPU kernel
            ignores it.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        [T,N,rank] of the dtype of the queries, accumulated in float32 (float64 for float64). Zeros
        for padding.

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """
    arrays = as_attention(query, pages, page_table, query_start, kv_len)
    case = latent_case(arrays, options)
    if one_query and case.T != case.R:
        raise ValueError(f"query has T = {case.T} tokens; expected one for each of {case.R} rows")
    run = kernel(case.op, choose(implementation, case), case.platform)
    return run(arrays, options, one_query)


def latent_write(
    new: jax.Array,
    pages: jax.Array,
    slot_mapping: jax.Array,
    *,
    scale: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Store the latents of a step in their pages. The pages are written in place if donated.

    Args:
        new: [T,C] cells.
        pages: [P,1,S,C], any supported dtype except int8.
        slot_mapping: i32[T]. Token t is stored in page ``slot // S`` at offset ``slot % S``. Tokens
            with a slot outside [0, P*S), such as -1, are not stored. A slot may occur once.
        scale: f32[1]. Numbers are divided by it before they are stored. float8 saturates at 448.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        The new pages.

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """
    new, pages, slot_mapping = map(jnp.asarray, (new, pages, slot_mapping))
    if pages.dtype == INT8:
        raise ValueError("pages has dtype int8; quantized_latent_write stores in those")
    case = latent_write_case(new, pages, slot_mapping, scale)
    run = kernel(case.op, choose(implementation, case), case.platform)
    return run(new, pages, slot_mapping, scale)


def quantized_latent_write(
    new: jax.Array, pages: jax.Array, scale: jax.Array, slot_mapping: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Store the latents of a step as int8 codes, with one scale for each token, in plain JAX.

    Args:
        new: [T,C] cells.
        pages: i8[P,1,S,C] codes, from -127 to 127.
        scale: f32[P,1,S]. The stored number is the code times its scale.
        slot_mapping: as in ``latent_write``.

    Returns:
        The new pages and scales.

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """
    new, pages, scale, slot_mapping = map(jnp.asarray, (new, pages, scale, slot_mapping))
    if pages.dtype != INT8:
        raise ValueError(f"pages has dtype {pages.dtype}; allowed: int8")
    latent_write_case(new, pages, slot_mapping, scale)
    cells = new[:, None], new[:, None]
    written = xla.quantized_kv_write(*cells, pages, pages, scale, scale, slot_mapping)
    return written[0], written[2]
